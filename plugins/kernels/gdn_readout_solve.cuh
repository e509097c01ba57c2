// Pieces of gdn_readout.cu: the window's u and outputs, from what the state and the history add up to.
#pragma once
#include "gdn_readout_rows.cuh"

// Two rows of the warp that one lane solves for: neighbours or, for a window of one token, those whose sums the lane has.
constexpr int ROW_STEP = ONE ? 8 : 1;
DEVICE int first_of_pair(int share) {
    const int lane = threadIdx.x % 32;
    return ONE ? 16 * (lane % 4 + 4 * share) + lane / 4 : 64 * share + 2 * lane;
}
DEVICE u32 load_pair(const u16* at) { return ONE ? at[0] | (u32)at[ROW_STEP] << 16 : *(const u32*)at; }
DEVICE void store_pair(u16* at, u32 word, bool both) {
    if constexpr (ONE) {
        at[0] = (u16)word;
        if (both) at[ROW_STEP] = (u16)(word >> 16);
    } else {
        *(u32*)at = word;
    }
}
// Of a window of one token, whose lanes have no neighbouring rows: what the warp has staged, in whole sectors.
DEVICE void store_staged(u16* ring, u16* output, const u16* staged_u, const u16* staged_output) {
    constexpr int CHUNKS = CTA_ROWS / 8;
    for (int i = threadIdx.x % 32; i < (U_PLANES + 1) * CHUNKS; i += 32) {
        const int plane = i / CHUNKS, offset = i % CHUNKS * 8;
        const bool is_u = plane < U_PLANES;
        *(uint4*)((is_u ? ring + plane * ROWS : output) + offset) =
            *(const uint4*)((is_u ? staged_u + plane * OWN_STRIDE : staged_output) + offset);
    }
}

// What the state and the history add up to, on its way to the lanes that solve.
struct Sums {
    float past[ONE ? SHARES : 1][4];  // of one token: the history's part, for the lane's own rows: q and k of each
    float factor[QUERY_TILES][2];     // decays and scale of queries 2 t and 2 t + 1 of every eight

    DEVICE_MEMBER void compute(float* stage, StateProducts& products, const float (&decays)[MAX_WINDOW], bool has_state,
                               const u16* u, const Coefficients& c) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4 * (ONE ? SHARES : 1); i++) past[i / 4][i % 4] = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * QUERY_TILES; i++) {
            const int query = query_of(i / 2, 2 * t + i % 2);
            factor[i / 2][i % 2] = decays[query % MAX_WINDOW] * query_scale(query);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            if constexpr (ONE) {
                // All lanes of a quad get the same; the one that solves for these rows keeps it.
                float sum[4] = {};
#pragma unroll
                for (int step = 0; step < TOKEN_STEPS; step++) add_history(sum, u, c.past[0][step], step, m);
#pragma unroll
                for (int i = 0; i < 4; i++) past[ONE ? m / 4 : 0][i] = t == m % 4 ? sum[i] : past[ONE ? m / 4 : 0][i];
            } else {
                float(&sum)[QUERY_TILES][4] = products.value[ONE ? 0 : m];
#pragma unroll
                for (int i = 0; i < 4 * QUERY_TILES; i++)
                    sum[i / 4][i % 4] = has_state ? sum[i / 4][i % 4] * factor[i / 4][i % 2] : 0.f;
#pragma unroll
                for (int i = 0; i < TOKEN_STEPS * QUERY_TILES; i++)
                    add_history(sum[i % QUERY_TILES], u, c.past[i % QUERY_TILES][i / QUERY_TILES], i / QUERY_TILES, m);
#pragma unroll
                for (int i = 0; i < 4 * QUERY_TILES; i++) {
                    const int query = i / 4 * 8 + 2 * t + i % 2, half = i / 2 % 2;
                    if (rows_exist(m, half) && query < QUERIES)
                        stage[staged_tile(m) + (8 * half + g) * STAGE_STRIDE + query] = sum[i / 4][i % 4];
                }
            }
        }
    }
    // Outputs and predictions of a row of the lane, from the state and the history.
    DEVICE_MEMBER void take(float (&outputs)[MAX_WINDOW], float (&predicted)[MAX_WINDOW], const float* stage, int row,
                            const Readout& readout, bool has_state, int share, int half) const {
        const float* staged = stage + staged_tile(row / 16) + row % 16 * STAGE_STRIDE;
        if constexpr (ONE) {
            const float4 first = ((const float4*)staged)[0], second = ((const float4*)staged)[1];
            const float unit = readout.scale(2 * share + half);
            const float of_q = ((first.x + first.z) + (second.x + second.z)) * unit * factor[0][0];
            const float of_k = ((first.y + first.w) + (second.y + second.w)) * (U_FROM_CHECKPOINT ? 1.f : unit) * factor[0][1];
            outputs[0] = past[ONE ? share : 0][2 * half] + (has_state ? of_q : 0.f);
            predicted[0] = past[ONE ? share : 0][2 * half + 1] + (has_state ? of_k : 0.f);
        } else {
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) outputs[w] = staged[w], predicted[w] = staged[MAX_WINDOW + w];
        }
    }
};

