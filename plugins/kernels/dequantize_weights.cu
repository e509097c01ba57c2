// Weights of 4 or 8 bits as activations, row by row. A thread owns what a lane owns of a row of a tile.
//
// Stamped in: THREADS, WEIGHT_FORMAT, ACTIVATION_FORMAT.
#include "weight_only.cuh"

KERNEL(THREADS, 1)
dequantize_weights(
    // tiles [row tiles, column tiles, TILE_BYTES] and the scale of one matrix; out [rows, columns]
    const unsigned char* tiles, const float* scale, int column_tiles, int rows, int columns, activation_t* out) {
    const int index = (int)blockIdx.x * THREADS + (int)threadIdx.x, lane = index % 32, part = index / 32 % 4;
    const int tile = index / 128, row = tile / column_tiles * 32 + part * 8 + lane / 4;
    const int column = tile % column_tiles * TILE_K + lane % 4 * (TILE_K / 4);
    if (row >= rows) return;
    const WeightRows held = load_rows(tiles + (long long)tile * TILE_BYTES, part / 2, lane);
    const u32 factors = HAS_BLOCK_SCALES ? nvfp4_factors(part % 2 ? held.scales >> 16 : held.scales) : 0u;
    const float unit = DECODED_UNIT * scale[0];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        if (column + 8 * i >= columns) return;
        u32 pairs[4];
        decode_unit(part % 2 ? held.codes[1] : held.codes[0], factors, i, pairs);
        float values[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            values[e] = (e % 2 ? activation_high(pairs[e / 2]) : activation_low(pairs[e / 2])) * unit;
        store_chunk(out + (long long)row * columns + column + 8 * i, values);
    }
}
