// Mamba2 over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows of up to
// MAX_WINDOW tokens, and longer (prefill) rows token by token. One thread block per (row of the batch, CTA_WARPS warps of
// CTA_ROWS state rows each). A step that flushes folds, and then goes on as if the history had been empty.
// See plugins/reference/mamba2.py and readout.cuh.
//
// Stamped in: NHEADS, HEADDIM, DSTATE, NGROUPS, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT,
// STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, BULK_COPY, MIN_CTAS, AHEAD_ROWS, AHEAD_TILE, SHARED_BYTES.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "readout_dot.cuh"
#include "readout_flush.cuh"
#include "readout_parts.cuh"
#include "readout_stage.cuh"
#include "mamba2_serial.cuh"

constexpr int QUERY_TILES = WINDOW_ROWS / 8;
constexpr int OWN_SIZE = TOKEN_ROWS * OWN_STRIDE;  // x of a part
// Lanes that hold a part's tokens: a warp serves WARP_PARTS parts one after the other, but their scalars at once.
constexpr int LANES = 32 / WARP_PARTS;
static_assert(MAX_HISTORY <= LANES && CTA_TILES <= LANES, "a lane for every token and tile");

struct Shared {
    alignas(128) unsigned char tile[TILE_SIZE];  // readout; in a flush first the fold's keys; states of a prefill row
    alignas(16) activation_t B[TOKEN_ROWS * KEY_STRIDE];
    alignas(16) activation_t C[MAX_WINDOW * KEY_STRIDE];
    alignas(16) u16 half_C[MAX_WINDOW * KEY_STRIDE];
    alignas(16) activation_t x[WARPS * WARP_PARTS * OWN_SIZE];
    float unit_C[MAX_WINDOW];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Coefficients of x in 16 tokens for 8 queries, split into halves of the activation format, as a second operand.
struct SplitPairs {
    u32 high[2], low[2];

    DEVICE_MEMBER void split(int i, float first, float second) {
        high[i] = (u32)float_to_activation(first) | (u32)float_to_activation(second) << 16;
        low[i] = (u32)float_to_activation(first - activation_low(high[i])) |
                 (u32)float_to_activation(second - activation_high(high[i])) << 16;
    }
};

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
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    // A part is CTA_ROWS rows of a head; rows count through all heads. `part` is the one whose scalars the lane holds.
    const int first_part = (int)blockIdx.x * (WARPS * WARP_PARTS), warp_part = first_part + warp * WARP_PARTS;
    const int part = warp_part + lane / LANES, token = lane % LANES, head = part / CTAS_PER_HEAD;
    const int group = first_part / CTAS_PER_HEAD / HEADS_PER_GROUP, B_column = group * COLUMNS;
    const int block_row = first_part * CTA_ROWS, warp_row = warp_part * CTA_ROWS;
    const bool first_of_group = first_part % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0;

