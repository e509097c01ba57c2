// Pieces of gdn_readout.cu for windows of two to eight tokens over an nvfp4 readout. State rows are the rows of every product
// of the matrix unit and the window's tokens its columns, those of k in one, of q in another: what one product leaves in a
// lane is what the next takes as its first operand, down to the window's own triangular system. A warp goes through its state
// rows 16 by 16 and, but for its head's coefficients, needs no other after the history has arrived.
#pragma once
#include "gdn_readout_rows.cuh"
#include "gdn_readout_tokens.cuh"

// Rows of v, and of the outputs that take their place; one more for what a matrix has beyond the window.
constexpr int V_ROWS = TILED && MAX_WINDOW < 8 ? MAX_WINDOW + 1 : MAX_WINDOW;
constexpr int V_STRIDE = TILED ? CTA_ROWS + 8 : CTA_ROWS;

// The readout of 16 rows on its way: rows g and 8 + g, the lane's columns.
struct TiledRows {
    u32 words[2][PAIRS];
    BlockScales scales[2];

    // codes, blocks: the lane's, of the first of the warp's rows; m: these among the warp's.
    DEVICE_MEMBER void load(const unsigned char* codes, const unsigned char* blocks, int m) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load_words(codes + (16 * m + 8 * n) * CODE_BYTES, words[n]);
            scales[n].load(blocks + (16 * m + 8 * n) * BLOCK_SCALE_BYTES);
        }
    }
    // Of pair i of blocks of tile n, as half2.
    DEVICE_MEMBER u32 scale_pair(int n, int i) const {
        constexpr int PER_WORD = BlockScales::PER_WORD;
        return e4m3_pair_to_fp16(scales[n].words[i / PER_WORD], PER_WORD == 2 && i % 2);
    }
};

// The lane's scales of blocks, of row g.
DEVICE const unsigned char* lane_blocks(const StateRows& rows) {
    return rows.block_scales + threadIdx.x % 32u / 4 * BLOCK_SCALE_BYTES;
}

// The same of a warp that begins: its first rows on their way, and the scales of all of them.
struct TiledReadout {
    static constexpr int COUNT = (CTA_ROWS + 31) / 32;
    TiledRows first;
    u32 row_scales[COUNT];

    DEVICE_MEMBER void load(const StateRows& from, unsigned char*) {
        const int lane = threadIdx.x % 32;
        const unsigned char *codes = lane_codes(from), *blocks = lane_blocks(from);
        first.load(codes, blocks, 0);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            row_scales[i] = CTA_ROWS % 32 == 0 || 32 * i + lane < CTA_ROWS ? from.row_scales[32 * i + lane] : 0u;
    }
    // Those of rows 16 m + g and + 8 beside each other; zeros of a state that is none.
    DEVICE_MEMBER void store_units(float* units, bool has_state) const {
        const int lane = threadIdx.x % 32;
        float* to = units + lane / 16 * 16 + lane % 8 * 2 + lane / 8 % 2;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (CTA_ROWS % 32 == 0 || 32 * i + lane < CTA_ROWS)
                to[32 * i] = power_of_two(has_state ? (int)row_scales[i] : 0);
    }
};

// The window's queries of the state as the second operands of every step, in fp16: k of token g, columns 4 t to
// 4 t + 3, then q. They are read again for every 16 rows: kept, they would cost 32 registers.
struct TiledQueries {
    const uint4* at;

    DEVICE_MEMBER void set(const u16* half_queries) {
        const int lane = threadIdx.x % 32;
        at = (const uint4*)(half_queries + token_of(lane / 4) * (2 * KEY_STRIDE)) + lane % 4;
    }
    DEVICE_MEMBER uint4 operator()(int step) const { return at[4 * step]; }
};

// What a lane has of 16 rows: rows g and g + 8, of tokens 2 t and 2 t + 1 each.
struct TiledSums {
    float of_k[4], of_q[4];
};

// products = 16 rows of the readout . queries, without the rows' scales.
DEVICE void multiply_tiles(TiledSums& products, const TiledRows& rows, const TiledQueries& queries) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        u32 codes[2][4], scales[2];
#pragma unroll
        for (int n = 0; n < 2; n++) widen_codes(rows.words[n][pair], codes[n]), scales[n] = rows.scale_pair(n, pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 q = queries(2 * pair + i);
            u32 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = multiply_fp16(codes[j % 2][2 * i + j / 2], both_halves(scales[j % 2], i));
            mma_16bit<FORMAT_FP16>(products.of_k, a[0], a[1], a[2], a[3], q.x, q.y);
            mma_16bit<FORMAT_FP16>(products.of_q, a[0], a[1], a[2], a[3], q.z, q.w);
        }
    }
}

