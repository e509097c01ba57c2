// Mamba2 over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows of up to
// MAX_WINDOW tokens. Longer (prefill) rows are left to mamba2_prefill.cu if `skip_prefill` says so, and go token by token
// otherwise. One thread block per (row of the batch, CTA_WARPS warps of CTA_ROWS state rows each). A step that flushes folds,
// and then goes on as if the history had been empty. See plugins/reference/mamba2.py and readout.cuh.
//
// Stamped in: NHEADS, HEADDIM, DSTATE, NGROUPS, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT,
// STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, BULK_COPY, MIN_CTAS, SHARED_BYTES.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "mamba2_readout_window.cuh"
#include "mamba2_serial.cuh"
#include "readout_fold.cuh"
#include "readout_parts.cuh"

struct WindowArea {
    alignas(16) u16 half_C[QUERY_ROWS * KEY_STRIDE + 8];
    alignas(16) float partial[PARTIAL_SCORES];
    float unit_C[QUERY_ROWS + 1];
};
struct Shared {
    alignas(128) unsigned char tile[TILE_BYTES];  // readout; rows of B of a fold; states of a prefill row
    alignas(16) activation_t x[TOKEN_ROWS * X_STRIDE];
    union {
        WindowArea window;
        uint4 fold_keys[FOLD_KEYS_SIZE / 16];
    };
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
    wait_for_previous_grid();
    const auto position_of = [&](int of_slot) {
        return position_in[offset_of(of_slot, position_stride) + (int)blockIdx.x * (WARPS * CTA_TILES)];
    };
    bool flushed = false;
    // Once; a second time after a flush, from what it stored: kept through the fold, values would cost registers.
#pragma unroll 1
    for (;;) {
        u32 thread = threadIdx.x, row_index = blockIdx.y;  // unsigned, so that dividing it takes one instruction
        hold_until_here(thread), hold_until_here(row_index);
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
        u32 log_A = float_to_bits(A_log[head]), bias = float_to_bits(dt_bias[head]), D_head = float_to_bits(D[head]);
        hold_until_here(log_A), hold_until_here(bias), hold_until_here(D_head);
        const bool has_slot = slot >= 0 && slot < num_slots;
        int position_now = 0;
        RowScales row_scales = {};
        if (has_slot) {
            position_now = flushed ? seq_len : position_of(slot);
            row_scales.load(STATE_ROWS(slot).from(own_row));
        }
        const int c = seq_len ? position_now : 0;
        // What make_row finds of a row with a window, in fewer instructions.
        const bool has_window = has_slot && (u32)window_length - 1u < (u32)MAX_WINDOW && (seq_len | start | c) >= 0 &&
                                (u32)seq_len - (u32)c <= (u32)MAX_HISTORY && seq_len <= max_seq_len - window_length &&
                                start <= num_tokens - window_length;
        if (!has_window) {
            const Row row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len,
                                     MAX_HISTORY);
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

        const int length = window_length, history = seq_len - c;
        const bool flush = history > 0 && history + length > BUFFER_LEN;
        if (flushed) {
            if constexpr (!NVFP4) readout_copy_again(shared.tile, own_row - block_row, STATE_ROWS(slot).from(own_row));
        } else if (!flush) readout_copy_start(shared.tile, STATE_ROWS(slot).from(block_row), &shared.barrier);
        // What is not folded: queries first, which wait for nothing.
        const int fresh = flush ? 0 : length, first_entry = c % RING_LEN;
        const activation_t* window_C = C + (offset_of(start, C_stride) + B_column);
        constexpr int OWN_QUERIES = (QUERY_ROWS + WARPS - 1) / WARPS;
        QueryRow queries[OWN_QUERIES + SINGLE];
        SingleQuery query;
        if constexpr (SINGLE) query.load(window_C);
#pragma unroll
        for (int n = 0; n < OWN_QUERIES; n++)
            queries[n].load(window_C + offset_of(n * WARPS + warp, C_stride), n * WARPS + warp < fresh);
        float dt_past = 0.f;
        u32 raw_dt = lane < length ? dt[offset_of(start + lane, dt_stride) + head] : 0u;
        if (lane < history)
            dt_past = ring_dt_in[offset_of(slot, ring_dt_stride) + (wrapped(first_entry + lane) * HEADS + head)];
        const activation_t* past_B = ring_B_in + (offset_of(slot, ring_B_stride) + B_column);
        const activation_t* window_B = B + (offset_of(start, B_stride) + B_column);
        activation_t* own_x = shared.x + warp * CTA_ROWS;
        PartX part_x;
        part_x.load(ring_x_in + (offset_of(slot, ring_x_stride) + own_row), first_entry, history,
                    x + (offset_of(start, x_stride) + own_row), x_stride, fresh);
        if (flush) {
            stage_history<COLUMNS, TOKEN_STRIDE, GROUPS * COLUMNS, THREADS>((u16*)shared.tile, past_B, first_entry, history,
                                                                            history, thread);
            if (c > 0 && lane == 0)
                prefetch(STATE_ROWS(slot).checkpoint + own_row * COLUMNS, FOLD_AHEAD * COLUMNS * sizeof(state_t));
        } else {
            ScoreInputs inputs;
            inputs.load_queries(window_C, C_stride, length);
            inputs.load_tokens(past_B, first_entry, history, window_B, B_stride, length);
#pragma unroll
            for (int n = 0; n < OWN_QUERIES; n++) {
                const int w = n * WARPS + warp;
                if (w < length) queries[n].store(shared.window.half_C + w * KEY_STRIDE, shared.window.unit_C + w);
            }
            if constexpr (SINGLE) query.halve();
            inputs.multiply(shared.window.partial);
            const int first_new = seq_len % RING_LEN;
            part_x.append(ring_x + (offset_of(slot, ring_x_stride) + own_row), first_new, length);
            if (first_of_group)
                for_window_chunks<COLUMNS, THREADS>(length, thread, [&](int w, int offset) {
                    *(uint4*)(ring_B + (offset_of(slot, ring_B_stride) +
                                        (wrapped(first_new + w) * (GROUPS * COLUMNS) + B_column + offset))) =
                        *(const uint4*)(window_B + (offset_of(w, B_stride) + offset));
                });
        }
        part_x.stage(own_x, history, fresh);
        hold_until_here(raw_dt);
        const float A = -expf(bits_to_float(log_A));
        const float dt_new = lane < length ? softplus(activation_to_float((activation_t)raw_dt) + bits_to_float(bias)) : 0.f;
        const bool has_state = c > 0;
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

        if (flush) {
            const activation_t* tokens = (const activation_t*)shared.tile;
            if constexpr (FOLDS_COLUMNS) build_column_keys<TOKEN_STRIDE>(shared.fold_keys, tokens);
            else build_fold_keys<TOKEN_STRIDE>(shared.fold_keys, tokens);
            sync_threads();
            // Weights in shared memory, because registers are scarce in a fold.
            if (lane < TOKEN_ROWS) *fold_weights(shared.x, lane) = weight;
            sync_warp();
            const activation_t* x_rows = own_x + lane % 16 * X_STRIDE;
            const auto own_values = [&](int row_group, int step, float(&v)[4]) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, x_rows + (16 * step * X_STRIDE + 8 * row_group));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float2 both = *(const float2*)fold_weights(shared.x, 16 * step + 8 * i + 2 * t);
                    v[2 * i] = both.x * activation_low(pairs[i]), v[2 * i + 1] = both.y * activation_high(pairs[i]);
                }
            };
            // An nvfp4 readout goes to the tile, where the outputs read it.
            const auto rows_now = [&] {
                u32 slot_now = (u32)slot;
                hold_until_here(slot_now);
                StateRows rows = STATE_ROWS((int)slot_now).from(own_row);
                if constexpr (NVFP4) {
                    rows.codes = shared.tile + warp * CTA_ROWS * CODE_STRIDE;
                    rows.block_scales = shared.tile + (CODES_SIZE + warp * CTA_ROWS * BLOCK_SCALE_BYTES);
                }
                return rows;
            };
            const int head_row = part % CTAS_PER_HEAD * CTA_ROWS;
            const RoundingKey key = ROUNDING_KEY(head, seq_len);
            if constexpr (FOLDS_COLUMNS)
                fold_columns<false>(own_values, shared.fold_keys, rows_now(), has_state, decay_of(total), head_row, key);
            else
                fold_rows(own_values, shared.fold_keys, rows_now, has_state, decay_of(total), head_row, key);
            if constexpr (NVFP4) {
                sync_warp();
                readout_store_own(shared.tile, warp * CTA_ROWS, STATE_ROWS(slot).from(own_row));
            }
            sync_threads();
            flushed = true;
            continue;
        }

        if (part % CTAS_PER_HEAD == 0 && lane < length)
            ring_dt[offset_of(slot, ring_dt_stride) + (wrapped(seq_len % RING_LEN + lane) * HEADS + head)] = dt_new;
        if ((flushed || seq_len == 0) && lane < CTA_TILES)
            position[offset_of(slot, position_stride) + part * CTA_TILES + lane] = seq_len;

        if (!has_state) row_scales.clear();
        Scores score = {};
        add_scores(score, shared.window.partial);
        // What turns products into outputs, of window token `lane`.
        const float unit = SINGLE ? query.unit : lane < length ? shared.window.unit_C[lane] : 0.f;
        const float own_unit = decay_of(total + prefix) * unit;
        const TokenScalars scalars = {weight, dt_new, prefix, decay_of(prefix), own_unit, bits_to_float(D_head)};
        Coefficients coefficients;
        coefficients.compute(score, scalars, history);
        const unsigned char* codes = shared.tile + (warp * CTA_ROWS + g) * CODE_STRIDE;
        const unsigned char* scales = shared.tile + (CODES_SIZE + (warp * CTA_ROWS + g) * BLOCK_SCALE_BYTES);
        const activation_t* x_rows = own_x + ((thread % 8 + thread % 32 / 16 * 8) * X_STRIDE + thread / 8 % 2 * 8);
        let_next_grid_start();  // nothing is read from memory any more
        if constexpr (SINGLE) {
            write_single_outputs(y + (offset_of(start, HEADS * ROWS) + own_row), coefficients, x_rows, has_state, codes, scales,
                                 query, row_scales);
            return;
        }
        write_outputs(own_x, coefficients, x_rows, has_state, codes, scales, shared.window.half_C, row_scales, length);
        sync_warp();
        for_window_chunks<CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
            *(uint4*)(y + (offset_of(start + w, HEADS * ROWS) + (own_row + offset))) =
                *(const uint4*)(own_x + (w * X_STRIDE + offset));
        });
        return;
    }
}
