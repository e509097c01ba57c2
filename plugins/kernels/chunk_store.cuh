// What a prefill kernel reads and leaves of a state in formats of the readout kernels: checkpoints of fp8 or rounded
// stochastically, and readouts (plugins/contract.py, "State formats"). The build stamps in READOUT_FORMAT and STOCHASTIC
// for these; without them the checkpoint is what chunk.cuh stores.
#pragma once
#include "chunk.cuh"
#include "readout_parts.cuh"
#ifdef READOUT_FORMAT
#include "readout_store.cuh"

// Of the warp's 16 rows in fp32, on their way from the lanes that computed them to those that store them.
constexpr int STORE_SIZE = 16 * COLUMNS * (int)sizeof(float);

// As load_state of chunk.cuh; from: the warp's first row.
DEVICE void load_rows(float (&s)[COLUMN_TILES][4], const StateRows& from, int rows, bool has_state) {
    if constexpr (STATE_FORMAT != FORMAT_FP8) {
        load_state(s, from.checkpoint, rows, has_state);
    } else {
        const int row = lane_row(), t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool valid = has_state && row + 2 * half < rows;
            const StateRows own = from.from(row + 2 * half);
            const float scale = valid ? e4m3_scale(own.checkpoint_scales[0]) : 0.f;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                const u32 pair = valid ? *(const u16*)(own.checkpoint + n * 8 + 2 * t) : 0u;
                s[n][2 * half] = valid ? e4m3_to_float(pair & 0xffu) * scale : 0.f;
                s[n][2 * half + 1] = valid ? e4m3_to_float(pair >> 8) * scale : 0.f;
            }
        }
    }
}

// stage: STORE_SIZE bytes of the warp's own. to: its first row, which is row `first_row` of the head.
DEVICE void store_rows(const float (&s)[COLUMN_TILES][4], float* stage, const StateRows& to, int rows, int first_row,
                       const RoundingKey& key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
            *(float2*)(stage + (lane_row() + 2 * half) * COLUMNS + n * 8 + 2 * t) =
                make_float2(s[n][2 * half], s[n][2 * half + 1]);
    sync_warp();
#pragma unroll 1
    for (int row = g; row < rows && row < 16; row += 8) {
        RowValues values;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            const float4 four = *(const float4*)(stage + row * COLUMNS + i * 16 + 4 * t);
            float* own = values[i / 2] + i % 2 * 4;
            own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
        }
        store_row(values, to, row, first_row + row, key, [] {});
    }
}
#endif
