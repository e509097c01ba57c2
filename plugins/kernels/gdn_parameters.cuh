// The parameters of the decode, window and prefill kernels of Gated DeltaNet: inputs, int32 scalars, outputs, as
// TensorRT plugins demand. tests/plugins/emulation reads them from here.
#pragma once
#include "readout_parts.cuh"

// q and k [T, Hk, dk], v [T, Hv, dv], a and b [T, Hv]: the last dimension is dense, tokens are *_stride elements apart.
// A_log, dt_bias [Hv]. State parts, whose slots are *_stride elements apart. Then one number per row of the batch.
#define ENTRY_IN                                                                                               \
    const activation_t *q, const activation_t *k, const activation_t *v, const activation_t *a,                \
        const activation_t *b, const float *A_log, const float *dt_bias, STATE_PARTS_IN                        \
        const activation_t *ring_k_in, const u16 *ring_u_in, const float *ring_g_in, const int *error_flag_in, \
        const int *seq_lens, const int *window_starts, const int *window_lens, const int *state_batch_indices
#define ENTRY_SCALARS                                                                                           \
    int num_tokens, int num_slots, int max_seq_len, int layer, ROUNDING_SCALARS int skip_prefill, int q_stride, \
        int k_stride, int v_stride, int a_stride, int b_stride, STATE_PARTS_STRIDES int ring_k_stride,          \
        int ring_u_stride, int ring_g_stride
// o [T, Hv, dv], dense; the state parts again: in place, written through these.
#define ENTRY_OUT                                                                                      \
    activation_t *o, STATE_PARTS_OUT activation_t *ring_k, u16 *ring_u, float *ring_g, int *error_flag
