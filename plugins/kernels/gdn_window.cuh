// Names of the Gated DeltaNet kernels for replay.cuh: S is [head_v_dim, head_k_dim] per value head.
#pragma once
#define HEADS NUM_V_HEADS
#define GROUPS NUM_K_HEADS
#define ROWS HEAD_V_DIM
#define COLUMNS HEAD_K_DIM
// head_k_dim^-1/2, applied to q in fp32.
#define QUERY_SCALE rsqrtf((float)COLUMNS)
#include "replay.cuh"
#include "gdn_serial.cuh"