// Where a lane finds what belongs to 16 rows, in shared memory.
struct TiledPlaces {
    const activation_t* v;
    const u16* past_u;
    const float* units;
    // The outputs take the place of v, u that of the history's first tokens'.
    activation_t* outputs;
    u16* u;

    DEVICE_MEMBER TiledPlaces(const float* own_units, activation_t* own_v, u16* own_u) {
        const int lane = threadIdx.x % 32;
        v = own_v + token_of(lane % 8) * V_STRIDE + (lane & 8);
        past_u = own_u + (lane % 8 + lane / 16 * 8) * OWN_STRIDE + (lane & 8);
        units = own_units + lane / 4 * 2;
        outputs = own_v + (lane % 8 < V_ROWS ? lane % 8 : V_ROWS - 1) * V_STRIDE + (lane & 8);
        u = own_u + ((U_PLANES == 2 ? lane / 16 * TOKEN_ROWS : 0) + lane % 8) * OWN_STRIDE + (lane & 8);
    }
    DEVICE_MEMBER void advance(int rows) { v += rows, past_u += rows, units += rows, outputs += rows, u += rows; }
};

// sums += u of eight tokens of the history . their coefficients for k and q.
DEVICE void add_eight(TiledSums& sums, const u16* past_u, const SplitPair& of_k, const SplitPair& of_q) {
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++) {
        u32 a[2];
        load_matrix_x2_transposed(a, past_u + plane * TOKEN_ROWS * OWN_STRIDE);
        mma_bf16_half(sums.of_k, a[0], a[1], of_k.high);
        mma_bf16_half(sums.of_q, a[0], a[1], of_q.high);
        if (plane) continue;  // the low halves' product is below fp32's rounding
        mma_bf16_half(sums.of_k, a[0], a[1], of_k.low);
        mma_bf16_half(sums.of_q, a[0], a[1], of_q.low);
    }
}
// sums += u of the history . its coefficients; past_u: of the 16 rows.
DEVICE void add_past(TiledSums& sums, const u16* past_u, const TiledCoefficients& c, int history) {
    if constexpr (SHORT_HISTORIES) {
        add_eight(sums, past_u, c.past[0][0], c.past[0][1]);
        if (!is_short_history(history)) add_eight(sums, past_u + 8 * OWN_STRIDE, c.past[0][2], c.past[0][3]);
        return;
    }
    if (history == 0) return;
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++)
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            const SplitPair(&b)[4] = c.past[step];
            u32 a[4];
            load_matrix_x4_transposed(a, past_u + (plane * TOKEN_ROWS + 16 * step) * OWN_STRIDE);
            mma_16bit<FORMAT_BF16>(sums.of_k, a[0], a[1], a[2], a[3], b[0].high, b[2].high);
            mma_16bit<FORMAT_BF16>(sums.of_q, a[0], a[1], a[2], a[3], b[1].high, b[3].high);
            if (plane) continue;
            mma_16bit<FORMAT_BF16>(sums.of_k, a[0], a[1], a[2], a[3], b[0].low, b[2].low);
            mma_16bit<FORMAT_BF16>(sums.of_q, a[0], a[1], a[2], a[3], b[1].low, b[3].low);
        }
}

// u and outputs of 16 rows, `row` further on, from the state's products.
DEVICE void solve_tiles(TiledSums& sums, const TiledPlaces& at, int row, const TiledCoefficients& c, int history) {
    u32 values[2];
    load_matrix_x2_transposed(values, at.v + row);
    const float2 units = *(const float2*)(at.units + row);
    const float unit[2] = {units.x, units.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float value = i % 2 ? activation_high(values[i / 2]) : activation_low(values[i / 2]);
        sums.of_k[i] = multiply_add(sums.of_k[i], unit[i / 2] * c.of_k[i % 2], value);
        sums.of_q[i] *= unit[i / 2] * c.of_q[i % 2];
    }
    add_past(sums, at.past_u + row, c, history);
    // What the state and the history leave of v, as a first operand: its high halves, then its low ones.
    SplitPair error[2], own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) error[i].split(sums.of_k[2 * i], sums.of_k[2 * i + 1]);
    mma_bf16_half(sums.of_k, error[0].high, error[1].high, c.u.low);
    mma_bf16_half(sums.of_q, error[0].high, error[1].high, c.output.low);
    mma_16bit<FORMAT_BF16>(sums.of_k, error[0].high, error[1].high, error[0].low, error[1].low, c.u.high, c.u.high);
    mma_16bit<FORMAT_BF16>(sums.of_q, error[0].high, error[1].high, error[0].low, error[1].low, c.output.high, c.output.high);
