// Gated DeltaNet over a replayed history: decode and verify windows of up to MAX_WINDOW tokens, and longer (prefill)
// rows token by token. A thread block works for one row of the batch, on as many parts of its state, CTA_ROWS rows of a
// value head each, as the grid is short of: all parts share a key head, and so the ring's k and the window's q and k.
// What these say is computed once; then every warp runs through its 16 rows of part after part on its own, while the
// copies of the next STAGES parts are under way. What depends on the window alone is solved once per head: two small
// matrices turn what the state and the history say into the window's u and outputs. See plugins/reference/gdn.py.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, MAX_PARTS, STAGES,
// U_REPLACES_QUERIES, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT, ACTIVATION_FORMAT, U_PLANES, BULK_COPY, MIN_CTAS,
// SHARED_BYTES. (AHEAD_ROWS is not used: blocks wait for their rings too seldom to ask for later ones.)
#include "gdn_parameters.cuh"
#include "gdn_rows.cuh"
#include "gdn_solve.cuh"

constexpr int K_CHUNKS = COLUMNS / 8;  // of 16 bytes
// Neighbouring lanes that normalise one row of q or k, a chunk each.
constexpr int ROW_LANES = K_CHUNKS <= 2 ? 2 : K_CHUNKS <= 4 ? 4 : K_CHUNKS <= 8 ? 8 : K_CHUNKS <= 16 ? 16 : 32;
constexpr int QUERY_STEPS = (QUERIES * ROW_LANES + THREADS - 1) / THREADS;
constexpr int PARTS = HEADS * CTAS_PER_HEAD;  // of a row
constexpr int BLOCK_HEADS = MAX_PARTS < CTAS_PER_HEAD ? 1 : MAX_PARTS / CTAS_PER_HEAD;
constexpr int HEAD_STEPS = (BLOCK_HEADS + WARPS - 1) / WARPS;
static_assert(HEADS_PER_GROUP % BLOCK_HEADS == 0, "a block's parts share a key head");
// Where a block has two warps for each head, one computes what the window has in itself and one what the history says.
constexpr bool SHARED_WORK = MAX_WINDOW > 1 && 2 * BLOCK_HEADS <= WARPS;

// U_REPLACES_QUERIES: where the warps keep their queries, the place of the window's q and k is needed no longer when
// they start on the parts, and becomes that of u.
constexpr int QUERY_ELEMENTS = QUERIES * TOKEN_STRIDE, U_ELEMENTS = WARPS * U_ROWS * 16;

// What the history's u are multiplied by, of all heads, takes the place of its k, unless that is folded.
constexpr int K_BYTES = HISTORY_ROWS * TOKEN_STRIDE * sizeof(activation_t);
constexpr int COEFFICIENT_BYTES = BLOCK_HEADS * HISTORY_TILES * QUERY_TILES * 128 * sizeof(float);