    // All that is known before the slot, then all that the slot tells: nothing here waits for more than the row's slot.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    int position_now = 0, later_position = 0;
    RowScales row_scales[WARP_PARTS];
    if (has_slot) {
        position_now = position_in[offset_of(slot, position_stride) + first_part * CTA_TILES];
        readout_copy_start(shared.tile, STATE_ROWS(slot).from(block_row), &shared.barrier);
#pragma unroll
        for (int p = 0; p < WARP_PARTS; p++) row_scales[p].load(STATE_ROWS(slot).from(warp_row + p * CTA_ROWS));
    }
    if (later.exists) later_position = position_in[offset_of(later.slot, position_stride) + first_part * CTA_TILES];
    const float log_A = A_log[head], bias = dt_bias[head];
    float D_head = D[head];
    const Row row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    if (!row.active || row.length > MAX_WINDOW) {
        copy_async_wait();
        sync_threads();
        if (has_slot) readout_copy_wait(&shared.barrier);
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
        sync_threads();
        float* stage = (float*)shared.tile;
        for (int tile = 0; tile < WARPS * WARP_PARTS * CTA_TILES; tile++) {
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
        if (token < CTA_TILES)
            position[offset_of(slot, position_stride) + part * CTA_TILES + token] = row.seq_len + row.length;
        return;
    }

    const int length = row.length;
    activation_t* warp_x = shared.x + warp * (WARP_PARTS * OWN_SIZE);
    int history = row.seq_len - row.checkpoint_position;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    // What a flush's second half needs is computed again from these: kept through the fold it would cost registers.
    u32 slot_now = slot, start_now = start, tid_now = threadIdx.x;

    // Token rows in shared memory: `past` rows of the history from `first_entry` on, `fresh` rows of the window, zeros.
    const auto stage_tokens = [&](int past, int fresh) {
        const int first_entry = (row.seq_len - past) % RING_LEN;
        activation_t* warp_x = shared.x + tid_now / 32 * (WARP_PARTS * OWN_SIZE);
        stage_history<COLUMNS, KEY_STRIDE, GROUPS * COLUMNS, THREADS>(
            shared.B, ring_B_in + (offset_of((int)slot_now, ring_B_stride) + B_column), first_entry, past, past + fresh,
            tid_now);
#pragma unroll
        for (int p = 0; p < WARP_PARTS; p++)
            stage_history<CTA_ROWS, OWN_STRIDE, HEADS * ROWS, 32>(
                warp_x + p * OWN_SIZE, ring_x_in + (offset_of((int)slot_now, ring_x_stride) + (warp_row + p * CTA_ROWS)),
                first_entry, past, past + fresh, tid_now % 32);
        for_window_chunks<COLUMNS, THREADS>(fresh, tid_now, [&](int w, int offset) {
            copy_async_16(shared.B + (past + w) * KEY_STRIDE + offset,
                          B + (offset_of((int)start_now + w, B_stride) + (B_column + offset)), true);
        });
        for_window_chunks<WARP_PARTS * CTA_ROWS, 32>(fresh, tid_now % 32, [&](int w, int offset) {
            copy_async_16(warp_x + (offset / CTA_ROWS * OWN_SIZE + (past + w) * OWN_STRIDE + offset % CTA_ROWS),
                          x + (offset_of((int)start_now + w, x_stride) + (warp_row + offset)), true);
        });
    };
    float raw_dt = 0.f, dt_past = 0.f;
    if (token < length) raw_dt = activation_to_float(dt[offset_of(start + token, dt_stride) + head]);
    if (token < history)
        dt_past = ring_dt_in[offset_of(slot, ring_dt_stride) +
                             (wrapped(row.checkpoint_position % RING_LEN + token) * HEADS + head)];
    stage_tokens(history, flush ? 0 : length);
    if (flush && row.checkpoint_position > 0)
        for (int r = lane; r < WARP_PARTS * CTA_ROWS; r += 32)
            prefetch(STATE_ROWS(slot).checkpoint + (warp_row + r) * COLUMNS, COLUMNS * sizeof(state_t));
    if (later.exists) {
        prefetch_rows<CTA_STATE_ROWS>(later, later_position, ring_x_in + (offset_of(later.slot, ring_x_stride) + block_row),
                                      HEADS * ROWS);
        if (first_of_group)
            prefetch_rows<COLUMNS>(later, later_position, ring_B_in + (offset_of(later.slot, ring_B_stride) + B_column),
                                   GROUPS * COLUMNS);
        prefetch_ring(later, later_position, [&](int entry) {
            prefetch_sector(ring_dt_in + (offset_of(later.slot, ring_dt_stride) + (entry * HEADS + head)));
        });
        if (AHEAD_TILE && lane == 31) {
            const StateRows rows = STATE_ROWS(later.slot).from(block_row);
            prefetch(rows.codes, CTA_STATE_ROWS * CODE_BYTES);
            if (NVFP4) prefetch(rows.block_scales, CTA_STATE_ROWS * BLOCK_SCALE_BYTES);
        }
    }
    // The window's C as it is and in fp16, while the rings travel.
#pragma unroll
    for (int n = 0; n < (MAX_WINDOW + WARPS - 1) / WARPS; n++) {
        const int w = n * WARPS + warp;
        if (w >= length) break;
        halve_row<true>(shared.half_C + w * KEY_STRIDE, shared.unit_C + w,
                        C + (offset_of(start + w, C_stride) + B_column), shared.C + w * KEY_STRIDE);
    }
    const float A = -expf(log_A);
    float dt_new = token < length ? softplus(raw_dt + bias) : 0.f;
    // Log decays: `suffix` from behind history token `token` - 1 to the history's end, `prefix` of the window up to token
    // `token`. Every sum runs over its own terms: differences of one running sum would cancel.
    float suffix = A * dt_past, prefix = A * dt_new;
#pragma unroll
    for (int delta = 1; delta < MAX_HISTORY; delta *= 2) {
        const float after = shuffle_down(suffix, delta);
        if (token + delta < LANES) suffix += after;
    }
#pragma unroll
    for (int delta = 1; delta < MAX_WINDOW; delta *= 2) {
        const float before = shuffle_up(prefix, delta);
        if (token >= delta) prefix += before;
    }
    float total = shuffle_from(suffix, lane - token);
    const float behind = shuffle_down(suffix, 1);
    const float weight = dt_past * decay_of(token < LANES - 1 ? behind : 0.f);  // of history token `token`, zero beyond
    copy_async_wait();
    sync_threads();
    readout_copy_wait(&shared.barrier);

    if (flush) {
        hold_until_here(slot_now);
        sync_threads();
        build_fold_keys((uint4*)shared.tile, shared.B);
        sync_threads();
#pragma unroll 1
        for (int p = 0; p < WARP_PARTS; p++) {
            float weights[TOKEN_STEPS][4];
#pragma unroll
            for (int i = 0; i < 4 * TOKEN_STEPS; i++)
                weights[i / 4][i % 4] = shuffle_from(weight, p * LANES + i / 2 * 8 + 2 * t + i % 2);
            const activation_t* x_rows = warp_x + (p * OWN_SIZE + lane % 16 * OWN_STRIDE);
            const auto own_values = [&](int group, int step, float(&v)[4]) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, x_rows + (16 * step * OWN_STRIDE + 8 * group));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    v[2 * i] = weights[step][2 * i] * activation_low(pairs[i]);
                    v[2 * i + 1] = weights[step][2 * i + 1] * activation_high(pairs[i]);
                }
            };
            const int own_part = warp_part + p;
            fold_rows(own_values, (const uint4*)shared.tile, STATE_ROWS((int)slot_now).from(own_part * CTA_ROWS),
                      row.checkpoint_position > 0, decay_of(shuffle_from(total, p * LANES)),
                      own_part % CTAS_PER_HEAD * CTA_ROWS, ROUNDING_KEY(own_part / CTAS_PER_HEAD, row.seq_len));
            sync_warp();
        }
        sync_threads();
        hold_until_here(slot_now), hold_until_here(start_now), hold_until_here(tid_now);
        stage_tokens(0, length);
        readout_copy_again(shared.tile, warp * (WARP_PARTS * CTA_ROWS), STATE_ROWS((int)slot_now).from(warp_row));
