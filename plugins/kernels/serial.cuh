// Token by token with the state in registers: what prefill rows of the window kernels, the baseline and the
// serial-exact mode share. A warp holds whole rows of the state, each lane some columns of all of them.
#pragma once
#include "replay.cuh"

// Columns that one lane holds: SERIAL_CHUNKS groups of SERIAL_WIDTH neighbours.
constexpr int SERIAL_WIDTH = COLUMNS % 128 == 0 ? 4 : COLUMNS % 64 == 0 ? 2 : 1;
constexpr int SERIAL_CHUNKS = (COLUMNS + 32 * SERIAL_WIDTH - 1) / (32 * SERIAL_WIDTH);
constexpr int SERIAL_COLUMNS = SERIAL_CHUNKS * SERIAL_WIDTH;

DEVICE int serial_column(int i) {
    return (i / SERIAL_WIDTH * 32 + threadIdx.x % 32) * SERIAL_WIDTH + i % SERIAL_WIDTH;
}
DEVICE bool serial_column_exists(int i) { return COLUMNS % (32 * SERIAL_WIDTH) == 0 || serial_column(i) < COLUMNS; }

// Widens one row of COLUMNS activations.
DEVICE void serial_load(const activation_t* from, float (&values)[SERIAL_COLUMNS]) {
#pragma unroll
    for (int i = 0; i < SERIAL_COLUMNS; i++)
        values[i] = serial_column_exists(i) ? activation_to_float(from[serial_column(i)]) : 0.f;
}

// scales: of the rows, of an fp8 state.
template <int N>
DEVICE void serial_load_state(const state_t* from, float (&s)[N][SERIAL_COLUMNS], const unsigned char* scales) {
#pragma unroll
    for (int r = 0; r < N; r++) {
        float scale = 1.f;
        if constexpr (STATE_FORMAT == FORMAT_FP8) scale = e4m3_scale(scales[r]);
#pragma unroll
        for (int i = 0; i < SERIAL_COLUMNS; i += SERIAL_WIDTH) {
            const state_t* at = from + r * COLUMNS + serial_column(i);
            if constexpr (SERIAL_WIDTH == 4 && STATE_FORMAT == FORMAT_FP32) {
                const float4 v = *(const float4*)at;
                s[r][i] = v.x, s[r][i + SERIAL_WIDTH / 4] = v.y, s[r][i + SERIAL_WIDTH / 2] = v.z,
                s[r][i + SERIAL_WIDTH - 1] = v.w;
            } else {
#pragma unroll
                for (int e = 0; e < SERIAL_WIDTH; e++)
                    s[r][i + e] = serial_column_exists(i) ? state_to_float(at[e]) * scale : 0.f;
            }
        }
    }
}

template <int N>
DEVICE void serial_store_state(state_t* to, const float (&s)[N][SERIAL_COLUMNS]) {
#pragma unroll
    for (int r = 0; r < N; r++)
#pragma unroll
        for (int i = 0; i < SERIAL_COLUMNS; i += SERIAL_WIDTH) {
            state_t* at = to + r * COLUMNS + serial_column(i);
            if constexpr (SERIAL_WIDTH == 4 && STATE_FORMAT == FORMAT_FP32) {
                *(float4*)at = make_float4(s[r][i], s[r][i + SERIAL_WIDTH / 4], s[r][i + SERIAL_WIDTH / 2],
                                           s[r][i + SERIAL_WIDTH - 1]);
            } else {
#pragma unroll
                for (int e = 0; e < SERIAL_WIDTH; e++)
                    if (serial_column_exists(i)) at[e] = float_to_state(s[r][i + e]);
            }
        }
}

// Sum of the lanes' products, in every lane.
DEVICE float serial_dot(const float (&a)[SERIAL_COLUMNS], const float (&b)[SERIAL_COLUMNS]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SERIAL_COLUMNS; i++) sum += a[i] * b[i];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

// Every element as the checkpoint format holds it.
template <int N>
DEVICE void serial_round(float (&s)[N][SERIAL_COLUMNS]) {
    if constexpr (STATE_FORMAT != FORMAT_FP32) {
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = round_to_state(s[r][i]);
    }
}

// The checkpoint's rows, or zero where the row's sequence has none yet.
template <int N>
DEVICE void serial_begin(const Row& row, const state_t* from, float (&s)[N][SERIAL_COLUMNS],
                         const unsigned char* scales) {
    if (row.checkpoint_position > 0) {
        serial_load_state<N>(from, s, scales);
    } else {
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++) s[r][i] = 0.f;
    }
}

// Where a row's states go. checkpoint: stored there after `store_after` window tokens (-1: never). snapshots: after
// every window token, `snapshot_stride` elements apart, unless null. exact: where the checkpoint goes as it is, in
// fp32, instead. scales_in: of the rows that an fp8 checkpoint starts from.
struct SerialStores {
    state_t* checkpoint;
    int store_after;
    state_t* snapshots;
    int snapshot_stride;
    float* exact;
    const unsigned char* scales_in;
};

template <int N>
DEVICE void serial_store(const SerialStores& stores, int tokens, int first, const float (&s)[N][SERIAL_COLUMNS]) {
    if (stores.store_after == tokens && !stores.exact) serial_store_state<N>(stores.checkpoint + first * COLUMNS, s);
    if (stores.store_after == tokens && stores.exact)
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++)
                if (serial_column_exists(i)) stores.exact[(first + r) * COLUMNS + serial_column(i)] = s[r][i];
    if (stores.snapshots && tokens > 0)
        serial_store_state<N>(stores.snapshots + (long long)(tokens - 1) * stores.snapshot_stride + first * COLUMNS, s);
}
