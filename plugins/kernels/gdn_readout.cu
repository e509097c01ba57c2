// Gated DeltaNet over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows
// of up to MAX_WINDOW tokens. Longer (prefill) rows are left to gdn_prefill.cu if `skip_prefill` says so, and go token by
// token otherwise. One thread block per (row of the batch, CTA_WARPS warps of CTA_ROWS state rows each). A step that flushes
// folds, and then goes on as if the history had been empty. The window's u solve a unit lower triangular system, one lane per
// state row. See plugins/reference/gdn.py and readout.cuh.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW,
// STATE_FORMAT, STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, U_PLANES, U_FROM_CHECKPOINT, BULK_COPY, MIN_CTAS,
// AHEAD_ROWS, SHARED_BYTES.
#define HEADS NUM_V_HEADS
#define GROUPS NUM_K_HEADS
#define ROWS HEAD_V_DIM
#define COLUMNS HEAD_K_DIM
// head_k_dim^-1/2, applied to q in fp32.
#define QUERY_SCALE rsqrtf((float)COLUMNS)
#include "gdn_readout_solve.cuh"
#include "gdn_readout_tiled.cuh"
#include "readout_parts.cuh"

#if TILED_WINDOW
typedef TiledReadout OwnReadout;
#else
typedef Readout OwnReadout;
#endif
constexpr int AREA_SIZE = TILED ? 16 : round_up(larger(WARPS * STAGED_SIZE * 4, FOLD_KEYS_SIZE), 16);

