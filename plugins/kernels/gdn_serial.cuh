// Gated DeltaNet token by token: prefill rows of gdn_window, the baseline and the serial-exact mode.
#pragma once
#include "serial.cuh"

#define L2_NORM_EPS 1e-6f

// u in the ring: its high bf16 half, high and low halves, or exact (serial-exact mode).
#if U_EXACT
typedef float ring_u_t;
#else
typedef u16 ring_u_t;
#endif

// Everything of one value head that a step reads besides the state: packed window rows, then ring rows of the slot.
struct SerialInputs {
    const activation_t *q, *k, *v, *a, *b;
    int q_stride, k_stride, v_stride, a_stride, b_stride;
    const activation_t* ring_k;
    const ring_u_t* ring_u;
    const float* ring_g;
    float A, dt_bias;
};
// Those of a head, from the parameters of an entry: its window starts at token `start`.
#define SERIAL_INPUTS(start, slot, head, k_column, v_column, u_column, A, bias)                                        \
    {q + (offset_of(start, q_stride) + (k_column)),                                                                    \
     k + (offset_of(start, k_stride) + (k_column)),                                                                    \
     v + (offset_of(start, v_stride) + (v_column)),                                                                    \
     a + (offset_of(start, a_stride) + (head)),                                                                        \
     b + (offset_of(start, b_stride) + (head)),                                                                        \
     q_stride,                                                                                                         \
     k_stride,                                                                                                         \
     v_stride,                                                                                                         \
     a_stride,                                                                                                         \
     b_stride,                                                                                                         \
     ring_k_in + (offset_of(slot, ring_k_stride) + (k_column)),                                                        \
     ring_u_in + (offset_of(slot, ring_u_stride) + (u_column)),                                                        \
     ring_g_in + (offset_of(slot, ring_g_stride) + (head)),                                                            \
     A,                                                                                                                \
     bias}

// L2-normalised and rounded to the activation format, which is what the ring keeps.
DEVICE void serial_normalize(float (&values)[SERIAL_COLUMNS]) {
    const float scale = rsqrtf(serial_dot(values, values) + L2_NORM_EPS);
#pragma unroll
    for (int i = 0; i < SERIAL_COLUMNS; i++) values[i] = activation_to_float(float_to_activation(values[i] * scale));
}

DEVICE float ring_u_value(const ring_u_t* ring_u, int entry, int row) {
    const ring_u_t* at = ring_u + (entry * HEADS * U_PLANES) * ROWS + row;
#if U_EXACT
    return at[0];
#else
    const float high = bits_to_float((u32)at[0] << 16);
    return U_PLANES == 1 ? high : high + bits_to_float((u32)at[(U_PLANES - 1) * ROWS] << 16);
#endif
}

DEVICE void store_ring_u(ring_u_t* at, float u) {
#if U_EXACT
    at[0] = u;
#else
    at[0] = float_to_bf16(u);
    if (U_PLANES == 2) at[(U_PLANES - 1) * ROWS] = float_to_bf16(u - bits_to_float((u32)at[0] << 16));
#endif
}

template <int N>
DEVICE void serial_decay(float (&s)[N][SERIAL_COLUMNS], float decay) {
#pragma unroll
    for (int r = 0; r < N; r++)
#pragma unroll
        for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = multiply(decay, s[r][i]);
}

// Rows first .. first + N of the block: the history, then the window, writing o of every window token, and u to the
// ring if `ring_u` is not null (token p at entry p % RING_LEN). An output reads the state before it is rounded.
// ROUNDED: round after every history token, and after every window token of a row that is no prefill.
template <int N, bool ROUNDED>
DEVICE void serial_rows(const SerialInputs& in, const Row& row, int first, const state_t* from,
                        const SerialStores& stores, activation_t* output, ring_u_t* ring_u) {
    const int lane = threadIdx.x % 32;
    float s[N][SERIAL_COLUMNS], k[SERIAL_COLUMNS];
    serial_begin<N>(row, from + first * COLUMNS, s, stores.scales_in + first);
    for (int p = row.checkpoint_position; p < row.seq_len; p++) {
        const int entry = p % RING_LEN;
        serial_load(in.ring_k + entry * (GROUPS * COLUMNS), k);
        serial_decay<N>(s, decay_of(in.ring_g[entry * HEADS]));
#pragma unroll
        for (int r = 0; r < N; r++) {
            const float u = ring_u_value(in.ring_u, entry, first + r);
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = multiply_add(u, k[i], s[r][i]);
        }
        if (ROUNDED) serial_round<N>(s);
    }
    serial_store<N>(stores, 0, first, s);
    for (int w = 0; w < row.length; w++) {
        const float g =
            in.A * softplus(activation_to_float(in.a[(long long)w * in.a_stride]) + in.dt_bias);
        const float beta = sigmoid(activation_to_float(in.b[(long long)w * in.b_stride]));
        const activation_t* v = in.v + (long long)w * in.v_stride + first;
        float q[SERIAL_COLUMNS];
        serial_load(in.k + (long long)w * in.k_stride, k);
        serial_load(in.q + (long long)w * in.q_stride, q);
        serial_normalize(k);
        serial_normalize(q);
        serial_decay<N>(s, decay_of(g));
        float my_output = 0.f, my_u = 0.f;
#pragma unroll
        for (int r = 0; r < N; r++) {
            const float u = beta * (activation_to_float(v[r]) - serial_dot(s[r], k));
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = multiply_add(u, k[i], s[r][i]);
            const float o = QUERY_SCALE * serial_dot(s[r], q);
            if (lane == r) my_output = o, my_u = u;
        }
        if (lane < N) output[(long long)w * (HEADS * ROWS) + first + lane] = float_to_activation(my_output);
        if (ring_u && lane < N)
            store_ring_u(ring_u + ((row.seq_len + w) % RING_LEN * HEADS * U_PLANES) * ROWS + first + lane, my_u);
        if (ROUNDED && row.length <= MAX_WINDOW) serial_round<N>(s);
        serial_store<N>(stores, w + 1, first, s);
    }
}
