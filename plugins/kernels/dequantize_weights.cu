// Weights of 4 or 8 bits as activations, row by row. A warp owns 8 rows of a tile.
//
// Stamped in: THREADS, WEIGHT_FORMAT, ACTIVATION_FORMAT.
#define TILE_TOKENS 8  // no activations here
#include "weight_only.cuh"

KERNEL(THREADS, 1)
dequantize_weights(
    // tiles [row tiles, column tiles, TILE_BYTES] and the scale of one matrix; out [rows, columns]
    const unsigned char* tiles, const float* scale, int column_tiles, int rows, int columns, activation_t* out) {
    const int index = (int)blockIdx.x * THREADS + (int)threadIdx.x, lane = index % 32, part = index / 32 % 4, t = lane % 4;
    const int tile = index / 128, row = tile / column_tiles * 32 + part * 8 + lane / 4;
    const int first_column = tile % column_tiles * TILE_K;
    if (tile / column_tiles * 32 >= rows) return;
    tiles += (long long)tile * TILE_BYTES;
    const WeightRows held = load_rows(part_codes(tiles, part / 2), part_scales(tiles, part / 2), lane);
    const u32 factors = HAS_BLOCK_SCALES ? nvfp4_factors(part % 2 ? held.scales >> 16 : held.scales) : 0u;
    const float unit = DECODED_UNIT * scale[0];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        if (first_column + 32 * i >= columns) return;
        u32 pairs[4], words[4];
        const u32 own_factors = HAS_BLOCK_SCALES ? shuffle_quad(factors, i) : 0u;
#pragma unroll
        for (int step = 0; step < 2; step++)
            decode_step(part % 2 ? held.codes[1] : held.codes[0], own_factors, i, step, pairs[2 * step], pairs[2 * step + 1]);
        // Of four chunks of 8 columns each lane has a pair; lane t takes chunk t.
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
            const int give = (t - turn) & 3;
            const u32 own = give == 0 ? pairs[0] : give == 1 ? pairs[1] : give == 2 ? pairs[2] : pairs[3];
            const u32 got = shuffle_quad(own, (t + turn) & 3);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (((t + turn) & 3) == e) words[e] = got;
        }
        float values[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            values[e] = (e % 2 ? activation_high(words[e / 2]) : activation_low(words[e / 2])) * unit;
        if (row < rows) store_chunk(out + (long long)row * columns + first_column + 32 * i + 8 * t, values);
    }
}
