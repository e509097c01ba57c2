// Mamba2 token by token: prefill rows of mamba2_window, the baseline and the serial-exact mode.
#pragma once
#include "serial.cuh"

// Everything of one head that a step reads besides the state: packed window rows, then ring rows of the slot.
struct SerialInputs {
    const activation_t *x, *dt, *B, *C;
    int x_stride, dt_stride, B_stride, C_stride;
    const activation_t *ring_x, *ring_B;
    const float* ring_dt;
    float A, D, dt_bias;
};

// s = decay s + (x dt) B^T, with the same two roundings wherever it runs.
template <int N>
DEVICE void serial_update(float (&s)[N][SERIAL_COLUMNS], float A, float dt, const activation_t* x,
                          const activation_t* B) {
    float b[SERIAL_COLUMNS];
    serial_load(B, b);
    const float decay = decay_of(A * dt);
#pragma unroll
    for (int r = 0; r < N; r++) {
        const float xdt = activation_to_float(x[r]) * dt;
#pragma unroll
        for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = multiply_add(decay, s[r][i], multiply(xdt, b[i]));
    }
}

// Rows first .. first + N of the block: the history, then the window, writing y of every window token. An output reads
// the state before it is rounded. ROUNDED: round after every history token, and after every window token of a row that
// is no prefill.
template <int N, bool ROUNDED>
DEVICE void serial_rows(const SerialInputs& in, const Row& row, int first, const state_t* from,
                        const SerialStores& stores, activation_t* output) {
    float s[N][SERIAL_COLUMNS];
    serial_begin<N>(row, from + first * COLUMNS, s, stores.scales_in + first);
    for (int p = row.checkpoint_position; p < row.seq_len; p++) {
        const int entry = p % RING_LEN;
        serial_update<N>(s, in.A, in.ring_dt[entry * HEADS], in.ring_x + entry * (HEADS * ROWS) + first,
                         in.ring_B + entry * (GROUPS * COLUMNS));
        if (ROUNDED) serial_round<N>(s);
    }
    serial_store<N>(stores, 0, first, s);
    for (int w = 0; w < row.length; w++) {
        const activation_t* x = in.x + (long long)w * in.x_stride + first;
        const float dt = softplus(activation_to_float(in.dt[(long long)w * in.dt_stride]) + in.dt_bias);
        serial_update<N>(s, in.A, dt, x, in.B + (long long)w * in.B_stride);
        float c[SERIAL_COLUMNS], mine = 0.f;
        serial_load(in.C + (long long)w * in.C_stride, c);
#pragma unroll
        for (int r = 0; r < N; r++) {
            const float y = serial_dot(s[r], c) + in.D * activation_to_float(x[r]);
            if (threadIdx.x % 32 == r) mine = y;
        }
        if (threadIdx.x % 32 < N)
            output[(long long)w * (HEADS * ROWS) + first + threadIdx.x % 32] = float_to_activation(mine);
        if (ROUNDED && row.length <= MAX_WINDOW) serial_round<N>(s);
        serial_store<N>(stores, w + 1, first, s);
    }
}