#pragma unroll
    for (int i = 0; i < 2; i++) own[i].split(sums.of_k[2 * i], sums.of_k[2 * i + 1]);
    // All of the warp have read the history's u and v of these rows: matrix loads are the warp's together.
    if constexpr (U_PLANES == 2) {
        const u32 u[4] = {own[0].high, own[1].high, own[0].low, own[1].low};
        store_matrix_x4_transposed(at.u + row, u);
    } else {
        store_matrix_x2_transposed(at.u + row, own[0].high, own[1].high);
    }
    store_matrix_x2_transposed(at.outputs + row, pack_activation(sums.of_q[0], sums.of_q[1]),
                               pack_activation(sums.of_q[2], sums.of_q[3]));
}

// u and outputs of all of the warp's rows, which take the places of the history's first u and of v.
DEVICE void solve_tiled(const TiledReadout& readout, const StateRows& rows, const TiledQueries& queries, TiledPlaces at,
                        const TiledCoefficients& c, int history, bool has_state) {
    const unsigned char *codes = lane_codes(rows), *blocks = lane_blocks(rows);
    TiledRows even = readout.first, odd;
    const auto solve_16 = [&](const TiledRows& own, int row) {
        TiledSums sums = {};
        if (has_state) multiply_tiles(sums, own, queries);
        solve_tiles(sums, at, row, c, history);
    };
#pragma unroll 1
    for (int m = 0; m < M_TILES; m += 2) {
        const bool is_pair = M_TILES % 2 == 0 || m + 1 < M_TILES;
        if (is_pair) odd.load(codes, blocks, 1);
        solve_16(even, 0);
        codes += 32 * CODE_BYTES, blocks += 32 * BLOCK_SCALE_BYTES;
        if (m + 2 < M_TILES) even.load(codes, blocks, 0);
        if (is_pair) solve_16(odd, 16);
        at.advance(32);
    }
}

// Stores what solve_tiled leaves: u of the window's tokens from entry `first` of the ring on, `ring` at the warp's first row of
// a slot, and outputs, `to` at the warp's first row of the window's first token.
DEVICE void store_tiled(const u16* u, const activation_t* outputs, int length, u16* ring, int first, activation_t* to) {
    constexpr u32 CHUNKS = CTA_ROWS / 8, U_CHUNKS = U_PLANES * CHUNKS, ENTRY_BYTES = HEADS * U_PLANES * ROWS * 2;
    const u32 lane = threadIdx.x % 32u;
    if constexpr (32 % U_CHUNKS == 0) {
        constexpr u32 TOKENS = 32 / CHUNKS, U_TOKENS = 32 / U_CHUNKS;
        const int w = lane / CHUNKS, u_w = lane / U_CHUNKS, offset = lane % CHUNKS * 8, plane = lane % U_CHUNKS / CHUNKS;
        const activation_t* from = outputs + w * V_STRIDE + offset;
        activation_t* output = to + (w * (HEADS * ROWS) + offset);
#pragma unroll
        for (int i = 0; i < MAX_WINDOW; i += TOKENS)
            store_if(i + w < length, output + i * (HEADS * ROWS), *(const uint4*)(from + i * V_STRIDE));
        const u16* from_u = u + (plane * TOKEN_ROWS + u_w) * OWN_STRIDE + offset;
        u16* ring_u = ring + plane * ROWS + offset;
#pragma unroll
        for (int i = 0; i < MAX_WINDOW; i += U_TOKENS)
            store_if(i + u_w < length, (void*)advance(ring_u, wrapped_entry(first + i + u_w), ENTRY_BYTES),
                     *(const uint4*)(from_u + i * OWN_STRIDE));
    } else {
        for_window_chunks<CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
            *(uint4*)(to + (w * (HEADS * ROWS) + offset)) = *(const uint4*)(outputs + w * V_STRIDE + offset);
        });
        for_window_chunks<U_PLANES * CTA_ROWS, 32>(length, lane, [&](int w, int at) {
            const int plane = at / CTA_ROWS, offset = at % CTA_ROWS;
            *(uint4*)((char*)(ring + plane * ROWS + offset) + (u64)wrapped_entry(first + w) * ENTRY_BYTES) =
                *(const uint4*)(u + (plane * TOKEN_ROWS + w) * OWN_STRIDE + offset);
        });
    }
}
