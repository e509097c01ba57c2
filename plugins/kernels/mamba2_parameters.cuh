// The parameters of the decode, window and prefill kernels of Mamba2: inputs, int32 scalars, outputs, as TensorRT
// plugins demand. tests/plugins/emulation reads them from here.
#pragma once
#include "readout_parts.cuh"

// x [T, H, P], dt [T, H], B and C [T, G, N]: the last dimension is dense, tokens are *_stride elements apart. A_log, D,
// dt_bias [H]. State parts, whose slots are *_stride elements apart. Then one number per row of the batch.
#define ENTRY_IN                                                                                                \
    const activation_t *x, const activation_t *dt, const activation_t *B, const activation_t *C,                \
        const float *A_log, const float *D, const float *dt_bias, STATE_PARTS_IN const activation_t *ring_x_in, \
        const activation_t *ring_B_in, const float *ring_dt_in, const int *error_flag_in, const int *seq_lens,  \
        const int *window_starts, const int *window_lens, const int *state_batch_indices
#define ENTRY_SCALARS                                                                                           \
    int num_tokens, int num_slots, int max_seq_len, int layer, ROUNDING_SCALARS int skip_prefill, int x_stride, \
        int dt_stride, int B_stride, int C_stride, STATE_PARTS_STRIDES int ring_x_stride, int ring_B_stride,    \
        int ring_dt_stride
// y [T, H, P], dense; the state parts again: in place, written through these.
#define ENTRY_OUT                                                                                                \
    activation_t *y, STATE_PARTS_OUT activation_t *ring_x, activation_t *ring_B, float *ring_dt, int *error_flag
