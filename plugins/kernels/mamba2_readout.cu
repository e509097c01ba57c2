// Mamba2 over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows of up to
// MAX_WINDOW tokens, and longer (prefill) rows token by token. One thread block per (row of the batch, CTA_WARPS warps of
// CTA_ROWS state rows each). A step that flushes folds, and then goes on as if the history had been empty.
// See plugins/reference/mamba2.py and readout.cuh.
//
// Stamped in: NHEADS, HEADDIM, DSTATE, NGROUPS, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT,
// STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, BULK_COPY, MIN_CTAS, EARLY_ROWS, SHARED_BYTES.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "early_rows.cuh"
#include "mamba2_readout_window.cuh"
#include "mamba2_serial.cuh"
#include "readout_flush.cuh"
#include "readout_parts.cuh"
#include "readout_stage.cuh"

struct Shared {
    alignas(128) unsigned char tile[TILE_SIZE];  // readout; in a flush first the fold's keys; states of a prefill row
    alignas(16) activation_t B[TOKEN_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t C[MAX_WINDOW * TOKEN_STRIDE];
    alignas(16) u16 half_C[MAX_WINDOW * KEY_STRIDE];
    alignas(16) activation_t x[TOKEN_ROWS * X_STRIDE];
    alignas(16) activation_t y[MAX_WINDOW * X_STRIDE];
    alignas(8) float weights[WARPS * TOKEN_ROWS];
    float unit_C[MAX_WINDOW];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

KERNEL(THREADS, MIN_CTAS)
mamba2_readout(
    // [T, H, P], [T, H], [T, G, N], [T, G, N]: the last dimension is dense, tokens are *_stride elements apart
    const activation_t* x, const activation_t* dt, const activation_t* B, const activation_t* C,
    // [H]
    const float* A_log, const float* D, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    STATE_PARTS_IN const activation_t* ring_x_in, const activation_t* ring_B_in, const float* ring_dt_in,
    const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, ROUNDING_SCALARS int skip_prefill, int x_stride,
    int dt_stride, int B_stride, int C_stride, STATE_PARTS_STRIDES int ring_x_stride, int ring_B_stride, int ring_dt_stride,
    // [T, H, P] dense, then the state parts again: in place, written through these
    activation_t* y, STATE_PARTS_OUT activation_t* ring_x, activation_t* ring_B, float* ring_dt, int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 row_index = row_at(blockIdx.y, gridDim.y, [&](u32 row) {
        const int slot = state_batch_indices[row], tile = (int)blockIdx.x * (WARPS * CTA_TILES);
        const bool has_slot = slot >= 0 && slot < num_slots;
        return has_slot && may_fold(seq_lens[row], position_in[offset_of(slot, position_stride) + tile], window_lens[row]);
    });
    // Once; a second time after a flush, from what it stored. Kept through the fold, values would cost registers.
#pragma unroll 1
    for (int flushed = 0;; flushed = 1) {
        u32 thread = threadIdx.x;  // unsigned, so that dividing it takes one instruction
        hold_until_here(thread);
        const int tid = (int)thread, lane = (int)(thread % 32), warp = (int)(thread / 32);
        const int g = (int)(thread % 32 / 4), t = (int)(thread % 4);
        // A part is the CTA_ROWS rows of a head that a warp owns; rows count through all heads. A lane holds the scalars of
        // one token.
        const int first_part = (int)blockIdx.x * WARPS, part = first_part + warp, head = part / CTAS_PER_HEAD;
        const int group = first_part / CTAS_PER_HEAD / HEADS_PER_GROUP, B_column = group * COLUMNS;
        const int block_row = first_part * CTA_ROWS, own_row = part * CTA_ROWS;
        const bool first_of_group = first_part % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0;

        // All that is known before the slot, then all that the slot tells: nothing here waits for more than the row's slot.
        const int slot = state_batch_indices[row_index], seq_len = seq_lens[row_index];
        const int start = window_starts[row_index], window_length = window_lens[row_index];
        const bool has_slot = slot >= 0 && slot < num_slots;
        int position_now = 0;
        if (has_slot) {
            position_now = flushed ? seq_len : position_in[offset_of(slot, position_stride) + first_part * CTA_TILES];
            RowScales::prefetch(STATE_ROWS(slot).from(own_row));
        }
        const float log_A = A_log[head], bias = dt_bias[head], D_head = D[head];
        const Row row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len,
                                 MAX_HISTORY);
        if (!row.active || row.length > MAX_WINDOW) {
            if (!row.active) {
                if (row.error && tid == 0) atomic_or(error_flag, row.error);
                if (!row.in_range) return;
                constexpr int CHUNKS = CTA_STATE_ROWS / 8;
                for (int i = tid; i < row.length * CHUNKS; i += THREADS)
                    *(uint4*)(y + (offset_of(row.start + i / CHUNKS, HEADS * ROWS) + (block_row + i % CHUNKS * 8))) =
                        make_uint4(0, 0, 0, 0);
                return;
            }
            if (skip_prefill) return;
            float* stage = (float*)shared.tile;
            for (int tile = 0; tile < WARPS * CTA_TILES; tile++) {
                // Whole tiles one after the other, all warps on each.
                const int rows_before = block_row + tile * TILE_ROWS, tile_head = rows_before / ROWS;
                const SerialInputs inputs = {
                    x + (long long)row.start * x_stride + rows_before,
                    dt + (long long)row.start * dt_stride + tile_head,
                    B + (long long)row.start * B_stride + B_column,
                    C + (long long)row.start * C_stride + B_column,
                    x_stride, dt_stride, B_stride, C_stride,
                    ring_x_in + (long long)slot * ring_x_stride + rows_before,
                    ring_B_in + (long long)slot * ring_B_stride + B_column,
                    ring_dt_in + (long long)slot * ring_dt_stride + tile_head,
                    -expf(A_log[tile_head]), D[tile_head], dt_bias[tile_head]};
                const StateRows rows = STATE_ROWS(slot).from(rows_before);
                const SerialStores stores = {nullptr, row.length, nullptr, 0, stage, rows.checkpoint_scales};
                for (int first = warp * 4; first < TILE_ROWS; first += WARPS * 4)
                    serial_rows<4, false>(inputs, row, first, rows.checkpoint, stores,
                                          y + (long long)row.start * (HEADS * ROWS) + rows_before);
                sync_threads();
                store_staged_tile(stage, rows, rows_before % ROWS, ROUNDING_KEY(tile_head, row.seq_len + row.length));
                sync_threads();
            }
            if (lane < CTA_TILES)
                position[offset_of(slot, position_stride) + part * CTA_TILES + lane] = row.seq_len + row.length;
            return;
        }

        const int length = row.length, history = row.seq_len - row.checkpoint_position;
        const bool flush = history > 0 && history + length > BUFFER_LEN;
        if (flushed) readout_copy_again(shared.tile, own_row - block_row, STATE_ROWS(slot).from(own_row));
        else if (!flush) readout_copy_start(shared.tile, STATE_ROWS(slot).from(block_row), &shared.barrier);
        float raw_dt = 0.f, dt_past = 0.f;
        if (lane < length) raw_dt = activation_to_float(dt[offset_of(start + lane, dt_stride) + head]);
        if (lane < history)
            dt_past = ring_dt_in[offset_of(slot, ring_dt_stride) +
                                 (wrapped(row.checkpoint_position % RING_LEN + lane) * HEADS + head)];
        // Token rows in shared memory: of the history, of the window unless it must wait, zeros; of B only a fold needs them.
        const int fresh = flush ? 0 : length, first_entry = row.checkpoint_position % RING_LEN;
        stage_history<COLUMNS, TOKEN_STRIDE, GROUPS * COLUMNS, THREADS>(
            shared.B, ring_B_in + (offset_of(slot, ring_B_stride) + B_column), first_entry, history,
            flush ? history : TOKEN_ROWS, thread);
        stage_wide_history<CTA_STATE_ROWS, X_STRIDE, HEADS * ROWS>(
            shared.x, ring_x_in + (offset_of(slot, ring_x_stride) + block_row), first_entry, history, history + fresh, thread);
        for_window_chunks<COLUMNS, THREADS>(fresh, thread, [&](int w, int offset) {
            copy_async_16(shared.B + ((history + w) * TOKEN_STRIDE + offset),
                          B + (offset_of(start + w, B_stride) + (B_column + offset)), true);
        });
        for_window_rows<CTA_STATE_ROWS>(fresh, thread, [&](int w, int offset) {
            copy_async_16(shared.x + ((history + w) * X_STRIDE + offset),
                          x + (offset_of(start + w, x_stride) + (block_row + offset)), true);
        });
        if (flush && row.checkpoint_position > 0 && lane == 0)
            prefetch(STATE_ROWS(slot).checkpoint + own_row * COLUMNS, CTA_ROWS * COLUMNS * sizeof(state_t));
        // The window's C as it is and in fp16, while the rings travel.
#pragma unroll
        for (int n = 0; n < (MAX_WINDOW + WARPS - 1) / WARPS; n++) {
            const int w = n * WARPS + warp;
            if (w >= length) break;
            halve_row<true>(shared.half_C + w * KEY_STRIDE, shared.unit_C + w,
                            C + (offset_of(start + w, C_stride) + B_column), shared.C + w * TOKEN_STRIDE);
        }
        const float A = -expf(log_A), dt_new = lane < length ? softplus(raw_dt + bias) : 0.f;
        const bool has_state = row.checkpoint_position > 0;
        // Log decays: `suffix` from behind history token `lane` - 1 to the history's end, `prefix` of the window up to token
        // `lane`. Every sum runs over its own terms: differences of one running sum would cancel.
        float suffix = A * dt_past, prefix = A * dt_new;
#pragma unroll
        for (int delta = 1; delta < MAX_HISTORY; delta *= 2) {
            const float after = shuffle_down(suffix, delta);
            if (lane + delta < 32) suffix += after;
        }
#pragma unroll
        for (int delta = 1; delta < MAX_WINDOW; delta *= 2) {
            const float before = shuffle_up(prefix, delta);
            if (lane >= delta) prefix += before;
        }
        const float total = shuffle_from(suffix, 0), behind = shuffle_down(suffix, 1);
        const float weight = dt_past * decay_of(lane < 31 ? behind : 0.f);  // of history token `lane`, zero beyond
        copy_async_wait();
        sync_threads();
        if (!flushed && !flush) readout_copy_wait(&shared.barrier);

        RowScales row_scales;
        row_scales.load(STATE_ROWS(slot).from(own_row));
        if (flush) {
            build_fold_keys<TOKEN_STRIDE>((uint4*)shared.tile, shared.B);
            sync_threads();
            // In shared memory, because registers are scarce in a fold.
            float* weights = shared.weights + warp * TOKEN_ROWS;
            if (lane < TOKEN_ROWS) weights[lane] = weight;
            sync_warp();
            const activation_t* x_rows = shared.x + (lane % 16 * X_STRIDE + warp * CTA_ROWS);
            const auto own_values = [&](int row_group, int step, float(&v)[4]) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, x_rows + (16 * step * X_STRIDE + 8 * row_group));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float2 both = *(const float2*)(weights + (16 * step + 8 * i + 2 * t));
                    v[2 * i] = both.x * activation_low(pairs[i]), v[2 * i + 1] = both.y * activation_high(pairs[i]);
                }
            };
            const auto rows_now = [&] {
                u32 slot_now = (u32)slot;
                hold_until_here(slot_now);
                return STATE_ROWS((int)slot_now).from(own_row);
            };
            fold_rows(own_values, (const uint4*)shared.tile, rows_now, has_state, decay_of(total),
                      part % CTAS_PER_HEAD * CTA_ROWS, ROUNDING_KEY(head, row.seq_len));
            sync_threads();
            continue;
        }

        // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
        const int first_new = row.seq_len % RING_LEN;
        for_window_rows<CTA_STATE_ROWS>(length, thread, [&](int w, int offset) {
            *(uint4*)(ring_x + (offset_of(slot, ring_x_stride) +
                                (wrapped(first_new + w) * (HEADS * ROWS) + block_row + offset))) =
                *(const uint4*)(shared.x + ((history + w) * X_STRIDE + offset));
        });
        if (first_of_group)
            for_window_chunks<COLUMNS, THREADS>(length, thread, [&](int w, int offset) {
                *(uint4*)(ring_B + (offset_of(slot, ring_B_stride) +
                                    (wrapped(first_new + w) * (GROUPS * COLUMNS) + B_column + offset))) =
                    *(const uint4*)(shared.B + (history + w) * TOKEN_STRIDE + offset);
            });
        if (part % CTAS_PER_HEAD == 0 && lane < length)
            ring_dt[offset_of(slot, ring_dt_stride) + (wrapped(first_new + lane) * HEADS + head)] = dt_new;
        if ((flushed || row.seq_len == 0) && lane < CTA_TILES)
            position[offset_of(slot, position_stride) + part * CTA_TILES + lane] = row.seq_len;

        Scores score = {};
        add_scores(score, shared.B, shared.C);
        // What turns products into outputs, of window token `lane`.
        const float own_unit = decay_of(total + prefix) * (lane < length ? shared.unit_C[lane] : 0.f);
        const TokenScalars scalars = {weight, dt_new, prefix, decay_of(prefix), own_unit, D_head};
        Coefficients coefficients;
        coefficients.compute(score, scalars, history);
        const unsigned char* codes = shared.tile + (warp * CTA_ROWS + g) * CODE_STRIDE;
        const unsigned char* scales = shared.tile + (CODES_SIZE + (warp * CTA_ROWS + g) * BLOCK_SCALE_BYTES);
        const u32 matrix_row = (thread % 8 + thread % 32 / 16 * 8) * X_STRIDE + thread / 8 % 2 * 8;
        const activation_t* x_rows = shared.x + (matrix_row + warp * CTA_ROWS);
        activation_t* outputs = shared.y + warp * CTA_ROWS;
        if constexpr (SINGLE)
            write_single_outputs(outputs, coefficients, x_rows, has_state, codes, scales, shared.half_C, row_scales);
        else
            write_outputs(outputs, coefficients, x_rows, has_state, codes, scales, shared.half_C, row_scales, length);
        sync_warp();
        for_window_chunks<CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
            *(uint4*)(y + (offset_of(start + w, HEADS * ROWS) + (own_row + offset))) =
                *(const uint4*)(shared.y + (w * X_STRIDE + warp * CTA_ROWS + offset));
        });
        return;
    }
}
