// Mamba2 over a replayed history: decode and verify windows of up to MAX_WINDOW tokens. Longer (prefill) rows belong to
// mamba2_prefill.cu if `skip_prefill` says so, and go token by token otherwise. One thread block per (row of the batch,
// head, CTA_ROWS rows of the state). See plugins/reference/mamba2.py.
//
// Stamped in: NHEADS, HEADDIM, DSTATE, NGROUPS, ROW_TILES, CTA_ROWS, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT,
// ACTIVATION_FORMAT, BULK_COPY, MIN_CTAS, SHARED_BYTES.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "replay.cuh"
#include "mamba2_parameters.cuh"
#include "mamba2_rows.cuh"

constexpr int QUERY_TILES = WINDOW_ROWS / 8;
// Rows of tokens in shared memory: row k of the history is the token HISTORY_ROWS - k before the window, so that its
// ring entry does not depend on the checkpoint position; then the window. What is neither is zero.
constexpr int TOKEN_ROWS = HISTORY_ROWS + WINDOW_ROWS;
constexpr int COEFFICIENT_STRIDE = TOKEN_ROWS + 4;

struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    alignas(16) activation_t B[TOKEN_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t C[MAX_WINDOW * TOKEN_STRIDE];
    alignas(16) activation_t x[TOKEN_ROWS * VALUE_STRIDE];
    alignas(16) float coefficients[QUERY_TILES * 8 * COEFFICIENT_STRIDE];
    Decays decays;
    float dt_history[HISTORY_ROWS];
    float dt_window[WINDOW_ROWS];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

KERNEL(THREADS, MIN_CTAS)
mamba2_window(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const u32 from_end = THREADS - 1 - tid;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;
    const int x_column = block.head * ROWS + block.first_row, B_column = block.group * COLUMNS;

    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], D_head = D[block.head], bias = dt_bias[block.head];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    const state_t* slot_state = checkpoint_in + (offset_of(slot, checkpoint_stride) + state_offset);
    int tile_position = 0, later_position = 0;
    if (has_slot) {
        tile_position = position_in[offset_of(slot, position_stride) + tile_index];
        tile_copy_start(shared.tile, slot_state, &shared.barrier);
    }
    if (later.exists) later_position = position_in[offset_of(later.slot, position_stride) + tile_index];

    // The window's own inputs travel while the checkpoint position does; a row that turns out invalid ignores them.
    const bool readable = start >= 0 && window_length >= 0 && (long long)start + window_length <= num_tokens;
    const int copied = readable && window_length <= MAX_WINDOW ? window_length : 0;
    constexpr u32 B_CHUNKS = COLUMNS / 8, X_CHUNKS = CTA_ROWS / 8;
    const activation_t* row_x = computed(x + (offset_of(start, x_stride) + x_column));
    const activation_t* row_B = computed(B + (offset_of(start, B_stride) + B_column));
    const activation_t* row_C = computed(C + (offset_of(start, C_stride) + B_column));
    spread<WINDOW_ROWS * B_CHUNKS>([&](u32 i) {
        const int w = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
        copy_async_16(shared.B + (HISTORY_ROWS + w) * TOKEN_STRIDE + offset, row_B + (w * B_stride + offset),
                      w < copied);
    });
    spread_from_end<WINDOW_ROWS * X_CHUNKS>([&](u32 i) {
        const int w = i / X_CHUNKS, offset = i % X_CHUNKS * 8;
        copy_async_16(shared.x + (HISTORY_ROWS + w) * VALUE_STRIDE + offset, row_x + (w * x_stride + offset),
                      w < copied);
    });
    spread_from_end<MAX_WINDOW * B_CHUNKS>([&](u32 i) {
        const int w = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
        copy_async_16(shared.C + w * TOKEN_STRIDE + offset, row_C + (w * C_stride + offset), w < copied);
    });
    u32 raw_dt = 0;
    if (warp == 0 && (int)lane < copied) raw_dt = dt[offset_of(start + lane, dt_stride) + block.head];

    const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    activation_t* output = y + x_column;
    const activation_t* slot_ring_x = computed(ring_x_in + (offset_of(slot, ring_x_stride) + x_column));
    const activation_t* slot_ring_B = computed(ring_B_in + (offset_of(slot, ring_B_stride) + B_column));
    const float* slot_ring_dt = ring_dt_in + (offset_of(slot, ring_dt_stride) + block.head);
    if (!row.active || row.length > MAX_WINDOW) {
        const SerialInputs inputs = {row_x,
                                     dt + (offset_of(start, dt_stride) + block.head),
                                     row_B,
                                     row_C,
                                     x_stride,
                                     dt_stride,
                                     B_stride,
                                     C_stride,
                                     slot_ring_x,
                                     slot_ring_B,
                                     slot_ring_dt,
                                     -expf(log_A),
                                     D_head,
                                     bias};
        finish_other_row(row, has_slot, &shared.barrier, skip_prefill, inputs, slot_state,
                         checkpoint + (offset_of(slot, checkpoint_stride) + state_offset),
                         position + (offset_of(slot, position_stride) + tile_index), output, error_flag);
        return;
    }

    const int c = row.checkpoint_position, history = row.seq_len - c, length = row.length;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int dead = HISTORY_ROWS - history;  // rows before the history
    const int new_entry = (u32)seq_len % RING_LEN;
    const auto entry_of = [&](int k) {
        const int e = new_entry - HISTORY_ROWS + k;
        return e < 0 ? e + RING_LEN : e;
    };
    float dt_past = 0.f;
    if (warp == 0 && (int)lane >= dead && lane < HISTORY_ROWS) dt_past = slot_ring_dt[entry_of(lane) * HEADS];
    spread<HISTORY_ROWS * B_CHUNKS>([&](u32 i) {
        const int k = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
        copy_async_16(shared.B + k * TOKEN_STRIDE + offset, slot_ring_B + (entry_of(k) * (GROUPS * COLUMNS) + offset),
                      k >= dead);
    });
    spread<HISTORY_ROWS * X_CHUNKS>([&](u32 i) {
        const int k = i / X_CHUNKS, offset = i % X_CHUNKS * 8;
        copy_async_16(shared.x + k * VALUE_STRIDE + offset, slot_ring_x + (entry_of(k) * (HEADS * ROWS) + offset),
                      k >= dead);
    });
    if (warp == 0) {
        const float A = -expf(log_A);
        const float dt_new = (int)lane < length ? softplus(activation_to_float(raw_dt) + bias) : 0.f;
        scan_decays(shared.decays, A * dt_past, A * dt_new);
        if (lane < HISTORY_ROWS) shared.dt_history[lane] = dt_past;
        if (lane < WINDOW_ROWS) shared.dt_window[lane] = dt_new;
    }
    copy_async_wait();
    sync_threads();

    // Coefficients of x: decay, dt and B . C of every (window token, token) pair; D sits on the diagonal.
    constexpr int LAST_BLOCK = TOKEN_ROWS / 8;
    const int first_block = flush ? HISTORY_BLOCKS : 0;
    for (int k8 = first_block + (int)warp; k8 < LAST_BLOCK; k8 += WARPS) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        const int query_row = QUERY_TILES == 1 ? lane % 8 : lane % 16;
        scores<(QUERY_TILES > 1)>(sum, shared.C + (query_row < MAX_WINDOW ? query_row : MAX_WINDOW - 1) * TOKEN_STRIDE,
                                  shared.B + (k8 * 8 + lane % 8) * TOKEN_STRIDE);
#pragma unroll
        for (int i = 0; i < 2 * QUERY_TILES; i++) {
            const int w = g + 8 * (i / 2), k = k8 * 8 + 2 * t + i % 2, j = k - HISTORY_ROWS;
            const bool past = j < 0, live = (w < length) & (j <= w);
            const int token = past ? k : j;
            const float dt_token = (past ? shared.dt_history : shared.dt_window)[token];
            const float exponent = past ? shared.decays.history[token] + shared.decays.prefix[w]
                                        : window_log_decay(shared.decays, token, w);
            const float value = dt_token * decay_of(exponent) * sum[i];
            shared.coefficients[w * COEFFICIENT_STRIDE + k] = live ? (j == w ? value + D_head : value) : 0.f;
        }
    }

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    activation_t* to_x = ring_x + (offset_of(slot, ring_x_stride) + x_column);
    spread_from_end<MAX_WINDOW * X_CHUNKS>([&](u32 i) {
        const int w = i / X_CHUNKS, offset = i % X_CHUNKS * 8;
        if (w < length)
            *(uint4*)(to_x + (wrapped(new_entry + w) * (HEADS * ROWS) + offset)) =
                *(const uint4*)(shared.x + (HISTORY_ROWS + w) * VALUE_STRIDE + offset);
    });
    if (block.first_of_group) {
        activation_t* to_B = ring_B + (offset_of(slot, ring_B_stride) + B_column);
        spread_from_end<MAX_WINDOW * B_CHUNKS>([&](u32 i) {
            const int w = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
            if (w < length)
                *(uint4*)(to_B + (wrapped(new_entry + w) * (GROUPS * COLUMNS) + offset)) =
                    *(const uint4*)(shared.B + (HISTORY_ROWS + w) * TOKEN_STRIDE + offset);
        });
    }
    if (block.first_of_head && (int)from_end < length)
        ring_dt[offset_of(slot, ring_dt_stride) + (wrapped(new_entry + from_end) * HEADS + block.head)] =
            shared.dt_window[from_end];
    if ((flush || seq_len == 0) && from_end < CTA_TILES)
        position[offset_of(slot, position_stride) + (tile_index + (int)from_end)] = seq_len;
    prefetch_mamba2_ring(later, later_position, block, ring_x_in, ring_x_stride, ring_B_in, ring_B_stride, ring_dt_in,
                         ring_dt_stride);
    sync_threads();

    float sum[QUERY_TILES][4] = {};
    Products<QUERY_TILES> products;
    products.clear();
    const activation_t* own_x = shared.x + (lane % 8) * VALUE_STRIDE + warp * 16 + (lane / 8 & 1) * 8;
    const auto combine_block = [&](int k8) {
        u32 pairs[2];
        load_matrix_x2_transposed(pairs, own_x + k8 * 8 * VALUE_STRIDE);
        const float a[4] = {activation_low(pairs[0]), activation_low(pairs[1]), activation_high(pairs[0]),
                            activation_high(pairs[1])};
        combine<QUERY_TILES, COEFFICIENT_STRIDE>(sum, a, shared.coefficients + g * COEFFICIENT_STRIDE + k8 * 8);
    };
    if (!flush)
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) combine_block(k8);
#pragma unroll
    for (int k8 = HISTORY_BLOCKS; k8 < LAST_BLOCK; k8++) combine_block(k8);
    const activation_t* query[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        query[n] = shared.C + (n * 8 + g < MAX_WINDOW ? n * 8 + g : MAX_WINDOW - 1) * TOKEN_STRIDE;
    tile_copy_wait(&shared.barrier);
    if (flush) {
        float values[HISTORY_BLOCKS][4];
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) {
            u32 pairs[2];
            load_matrix_x2_transposed(pairs, own_x + k8 * 8 * VALUE_STRIDE);
            const int k = k8 * 8 + 2 * t;
            const float even = shared.dt_history[k] * decay_of(shared.decays.history[k]);
            const float odd = shared.dt_history[k + 1] * decay_of(shared.decays.history[k + 1]);
            values[k8][0] = even * activation_low(pairs[0]), values[k8][1] = even * activation_low(pairs[1]);
            values[k8][2] = odd * activation_high(pairs[0]), values[k8][3] = odd * activation_high(pairs[1]);
        }
        fold_and_dot_tile<QUERY_TILES>(products, shared.tile,
                                       checkpoint + (offset_of(slot, checkpoint_stride) + state_offset), c > 0,
                                       decay_of(shared.decays.total), values, shared.B, query);
    } else if (c > 0) {
        dot_tile<QUERY_TILES>(products, shared.tile, query);
    }

    // Each warp gathers its 16 rows of every token in its own columns of x, which nobody else reads any more.
    sync_warp();
    const float base = flush ? 0.f : shared.decays.total;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int w = n * 8 + 2 * t + i % 2;
            const float value = sum[n][i] + decay_of(base + shared.decays.prefix[w]) * products.value(n, i);
            if (w < length)
                shared.x[w * VALUE_STRIDE + warp * 16 + g + 8 * (i / 2)] = float_to_activation(value);
        }
    sync_warp();
    for (u32 i = lane; i < 2 * (u32)length; i += 32) {
        const u32 w = i / 2, offset = warp * 16 + i % 2 * 8;
        if (offset < CTA_ROWS)
            *(uint4*)(output + offset_of(start + w, HEADS * ROWS) + offset) =
                *(const uint4*)(shared.x + w * VALUE_STRIDE + offset);
    }
}