#pragma unroll
        for (int p = 0; p < WARP_PARTS; p++) row_scales[p].load(STATE_ROWS((int)slot_now).from(warp_row + p * CTA_ROWS));
        history = 0, total = 0.f;
        u32 head_now = (first_part + tid_now / 32 * WARP_PARTS + tid_now % 32 / LANES) / CTAS_PER_HEAD;
        hold_until_here(head_now);
        D_head = D[head_now];
        copy_async_wait();
        sync_threads();
    }

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    const int first_new = row.seq_len % RING_LEN;
    for_window_chunks<WARP_PARTS * CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
        *(uint4*)(ring_x + (offset_of((int)slot_now, ring_x_stride) +
                            (wrapped(first_new + w) * (HEADS * ROWS) + warp_row + offset))) =
            *(const uint4*)(warp_x + (offset / CTA_ROWS * OWN_SIZE + (history + w) * OWN_STRIDE + offset % CTA_ROWS));
    });
    if (first_of_group)
        for_window_chunks<COLUMNS, THREADS>(length, tid, [&](int w, int offset) {
            *(uint4*)(ring_B + (offset_of((int)slot_now, ring_B_stride) +
                                (wrapped(first_new + w) * (GROUPS * COLUMNS) + B_column + offset))) =
                *(const uint4*)(shared.B + (history + w) * KEY_STRIDE + offset);
        });
    if (part % CTAS_PER_HEAD == 0 && token < length)
        ring_dt[offset_of((int)slot_now, ring_dt_stride) + (wrapped(first_new + token) * HEADS + head)] = dt_new;
    if ((flush || row.seq_len == 0) && token < CTA_TILES)
        position[offset_of((int)slot_now, position_stride) + part * CTA_TILES + token] = row.seq_len;

    // B . C of every (query, token) pair: query g, and g + 8 in a second tile; tokens 2 t and 2 t + 1 of every eight.
    const auto query_row = [&](int n) { return (n * 8 + g < MAX_WINDOW ? n * 8 + g : MAX_WINDOW - 1) * KEY_STRIDE; };
    float score[2 * TOKEN_STEPS][4] = {};
    const activation_t* first_C = shared.C + (query_row(0) + 4 * t);
    const activation_t* second_C = shared.C + (query_row(1) + 4 * t);
    const activation_t* token_B = shared.B + (g * KEY_STRIDE + 4 * t);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const uint2 first = *(const uint2*)(first_C + 16 * step);
        uint2 second = make_uint2(0, 0);
        if (QUERY_TILES > 1) second = *(const uint2*)(second_C + 16 * step);