struct Shared {
    alignas(128) state_t tile[STAGES][PADDED_ROWS * COLUMNS];
    alignas(16) unsigned char k_or_coefficients[larger(K_BYTES, COEFFICIENT_BYTES)];
    alignas(16) activation_t queries[U_REPLACES_QUERIES ? larger(QUERY_ELEMENTS, U_ELEMENTS) : QUERY_ELEMENTS];
    alignas(16) u16 scaled_queries[SCALED_QUERIES ? QUERIES * TOKEN_STRIDE : 8];
    alignas(16) u16 u[U_REPLACES_QUERIES ? 8 : U_ELEMENTS];
    alignas(16) WindowMatrices matrices[BLOCK_HEADS];
    alignas(16) Gates gates[BLOCK_HEADS];
    alignas(8) u64 barriers[WARPS][STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// body(row, chunk) for all of COUNT rows of CHUNKS, spread over the block's threads.
template <int COUNT, int CHUNKS, class Body>
DEVICE void spread_chunks(const Body& body) {
    const u32 tid = threadIdx.x;
    if constexpr (THREADS % CHUNKS == 0) {
        constexpr u32 STEP = THREADS / CHUNKS;
        const u32 row = tid / CHUNKS, chunk = tid % CHUNKS;
#pragma unroll
        for (u32 first = 0; first < COUNT; first += STEP)
            if (COUNT % STEP == 0 || first + row < COUNT) body((int)(first + row), (int)chunk);
    } else {
        spread<COUNT * CHUNKS>([&](int i) { body((int)((u32)i / CHUNKS), (int)((u32)i % CHUNKS)); });
    }
}

// L2-normalises the rows of q and k, of which every thread holds chunks, rounds them and leaves them in shared memory.
// append(w, offset, chunk) gets what is done of k.
template <class Append>
DEVICE void normalize_queries(const uint4 (&raw)[QUERY_STEPS], activation_t* queries, u16* scaled_queries,
                              const Append& append) {
    const u32 tid = threadIdx.x;
#pragma unroll
    for (int s = 0; s < QUERY_STEPS; s++) {
        if (s * THREADS + tid / 32 * 32 >= QUERIES * ROW_LANES) break;
        const u32 i = s * THREADS + tid, n = i / ROW_LANES, chunk = i % ROW_LANES;
        const u32 words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            sum = multiply_add(activation_low(words[e]), activation_low(words[e]), sum);
            sum = multiply_add(activation_high(words[e]), activation_high(words[e]), sum);
        }
#pragma unroll
        for (int mask = ROW_LANES / 2; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        const float scale = rsqrtf(sum + L2_NORM_EPS);
        u32 done[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            done[e] = pack_activations(activation_low(words[e]) * scale, activation_high(words[e]) * scale);
        const uint4 normal = make_uint4(done[0], done[1], done[2], done[3]);
        if (n >= QUERIES || chunk >= K_CHUNKS) continue;
        *(uint4*)(queries + n * TOKEN_STRIDE + chunk * 8) = normal;
        if constexpr (SCALED_QUERIES) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                done[e] = (u32)float_to_fp16(activation_low(done[e]) * QUERY_UPSCALE) |
                          (u32)float_to_fp16(activation_high(done[e]) * QUERY_UPSCALE) << 16;
            *(uint4*)(scaled_queries + n * TOKEN_STRIDE + chunk * 8) = make_uint4(done[0], done[1], done[2], done[3]);
        }
        if (n >= MAX_WINDOW) append((int)n - MAX_WINDOW, (int)chunk * 8, normal);
    }
}

// Asks for the warp's rows of a part; one thread does where there is a copy engine.
DEVICE void start_rows(state_t* tile, const state_t* global, int rows, u64* barrier) {
#if BULK_COPY
    if (threadIdx.x % 32 == 0) bulk_copy_next(tile, global, rows * COLUMNS * sizeof(state_t), barrier);
#else
    constexpr int PER_COPY = 16 / sizeof(state_t);
    for (int i = threadIdx.x % 32u; i < rows * COLUMNS / PER_COPY; i += 32)
        copy_async_16(tile + i * PER_COPY, global + i * PER_COPY, true);
#endif
}
DEVICE void wait_for_rows(u64* barrier, u32 parity) {
#if BULK_COPY
    bulk_copy_wait(barrier, parity);
#endif
}

// Column of part `index` of the row's state in a ring entry of u.
DEVICE int u_column(u32 index) {
    return (int)(index / CTAS_PER_HEAD * (U_PLANES * ROWS) + index % CTAS_PER_HEAD * CTA_ROWS);
}

KERNEL(THREADS, MIN_CTAS)
gdn_window(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x;
    const int lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const u32 parts = (u32)PARTS / gridDim.x, first_part = blockIdx.x * parts;
    const Block first = part_of_state(first_part);
    const int k_column = first.group * COLUMNS;
    const int block_heads = (first_part + parts - 1) / CTAS_PER_HEAD + 1 - first.head;
    // Of the warp: its rows of a part, and what it keeps of them in shared memory.
    const int warp_rows = CTA_ROWS % 16 == 0 || warp < WARPS - 1 ? 16 : CTA_ROWS % 16;
    state_t* const tiles = shared.tile[0] + warp * 16 * COLUMNS;
    activation_t* const history_k = (activation_t*)shared.k_or_coefficients;
    float* const coefficients = (float*)shared.k_or_coefficients;
    u16* const u_past = (U_REPLACES_QUERIES ? shared.queries : shared.u) + warp * (U_ROWS * 16);
    u64* const barriers = shared.barriers[warp];

    wait_for_previous_grid();
    let_next_grid_start();
    // All that is known before the slot, then all that the slot tells, then the first parts: nothing here waits for
    // more than the row's slot. A fresh sequence ignores the state.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    // Heads that the warp prepares: every WARPS-th.
    float log_A[HEAD_STEPS], bias[HEAD_STEPS];
#pragma unroll
    for (int s = 0; s < HEAD_STEPS; s++)
        if (warp + s * WARPS < block_heads)
            log_A[s] = A_log[first.head + warp + s * WARPS], bias[s] = dt_bias[first.head + warp + s * WARPS];
#if BULK_COPY
    if (lane == 0) bulk_barriers_init(barriers, STAGES);
#endif
    const bool has_slot = slot >= 0 && slot < num_slots;
    const state_t* const slot_state =
        computed(advance(checkpoint_in, has_slot ? slot : 0, checkpoint_stride) +
                 (first_part * CTA_ROWS + warp * 16) * COLUMNS);
    const auto start_part = [&](u32 i) {
        if (i < parts)
            start_rows(tiles + i % STAGES * (PADDED_ROWS * COLUMNS), slot_state + i * (CTA_ROWS * COLUMNS), warp_rows,
                       barriers + i % STAGES);
    };
    int tile_position = 0;
    if (has_slot) {
        tile_position = advance(position_in + first.tile, slot, position_stride)[0];
#pragma unroll
        for (int i = 0; i < STAGES; i++) start_part(i);
    }
    // The window's own inputs travel while the checkpoint position does; a row that turns out invalid ignores them.
    // Neither sum overflows unsigned where it counts.
    const bool readable = start >= 0 && window_length >= 0 && (u32)start + (u32)window_length <= (u32)num_tokens;
    const int copied = readable && window_length <= MAX_WINDOW ? window_length : 0;
    uint4 raw[QUERY_STEPS];
#pragma unroll
    for (int s = 0; s < QUERY_STEPS; s++) {
        const u32 i = s * THREADS + tid, n = i / ROW_LANES, chunk = i % ROW_LANES;
        const bool is_q = n < MAX_WINDOW;
        const int w = is_q ? n : n - MAX_WINDOW;
        const bool valid = n < QUERIES && w < copied && chunk < K_CHUNKS;
        const activation_t* from = (is_q ? q : k) + (k_column + chunk * 8);
        raw[s] = make_uint4(0, 0, 0, 0);
        if (valid) raw[s] = *(const uint4*)advance(from, start + w, is_q ? q_stride : k_stride);
    }
    // v, which the warps ask for late, when registers are free, shall then be near: all parts' where the window's
    // matrices are worked out beside the history's scores.
    if (warp == WARPS - 1 && lane < copied)
        for (u32 row = 0; row < (SHARED_WORK && MAX_PARTS > 1 ? parts : 1) * CTA_ROWS; row += 64)
            prefetch_line(advance(v + (first_part * CTA_ROWS + row), start + lane, v_stride));
    u32 raw_a[HEAD_STEPS] = {}, raw_b[HEAD_STEPS] = {};
#pragma unroll
    for (int s = 0; s < HEAD_STEPS; s++)
        if (warp + s * WARPS < block_heads && lane < copied) {
            raw_a[s] = advance(a + (first.head + warp + s * WARPS), start + lane, a_stride)[0];
            raw_b[s] = advance(b + (first.head + warp + s * WARPS), start + lane, b_stride)[0];
        }
    const int c = seq_len ? tile_position : 0, history = seq_len - c, length = window_length;
    const bool in_range = seq_len >= 0 && (u32)seq_len + (u32)length <= (u32)max_seq_len;
    // The ordinary row, in few instructions; make_row says what is wrong with another.
    if (!has_slot || !copied || !in_range || (u32)seq_len - (u32)c > (u32)MAX_HISTORY) {
        const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                                 MAX_HISTORY);
        copy_async_wait();
        sync_threads();
        if (has_slot)
#pragma unroll
            for (int i = 0; i < STAGES; i++)
                if (i < (int)parts) wait_for_rows(barriers + i, 0);
        for (u32 i = 0; i < parts; i++) {
            const Block part = part_of_state(first_part + i);
            const int v_column = part.head * ROWS + part.first_row;
            const SerialInputs inputs =
                SERIAL_INPUTS(row.start, slot, part.head, k_column, v_column,
                              part.head * U_PLANES * ROWS + part.first_row, -expf(A_log[part.head]), dt_bias[part.head]);
            const long long state = offset_of(slot, checkpoint_stride) + v_column * COLUMNS;
            finish_other_row(row, skip_prefill, inputs, checkpoint_in + state, checkpoint + state,
                             position + (offset_of(slot, position_stride) + part.tile), o + v_column, error_flag);
        }
        return;
    }

    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int first_entry = (u32)c % RING_LEN, first_new = wrapped(first_entry + history);  // in the ring
    float g_past[HEAD_STEPS] = {};
    const float* slot_ring_g = advance(ring_g_in + first.head, slot, ring_g_stride);
#pragma unroll
    for (int s = 0; s < HEAD_STEPS; s++)
        if (warp + s * WARPS < block_heads && lane < history)
            g_past[s] = slot_ring_g[wrapped(first_entry + lane) * HEADS + warp + s * WARPS];
    const activation_t* slot_ring_k = advance(ring_k_in + k_column, slot, ring_k_stride);
    spread_chunks<HISTORY_ROWS, K_CHUNKS>([&](int j, int chunk) {
        copy_async_16(history_k + j * TOKEN_STRIDE + chunk * 8,
                      advance(slot_ring_k + chunk * 8, wrapped(first_entry + j), GROUPS * COLUMNS), j < history);
    });
    // The warp's u of a part: 16 bytes of every token and plane for each 8 rows.
    constexpr int U_STEPS = (U_ROWS * 2 + 31) / 32;
    const u16* const slot_u = advance(ring_u_in + warp * 16, slot, ring_u_stride);
    const u16* from_u[U_STEPS];
    u32 to_u_past[U_STEPS];
    bool valid_u[U_STEPS];
#pragma unroll
    for (int s = 0; s < U_STEPS; s++) {
        const u32 n = s * 32 + lane, chunk = n % 2, plane = n / 2 % U_PLANES, j = n / (2 * U_PLANES);
        const int entry = wrapped(first_entry + j);
        from_u[s] = computed(slot_u + (entry * (HEADS * U_PLANES * ROWS) + (int)(plane * ROWS + chunk * 8)));
        to_u_past[s] = u_offset(j, plane, chunk);
        hold_until_here(to_u_past[s]);
        valid_u[s] = (int)j < history && (int)chunk * 8 < warp_rows && n < U_ROWS * 2;
    }
    const auto start_u = [&](u32 i) {
        if (i >= parts) return;
        const int offset = u_column(first_part + i);
#pragma unroll
        for (int s = 0; s < U_STEPS; s++)
            if (U_ROWS * 2 % 32 == 0 || s * 32 + lane < U_ROWS * 2)
                copy_async_16(u_past + to_u_past[s], from_u[s] + offset, valid_u[s]);
        copy_async_commit();
    };
    // The first part's, where their place is not free yet, wait in registers.
    uint4 first_u[U_REPLACES_QUERIES ? U_STEPS : 1];
    if constexpr (U_REPLACES_QUERIES) {
        const int offset = u_column(first_part);
#pragma unroll
        for (int s = 0; s < U_STEPS; s++) {
            first_u[s] = make_uint4(0, 0, 0, 0);
            if (valid_u[s]) first_u[s] = *(const uint4*)(from_u[s] + offset);
        }
    } else {
        start_u(0);
    }

    // k is appended to the ring: these rows are no row's history yet, so nobody reads them during this launch.
    normalize_queries(raw, shared.queries, shared.scaled_queries, [&](int w, int offset, uint4 normal) {
        if (first.first_of_group && w < length)
            *(uint4*)(advance(ring_k + k_column, slot, ring_k_stride) +
                      (wrapped(first_new + w) * (GROUPS * COLUMNS) + offset)) = normal;
    });
#pragma unroll
    for (int s = 0; s < HEAD_STEPS; s++) {
        const int head = warp + s * WARPS;
        if (head >= block_heads) break;
        const float g_new = lane < length ? -expf(log_A[s]) * softplus(activation_to_float(raw_a[s]) + bias[s]) : 0.f;
        write_gates(shared.gates[head], history, g_past[s], g_new, sigmoid(activation_to_float(raw_b[s])));
        if ((head > 0 || first.first_of_head) && lane < length)
            advance(ring_g + (first.head + head), slot, ring_g_stride)[wrapped(first_new + lane) * HEADS] = g_new;
    }
    copy_async_wait();
    sync_threads();
    if (flush || seq_len == 0)
        for (u32 i = tid; i < parts * CTA_TILES; i += THREADS)
            advance(position + first.tile, slot, position_stride)[i] = seq_len;

    if (SHARED_WORK)
        for (int head = WARPS - 1 - warp; head < block_heads; head += WARPS)
            write_window_matrices(shared.matrices[head], shared.queries, shared.gates[head]);
    // k of the history against all queries, for all heads.
    float scores[HISTORY_TILES][QUERY_TILES][4] = {};
    if (MAX_WINDOW == 1 || (!flush && (!SHARED_WORK || warp < block_heads))) {
        const activation_t* query_rows[(QUERY_TILES + 1) / 2];
        query_loads(query_rows, shared.queries);
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            const bool last = m == HISTORY_TILES - 1;
            if (m * 16 >= history && !(MAX_WINDOW == 1 && last)) continue;
            int token = m * 16 + lane % 16;
            if (token >= HISTORY_ROWS) token = HISTORY_ROWS - 1;
            const activation_t* from = history_k + token * TOKEN_STRIDE;
            // A history that is not folded leaves the last row free: it stands for the new token.
            if (MAX_WINDOW == 1 && last && lane % 16 == 15) from = shared.queries + TOKEN_STRIDE;
            token_scores(scores[m], from + lane / 16 * 8, query_rows);
        }
    }
    Queries queries;
    queries.load(SCALED_QUERIES ? shared.scaled_queries : shared.queries);
    const float own_score = shuffle_from(scores[HISTORY_TILES - 1][0][2], 28);  // k . q of a single token
    sync_threads();  // all have read k
    for (int head = warp; head < block_heads; head += WARPS) {
        if (!flush)
            write_coefficients(coefficients + head * (HISTORY_TILES * QUERY_TILES * 128), scores, shared.gates[head]);
        if (MAX_WINDOW > 1 && !SHARED_WORK)
            write_window_matrices(shared.matrices[head], shared.queries, shared.gates[head]);
    }
    sync_threads();
    if constexpr (U_REPLACES_QUERIES)
#pragma unroll
        for (int s = 0; s < U_STEPS; s++)
            if (s * 32 + lane < U_ROWS * 2) *(uint4*)(u_past + to_u_past[s]) = first_u[s];