// u of a row's tokens one after the other, then their outputs. What tokens behind the window's end compute is never stored.
DEVICE void solve(float (&outputs)[MAX_WINDOW], float (&u)[MAX_WINDOW], float (&predicted)[MAX_WINDOW],
                  const float (&v)[MAX_WINDOW], const float (&beta)[MAX_WINDOW], const float* pairs, float pair) {
#pragma unroll
    for (int w = 0; w < MAX_WINDOW; w++) {
#pragma unroll
        for (int j = 0; j < w; j++) {
            predicted[w] += pairs[(MAX_WINDOW + w) * WINDOW_ROWS + j] * u[j];
            outputs[w] += pairs[w * WINDOW_ROWS + j] * u[j];
        }
        u[w] = beta[w] * (v[w] - predicted[w]);
        outputs[w] += (ONE ? pair : pairs[w * WINDOW_ROWS + w]) * u[w];
    }
}

// u and outputs of all rows of the warp, stored where u_of(token) and o_of(token) say: of the warp's first row. staged_u: the
// history's, which has been read.
template <class RingRows, class OutputRows>
DEVICE void solve_rows(const Sums& sums, const float* stage, const Readout& readout, bool has_state, activation_t* v,
                       const Gates& gates, const float* pairs, float pair, int length, u16* staged_u, const RingRows& u_of,
                       const OutputRows& o_of) {
#pragma unroll
    for (int share = 0; share < SHARES; share++) {
        const int first = first_of_pair(share);
        const bool both = first + ROW_STEP < CTA_ROWS;
        if (first >= CTA_ROWS) continue;
        float outputs[2][MAX_WINDOW], u[2][MAX_WINDOW];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float predicted[MAX_WINDOW], values[MAX_WINDOW];
            sums.take(outputs[half], predicted, stage, first + half * ROW_STEP, readout, has_state, share, half);
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) {
                const u32 word = load_pair(v + w * CTA_ROWS + first);
                values[w] = half ? activation_high(word) : activation_low(word);
            }
            solve(outputs[half], u[half], predicted, values, gates.beta, pairs, pair);
        }
#pragma unroll
        for (int w = 0; w < MAX_WINDOW; w++) {
            if (w >= length) continue;
            u16* at = (ONE ? staged_u : u_of(w)) + first;
            const u32 high = pack_bf16(u[0][w], u[1][w]);
            store_pair(at, high, both);
            if (U_PLANES == 2)
                store_pair(at + (U_PLANES - 1) * (ONE ? OWN_STRIDE : ROWS), pack_bf16(u[0][w] - bf16_low(high), u[1][w] - bf16_high(high)), both);
            // Whoever has read these rows' v is the same lane.
            store_pair((ONE ? v : o_of(w)) + first, pack_activation(outputs[0][w], outputs[1][w]), both);
        }
    }
    if constexpr (ONE) {
        sync_warp();
        store_staged(u_of(0), o_of(0), staged_u, v);
    }
}