#pragma unroll
        for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++) {
            const uint2 b = *(const uint2*)(token_B + (k8 * 8 * KEY_STRIDE + 16 * step));
            mma_16bit<ACTIVATION_FORMAT>(score[k8], first.x, second.x, first.y, second.y, b.x, b.y);
        }
    }
    Queries<QUERY_TILES> query;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) query.set(n, shared.half_C + query_row(n));
    const float window_decay = decay_of(prefix);
    // What turns products into outputs, of window token `token`.
    const float own_unit = decay_of(total + prefix) * (token < length ? shared.unit_C[token] : 0.f);
    const bool has_state = row.checkpoint_position > 0 || flush;
    sync_warp();  // the appended rows of x have been read
#pragma unroll 1
    for (int p = 0; p < WARP_PARTS; p++) {
    const int first_lane = p * LANES, own_part = warp * WARP_PARTS + p;
    activation_t* own_x = warp_x + p * OWN_SIZE;
    // Coefficients of x: decay, dt and B . C; D sits on the diagonal.
    SplitPairs coefficients[QUERY_TILES][TOKEN_STEPS];
    float unscale[QUERY_TILES];  // of fp16 coefficients of query g
    const float own_D = shuffle_from(D_head, first_lane);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const int w = MAX_WINDOW == 1 ? 0 : n * 8 + g;
        const float query_decay = shuffle_from(window_decay, first_lane + w);
        const float query_prefix = shuffle_from(prefix, first_lane + w);
        float value[TOKEN_STEPS][4];
#pragma unroll
        for (int i = 0; i < 4 * TOKEN_STEPS; i++) {
            const int k = i / 2 * 8 + 2 * t + i % 2, j = k - history;
            const float past = shuffle_from(weight, first_lane + k) * query_decay, dot = score[i / 2][2 * n + i % 2];
            const int from = first_lane + (MAX_WINDOW == 1 ? 0 : j & (LANES - 1));
            float fresh = shuffle_from(dt_new, from);
            if (MAX_WINDOW > 1) {
                const float exponent = query_prefix - shuffle_from(prefix, from);
                fresh *= j == w ? 1.f : decay_of(exponent);
            }
            const float scaled = (j < 0 ? past : fresh) * dot;
            value[i / 4][i % 4] = j > w ? 0.f : j == w ? scaled + own_D : scaled;
        }
        float factor = 1.f;
        unscale[n] = 1.f;
        if constexpr (ACTIVATION_FORMAT == FORMAT_FP16) {
            // Their range is small: the largest of a query becomes 2^14.
            u32 largest = 0;
#pragma unroll
            for (int i = 0; i < 4 * TOKEN_STEPS; i++) {
                const u32 bits = float_to_bits(value[i / 4][i % 4]) & 0x7fffffffu;
                largest = bits > largest ? bits : largest;
            }
            int field = 268 - (int)(quad_max(largest) >> 23);
            field = field > 240 ? 240 : field < 1 ? 1 : field;
            factor = power_of_two(field), unscale[n] = power_of_two(254 - field);
        }
#pragma unroll
        for (int i = 0; i < 2 * TOKEN_STEPS; i++)
            coefficients[n][i / 2].split(i % 2, value[i / 2][i % 2 * 2] * factor, value[i / 2][i % 2 * 2 + 1] * factor);
    }

    // Of queries 2 t and 2 t + 1 of every eight.
    float unit[QUERY_TILES][2], undo[QUERY_TILES][2];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            unit[n][e] = shuffle_from(own_unit, first_lane + (MAX_WINDOW == 1 ? 0 : n * 8 + 2 * t + e));
            undo[n][e] = ACTIVATION_FORMAT == FORMAT_FP16 ? shuffle_from(unscale[n], 4 * (2 * t + e)) : 1.f;
        }
    }
    const activation_t* x_rows = own_x + ((lane % 8 + lane / 16 * 8) * OWN_STRIDE + lane / 8 % 2 * 8);
    const unsigned char* own_codes = shared.tile + (own_part * CTA_ROWS + g) * CODE_STRIDE;
    const unsigned char* own_scales = shared.tile + (CODES_SIZE + (own_part * CTA_ROWS + g) * BLOCK_SCALE_BYTES);
    activation_t* outputs = own_x + ((MAX_WINDOW == 1 ? t : 2 * t) * OWN_STRIDE + g);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float sum[QUERY_TILES][4] = {}, product[QUERY_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            u32 a[4];
            load_matrix_x4_transposed(a, x_rows + (16 * step * OWN_STRIDE + 16 * m));
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
                const SplitPairs& b = coefficients[n][step];
                mma_16bit<ACTIVATION_FORMAT>(sum[n], a[0], a[1], a[2], a[3], b.high[0], b.high[1]);
                mma_16bit<ACTIVATION_FORMAT>(sum[n], a[0], a[1], a[2], a[3], b.low[0], b.low[1]);
            }
        }
        float row_scale[2] = {1.f, 1.f};
        if (has_state) {
            dot_readout<QUERY_TILES, MAX_WINDOW == 1>(product, own_codes + 16 * m * CODE_STRIDE,
                                                      own_scales + 16 * m * BLOCK_SCALE_BYTES, query);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (16 * m + 8 * half >= CTA_ROWS) continue;
                row_scale[half] = row_scales[WARP_PARTS > 1 && p ? WARP_PARTS - 1 : 0].of_group(2 * m + half);
            }
        }
        // Outputs replace the x of tokens that this matrix step was the last to read.
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int w = MAX_WINDOW == 1 ? t : n * 8 + 2 * t + i % 2;
                if (MAX_WINDOW == 1 && i % 2) continue;
                const float state = has_state ? product[n][i] * unit[n][i % 2] * row_scale[i / 2] : 0.f;
                if (w < length)
                    outputs[(MAX_WINDOW == 1 ? 0 : n * 8 + i % 2) * OWN_STRIDE + 16 * m + 8 * (i / 2)] =
                        float_to_activation(sum[n][i] * undo[n][i % 2] + state);
            }
    }
    }
    sync_warp();
    for_window_chunks<WARP_PARTS * CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
        *(uint4*)(y + (offset_of((int)start_now + w, HEADS * ROWS) + (warp_row + offset))) =
            *(const uint4*)(warp_x + (offset / CTA_ROWS * OWN_SIZE + w * OWN_STRIDE + offset % CTA_ROWS));
    });
}