    // From here on a warp needs only its own rows.
    // The lane's v: row g + 8 (e % 2), and the token of query 2 t + e / 2. Fetched one part ahead.
    const activation_t* v_rows[TOKEN_TILES][2];
    bool v_exists[TOKEN_TILES][2];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int w = MAX_WINDOW == 1 ? 0 : (m * 8 + 2 * t + e) % (ONE_TILE ? 4 : WINDOW_ROWS);
            v_exists[m][e] = w < length && (MAX_WINDOW > 1 || e == 0);
            v_rows[m][e] = computed(v + (offset_of(start + w, v_stride) + ((int)first_part * CTA_ROWS + warp * 16 + g)));
        }
    u32 raw_v[TOKEN_TILES][4] = {};
    const auto load_v = [&](u32 i) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (v_exists[m][e / 2] && (CTA_ROWS % 16 == 0 || g + e % 2 * 8 < warp_rows))
                    raw_v[m][e] = v_rows[m][e / 2][i * CTA_ROWS + e % 2 * 8];
    };
    load_v(0);
    const int row_offset = t % 2 * 8 + t / 2 * 4;
    const bool row_exists = row_offset < warp_rows;
    const int token = MAX_WINDOW == 1 ? 0 : g;  // of the lane's results
    const u16* to_ring[TOKEN_TILES];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
        to_ring[m] = computed(ring_u + (offset_of(slot, ring_u_stride) +
                                        (wrapped(first_new + (m * 8 + token) % WINDOW_ROWS) * (HEADS * U_PLANES * ROWS) +
                                         warp * 16 + row_offset)));
    const activation_t* const to_output = computed(
        o + (offset_of(start + token, HEADS * ROWS) + ((int)first_part * CTA_ROWS + warp * 16 + row_offset)));
    u32 u_lane = u_of_lane();
    hold_until_here(u_lane);
