// Weights of 4 or 8 bits as activations, row by row. A warp owns 8 rows of a tile, which pass through shared memory so
// that 16 lanes store a row of 4-bit weights together.
//
// Stamped in: THREADS, WEIGHT_FORMAT, ACTIVATION_FORMAT.
#define TILE_TOKENS 8  // no activations here
#include "weight_only.cuh"

constexpr int PITCH = TILE_K * 2 + 16;  // of rows in shared memory, in bytes: four banks further from row to row

KERNEL(THREADS, 1)
dequantize_weights(
    // tiles [row tiles, column tiles, TILE_BYTES] and the scale of one matrix; out [rows, columns]
    const unsigned char* tiles, const float* scale, int column_tiles, int rows, int columns, activation_t* out) {
    DYNAMIC_SHARED(memory);
    const int tid = (int)threadIdx.x, lane = tid % 32, index = ((int)blockIdx.x * THREADS + tid) / 32, part = index % 4;
    const int row_tile = index / 4 / column_tiles, first_row = row_tile * 32 + part * 8;
    const int first_column = index / 4 % column_tiles * TILE_K;
    if (first_row >= rows) return;
    tiles += (long long)(index / 4) * TILE_BYTES;
    const uint4 codes = ((const uint4*)tiles)[part * 32 + lane];
    const float unit = DECODED_UNIT * scale[0];
    u32 factors = 0;
    if (HAS_BLOCK_SCALES) factors = nvfp4_factors(((const u32*)part_scales(tiles, part / 2))[lane] >> part % 2 * 16);

    unsigned char* held = memory + tid / 32 * (8 * PITCH);
    u32* words = (u32*)(held + lane / 4 * PITCH) + lane % 4;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        u32 pairs[4];
        const u32 own_factors = HAS_BLOCK_SCALES ? shuffle_quad(factors, i) : 0u;
#pragma unroll
        for (int step = 0; step < 2; step++)
            decode_step(codes, own_factors, i, step, pairs[2 * step], pairs[2 * step + 1]);
#pragma unroll
        for (int p = 0; p < 4; p++)
            words[16 * i + 4 * p] = pack_activation(activation_low(pairs[p]) * unit, activation_high(pairs[p]) * unit);
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < X_CHUNKS / 4; i++) {
        const int row = (i * 32 + lane) / X_CHUNKS, column = (i * 32 + lane) % X_CHUNKS * 8;
        if (first_row + row < rows && first_column + column < columns)
            *(uint4*)(out + (long long)(first_row + row) * columns + first_column + column) =
                *(const uint4*)(held + row * PITCH + column * 2);
    }
}