struct Shared {
    // The fold's keys, then staged products (not TILED). With u behind them also the states of a prefill row.
    alignas(128) unsigned char area[AREA_SIZE];
    alignas(16) u16 u[larger(WARPS * U_SIZE, (STAGE_SIZE - AREA_SIZE) / 2)];
    alignas(16) activation_t k[TOKEN_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t queries[QUERIES * TOKEN_STRIDE];
    alignas(16) u16 half_queries[QUERIES * KEY_STRIDE];
#if TILED_WINDOW
    uint4 window_coefficients[WINDOW_SHARES][32];
#endif
    alignas(16) activation_t v[WARPS * V_ROWS * V_STRIDE];
    alignas(16) unsigned char block_scales[NVFP4 && !TILED ? WARPS * CTA_ROWS * BLOCK_SCALE_BYTES : 16];
    Gates gates[BLOCK_HEADS];
    // Coefficients of the window's u; of TILED rows, what undoes their scales.
    alignas(TILED ? 8 : 4) float pairs[ONE ? 1 : WARPS * (TILED ? CTA_ROWS : QUERIES * WINDOW_ROWS)];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Folds a prefill row token by token, tile by tile, all warps on each. inputs(tile's first row among all heads', its head)
// and rows(the same row) say where, key(head) how to round.
template <class Inputs, class Rows, class Key>
DEVICE void prefill_tiles(float* stage, const Row& row, int block_row, activation_t* o, const Inputs& inputs,
                          const Rows& rows, const Key& key) {
    for (int tile = 0; tile < WARPS * CTA_TILES; tile++) {
        const int first = block_row + tile * TILE_ROWS, head = first / ROWS;
        const SerialInputs tile_inputs = inputs(first, head);
        const StateRows tile_rows = rows(first);
        const SerialStores stores = {nullptr, row.length, nullptr, 0, stage, tile_rows.checkpoint_scales};
        for (int r = threadIdx.x / 32 * 4; r < TILE_ROWS; r += WARPS * 4)
            serial_rows<4, false>(tile_inputs, row, r, tile_rows.checkpoint, stores,
                                  o + offset_of(row.start, HEADS * ROWS) + first, nullptr);
        sync_threads();
        store_staged_tile(stage, tile_rows, first % ROWS, key(head));
        sync_threads();
    }
}

KERNEL(THREADS, MIN_CTAS)
gdn_readout(
    // [T, Hk, dk], [T, Hk, dk], [T, Hv, dv], [T, Hv], [T, Hv]: tokens are *_stride elements apart, otherwise dense
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* a, const activation_t* b,
    // [Hv]
    const float* A_log, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    STATE_PARTS_IN const activation_t* ring_k_in, const u16* ring_u_in, const float* ring_g_in,
    const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, ROUNDING_SCALARS int skip_prefill, int q_stride,
    int k_stride, int v_stride, int a_stride, int b_stride, STATE_PARTS_STRIDES int ring_k_stride, int ring_u_stride,
    int ring_g_stride,
    // [T, Hv, dv] dense, then the state parts again: in place, written through these
    activation_t* o, STATE_PARTS_OUT activation_t* ring_k, u16* ring_u, float* ring_g, int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    wait_for_previous_grid();
    const u32 thread = threadIdx.x, first_index = blockIdx.x * WARPS, index = first_index + thread / 32;
    const int tid = thread, lane = thread % 32, warp = thread / 32;
    const int first_part = first_index, part = index;
    const int head = index / CTAS_PER_HEAD, group = first_index / CTAS_PER_HEAD / HEADS_PER_GROUP;
    const int first_row = index % CTAS_PER_HEAD * CTA_ROWS, block_row = first_part * CTA_ROWS;
    const int own_row = part * CTA_ROWS, k_column = group * COLUMNS;  // rows count through all heads
    const int u_column = head * U_PLANES * ROWS + first_row, tile_index = part * CTA_TILES;
    const bool first_of_group = first_index % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0;

    // The last warps have the gates of a head or two each, while the first ones normalise queries.
    const int first_head = first_index / CTAS_PER_HEAD, gate_lane = lane % GATE_LANES;
    const int gate_head = first_head + (GATE_LANES == 16 ? lane / 16 : WARPS - 1 - warp);
    const bool has_gates = GATE_LANES == 16 ? warp == WARPS - 1 : gate_head <= (int)(first_index + WARPS - 1) / CTAS_PER_HEAD;
    unsigned char* own_scales = shared.block_scales + (NVFP4 && !TILED ? warp * (CTA_ROWS * BLOCK_SCALE_BYTES) : 0);
    activation_t* own_v = shared.v + warp * (V_ROWS * V_STRIDE);
    const auto position_of = [&](int of_slot) {
        return position_in + (offset_of(of_slot, position_stride) + first_part * CTA_TILES);
    };
    const float log_A = has_gates ? A_log[gate_head] : 0.f, bias = has_gates ? dt_bias[gate_head] : 0.f;
#if AHEAD_ROWS
    const u32 later_row = blockIdx.y + AHEAD_ROWS;
    const int later_slot = thread == THREADS - 32 && later_row < gridDim.y ? state_batch_indices[later_row] : -1;
#endif
    // All that is known before the slot, then all that the slot tells: nothing here waits for more than the slot. The
    // position goes first: it tells where the history lies.
    int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    int start = window_starts[blockIdx.y], length = window_lens[blockIdx.y];
    const bool has_slot = slot >= 0 && slot < num_slots;
    const int some_slot = has_slot ? slot : 0;
    int c = *position_of(some_slot);  // what the tile's checkpoint position says
#if TILED_WINDOW
    sync_warp();  // the compiler would put copies before these reads, for which all others wait
#endif
    OwnReadout own_readout;
    own_readout.load(STATE_ROWS(some_slot).from((int)own_row), own_scales);
    // The window's v and queries, as far as there are any.
    const bool readable = start >= 0 && length >= 0 && (long long)start + length <= num_tokens;
    const int readable_length = !readable ? 0 : length < MAX_WINDOW ? length : MAX_WINDOW;
    for_window_chunks<CTA_ROWS, 32>(TILED ? MAX_WINDOW : readable_length, lane, [&](int w, int offset) {
        copy_async_16(own_v + w * V_STRIDE + offset, v + (offset_of(start + w, v_stride) + ((int)own_row + offset)),
                      !TILED || w < readable_length);
    });
#if TILED_WINDOW
    PairedQueries::load(shared.queries, q + k_column, q_stride, k + k_column, k_stride, start, readable_length);
#endif
    copy_async_commit();
    u32 raw_a = 0, raw_b = 0;
    if (has_gates && gate_lane < readable_length) {
        raw_a = a[offset_of(start + gate_lane, a_stride) + gate_head];
        raw_b = b[offset_of(start + gate_lane, b_stride) + gate_head];
    }
#if !TILED_WINDOW
    RawQueries raw_queries;
    raw_queries.load(q + k_column, q_stride, k + k_column, k_stride, start, readable_length);
#endif
    c = seq_len ? c : 0;
    // The ordinary row, in few instructions; make_row says what is wrong with another.
    if (!(has_slot && readable && length >= 1 && length <= MAX_WINDOW && seq_len >= 0 && seq_len <= max_seq_len - length &&
          (u32)seq_len - (u32)c <= (u32)MAX_HISTORY)) {
        copy_async_wait();
        const Row row = make_row(slot, seq_len, start, length, c, num_tokens, num_slots, max_seq_len, MAX_HISTORY);
        if (!row.active) {
            if (row.error && tid == 0) atomic_or(error_flag, row.error);
            if (!row.in_range) return;
            for (int i = lane; i < row.length * (CTA_ROWS / 8); i += 32)
                *(uint4*)(o + offset_of(row.start + i / (CTA_ROWS / 8), HEADS * ROWS) + own_row + i % (CTA_ROWS / 8) * 8) =
                    make_uint4(0, 0, 0, 0);
            return;
        }
        if (skip_prefill) return;
        const auto inputs = [&](int first, int tile_head) {
            return SerialInputs{
                q + offset_of(row.start, q_stride) + k_column, k + offset_of(row.start, k_stride) + k_column,
                v + offset_of(row.start, v_stride) + first, a + offset_of(row.start, a_stride) + tile_head,
                b + offset_of(row.start, b_stride) + tile_head, q_stride, k_stride, v_stride, a_stride, b_stride,
                ring_k_in + offset_of(slot, ring_k_stride) + k_column,
                ring_u_in + offset_of(slot, ring_u_stride) + tile_head * U_PLANES * ROWS + first % ROWS,
                ring_g_in + offset_of(slot, ring_g_stride) + tile_head, -expf(A_log[tile_head]), dt_bias[tile_head]};
        };
        prefill_tiles((float*)shared.area, row, block_row, o, inputs, [&](int first) { return STATE_ROWS(slot).from(first); },
                      [&](int tile_head) { return ROUNDING_KEY(tile_head, row.seq_len + row.length); });
        if (lane < CTA_TILES)
            position[offset_of(slot, position_stride) + tile_index + lane] = row.seq_len + row.length;
        return;
    }

    int history = seq_len - c;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int first_entry = (u32)c % RING_LEN;
    u16* own_u = shared.u + warp * U_SIZE;
    stage_u(own_u, ring_u_in + (offset_of(slot, ring_u_stride) + u_column), first_entry, history);
    float g_past = 0.f;
    if (has_gates && gate_lane < history)
        g_past = ring_g_in[offset_of(slot, ring_g_stride) + (wrapped(first_entry + gate_lane) * HEADS + gate_head)];
    stage_history<COLUMNS, TOKEN_STRIDE, GROUPS * COLUMNS, THREADS>(
        shared.k, ring_k_in + (offset_of(slot, ring_k_stride) + k_column), first_entry, history, history, tid);
    if (flush && c > 0 && lane == 0)
        prefetch(STATE_ROWS(slot).checkpoint + own_row * COLUMNS, FOLD_AHEAD * COLUMNS * sizeof(state_t));
#if AHEAD_ROWS
    if (later_slot >= 0 && later_slot < num_slots) prefetch_sector(position_of(later_slot));
#endif
    // While the history travels.
#if TILED_WINDOW
    copy_async_commit();
    copy_async_wait_but_last();
    PairedQueries::normalize(shared.queries, shared.half_queries);
    float* own_units = shared.pairs + warp * CTA_ROWS;
    if (!flush) own_readout.store_units(own_units, c > 0);
#else
    raw_queries.normalize(shared.queries, shared.half_queries);
#endif
    float g_new = 0.f;
    if (has_gates && gate_lane < length) {
        g_new = -expf(log_A) * softplus(activation_to_float(raw_a) + bias);
        if (!TILED) shared.gates[gate_head - first_head].beta[gate_lane] = sigmoid(activation_to_float(raw_b));
        if (gate_head * CTAS_PER_HEAD >= first_part)
            ring_g[offset_of(slot, ring_g_stride) + (wrapped((u32)seq_len % RING_LEN + gate_lane) * HEADS + gate_head)] = g_new;
    }
#if TILED_WINDOW
    if (has_gates && gate_lane < MAX_WINDOW)
        shared.gates[gate_head - first_head].beta[gate_lane] =
            gate_lane < length ? sigmoid_side_by_side(activation_to_float(raw_b)) : 0.f;
    float g_sum = 0.f;
    if (has_gates) g_sum = shared.gates[gate_head - first_head].scan_window(g_new);
    // What the window's own tokens take needs no history, which is still on its way.
    sync_threads();
    TiledQueries state_queries;
    state_queries.set(shared.half_queries);
    if (computes_window())
        TiledCoefficients::of_window(shared.queries, shared.gates[head - first_head], shared.window_coefficients[window_share()]);
#else
    // The state's products need neither the history nor the gates, which are still on their way.
    copy_async_commit();
    copy_async_wait_but_last();
    sync_threads();
    StateQueries state_queries;
    state_queries.set(shared.half_queries);
    float* stage = (float*)shared.area + warp * STAGED_SIZE;
    StateProducts products;
    if (c > 0 && !flush)
        products.compute(stage, own_readout, STATE_ROWS(slot).from(own_row), own_scales, state_queries, shared.queries);
#endif
    if (has_gates) {
        // Held back, or else a comparison with it is kept in a register from further up.
        u32 history_now = history;
        hold_until_here(history_now);
#if TILED_WINDOW
        shared.gates[gate_head - first_head].scan_past(g_past, g_sum, (int)history_now);
#else
        shared.gates[gate_head - first_head].scan(g_past, g_new, (int)history_now);
#endif
    }
    copy_async_wait();
    sync_threads();

    if (flush) {
        uint4* fold_keys = (uint4*)(TILED ? (unsigned char*)shared.k : shared.area);
        if constexpr (TILED)
            replace_by_fold_keys(fold_keys);
        else if constexpr (GDN_FOLDS_COLUMNS)
            build_column_keys<TOKEN_STRIDE>(fold_keys, shared.k);
        else
            build_fold_keys<TOKEN_STRIDE>(fold_keys, shared.k);
        sync_threads();
        // What costs fewest registers: addresses that are computed again for a window of one token, or kept.
        const StateRows kept = STATE_ROWS(slot).from(own_row);
        const auto rows = [&] {
            u32 slot_now = slot;
            hold_until_here(slot_now);
            return ONE ? STATE_ROWS((int)slot_now).from(own_row) : kept;
        };
        fold_history(fold_keys, own_u, shared.gates[head - first_head], rows, c > 0, first_row,
                     ROUNDING_KEY(head, seq_len));
        sync_threads();
        // An empty history from here on, and the readout as it has been stored.
        // What was known of the row is read again: kept through the fold it would cost registers.
        u32 row_now = blockIdx.y;
        hold_until_here(row_now);
        slot = state_batch_indices[row_now], seq_len = seq_lens[row_now];
        start = window_starts[row_now], length = window_lens[row_now];
        own_readout.load(STATE_ROWS(slot).from(own_row), own_scales);
        history = 0, c = seq_len;
#if TILED_WINDOW
        own_readout.store_units(own_units, true);
        sync_warp();
        state_queries.set(shared.half_queries);  // computed again, not kept through the fold
#else
        for (int i = lane; i < U_SIZE / 8; i += 32) ((uint4*)own_u)[i] = make_uint4(0, 0, 0, 0);
        copy_async_wait();
        sync_warp();
        state_queries.set(shared.half_queries);
        products.compute(stage, own_readout, STATE_ROWS(slot).from(own_row), own_scales, state_queries, shared.queries);
#endif
    }

    // Held back: addresses that are computed from them further up would cost registers.
    u32 slot_now = slot, start_now = start, thread_now = threadIdx.x;
    hold_until_here(slot_now), hold_until_here(start_now), hold_until_here(thread_now);
    const u32 index_now = blockIdx.x * WARPS + thread_now / 32;
    const Gates& gates = shared.gates[index_now / CTAS_PER_HEAD - first_head];
    const int first_new = (u32)seq_len % RING_LEN;
    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    if (first_of_group)
        for_window_chunks<COLUMNS, THREADS>(length, tid, [&](int w, int offset) {
            *(uint4*)(ring_k + (offset_of((int)slot_now, ring_k_stride) +
                                (wrapped(first_new + w) * (GROUPS * COLUMNS) + k_column + offset))) =
                *(const uint4*)(shared.queries + (MAX_WINDOW + w) * TOKEN_STRIDE + offset);
        });
    // As after a fold: a row without history has the decay of its window alone, and its position is what it was.
    const bool is_folded = c == seq_len;
    if (is_folded && lane < CTA_TILES)
        position[offset_of((int)slot_now, position_stride) + index_now * CTA_TILES + lane] = seq_len;

#if TILED_WINDOW
    TiledCoefficients coefficients;
    coefficients.compute(shared.queries, shared.k, gates, flush ? gates.window : gates.all, history,
                         shared.window_coefficients[window_share()]);
    solve_tiled(own_readout, STATE_ROWS((int)slot_now).from(index_now * CTA_ROWS), state_queries,
                TiledPlaces(own_units, own_v, own_u), coefficients, history, c > 0);
    sync_warp();
    let_next_grid_start();
    const long long own_place = offset_of((int)slot_now, ring_u_stride) +
                                (index_now / CTAS_PER_HEAD * (U_PLANES * ROWS) + index_now % CTAS_PER_HEAD * CTA_ROWS);
    store_tiled(own_u, own_v, length, ring_u + own_place, first_new,
                o + (offset_of((int)start_now, HEADS * ROWS) + index_now * CTA_ROWS));
#else
    const auto u_of = [&](int w) {
        return ring_u + (offset_of((int)slot_now, ring_u_stride) +
                         (wrapped(first_new + w) * (HEADS * U_PLANES * ROWS) +
                          index_now / CTAS_PER_HEAD * (U_PLANES * ROWS) + index_now % CTAS_PER_HEAD * CTA_ROWS));
    };
    const auto o_of = [&](int w) { return o + (offset_of((int)start_now + w, HEADS * ROWS) + index_now * CTA_ROWS); };
    Scores scores;
    scores.compute(shared.k, (int)(shared.queries - shared.k), history);
    float* pairs = shared.pairs + (ONE ? 0 : warp * QUERIES * WINDOW_ROWS);
    Coefficients coefficients;
    coefficients.compute(scores, gates, pairs, history);
    const bool has_state = c > 0;
    Sums sums;
    sums.compute(stage, products, flush ? gates.window : gates.all, has_state, own_u, coefficients);
    sync_warp();

    let_next_grid_start();
    solve_rows(sums, stage, own_readout, has_state, own_v, gates, pairs, coefficients.pair, length, own_u, u_of, o_of);
#endif
}