#pragma unroll 1
    for (u32 i = 0; i < parts; i++) {
        const u32 stage = i % STAGES;
        const int head = (first_part + i) / CTAS_PER_HEAD - first.head;
        const Gates& gates = shared.gates[head];
        float values[TOKEN_TILES][4];
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) values[m][e] = activation_to_float(raw_v[m][e]);
        if (i + 1 < parts) load_v(i + 1);
        // Decay of the history and window behind each query, with the scale of q.
        const float base = flush ? 1.f : gates.total;
        float factor[QUERY_TILES][2];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            const bool is_q = ONE_TILE ? t < 2 : n < TOKEN_TILES;
            const float2 prefix =
                *(const float2*)(gates.prefix + (ONE_TILE ? 2 * t % 4 : n % TOKEN_TILES * 8 + 2 * t));
            factor[n][0] = is_q ? QUERY_SCALE * prefix.x : prefix.x;
            factor[n][1] = is_q ? QUERY_SCALE * prefix.y : prefix.y;
        }
        // This part's copies; the last group's belong to the next.
        if (STAGES > 1)
            copy_async_wait_but_last();
        else
            copy_async_wait();
        sync_warp();
        float sum[QUERY_TILES][4] = {};
        FoldedU folded;
        if (flush) {
            float weights[HISTORY_TILES][4];
            load_weights(weights, gates);
            folded.load(u_past, weights);
        } else {
#pragma unroll
            for (int m = 0; m < HISTORY_TILES; m++) {
                if (m * 16 >= history) continue;
                float value[QUERY_TILES][4];
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) {
                    const float4 four = *(const float4*)(
                        coefficients + ((head * HISTORY_TILES + m) * QUERY_TILES + n) * 128 + lane * 4);
                    value[n][0] = four.x, value[n][1] = four.y, value[n][2] = four.z, value[n][3] = four.w;
                }
                add_history(sum, value, u_past, u_lane, m);
            }
        }
        sync_warp();  // all lanes have read what the next copies overwrite
        start_u(i + 1);
        StateProducts products;
        products.clear();
        wait_for_rows(barriers + stage, i / STAGES % 2);
        state_t* const rows = tiles + stage * (PADDED_ROWS * COLUMNS);
        if (flush)
            fold_and_multiply_rows(
                products, rows,
                advance(checkpoint, slot, checkpoint_stride) + ((first_part + i) * CTA_ROWS + warp * 16) * COLUMNS, c > 0,
                gates.total, folded, history_k, queries);
        else if (c > 0)
            multiply_rows(products, rows, queries);
        sync_warp();
        start_part(i + STAGES);
        copy_async_commit();
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[n][e] += factor[n][e % 2] * (base / QUERY_UPSCALE) * products.value(n, e);

        Results results = {(activation_t*)to_output + i * CTA_ROWS, {}, length, row_exists};
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++) results.u[m] = (u16*)to_ring[m] + u_column(first_part + i);
        if constexpr (MAX_WINDOW == 1)
            finish_token(sum, values[0], gates.beta[0], own_score, results);
        else
            finish_window(sum, values, shared.matrices[head], results);
    }
}
