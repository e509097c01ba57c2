// Gated DeltaNet over a replayed history: decode and verify windows of up to MAX_WINDOW tokens. Longer (prefill) rows
// belong to gdn_prefill.cu if `skip_prefill` says so, and go token by token otherwise. One thread block per (row of the
// batch, value head, CTA_ROWS rows of the state). What depends on the window alone is solved once per block, while the
// state travels: two small matrices then turn what the state and the history say into the window's u and outputs. See
// plugins/reference/gdn.py.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, BUFFER_LEN, MAX_WINDOW,
// STATE_FORMAT, ACTIVATION_FORMAT, U_PLANES, BULK_COPY, MIN_CTAS, AHEAD_ROWS, SHARED_BYTES.
#include "gdn_replay.cuh"
#include "gdn_rows.cuh"

constexpr int K_CHUNKS = COLUMNS / 8, V_CHUNKS = CTA_ROWS / 8;  // of 16 bytes
// Neighbouring lanes that normalise one row of q or k, a chunk each.
constexpr int ROW_LANES = K_CHUNKS <= 2 ? 2 : K_CHUNKS <= 4 ? 4 : K_CHUNKS <= 8 ? 8 : K_CHUNKS <= 16 ? 16 : 32;
constexpr int QUERY_STEPS = (QUERIES * ROW_LANES + THREADS - 1) / THREADS;
// Warps with a task of their own; the last one asks for the tile and looks ahead.
constexpr int GATE_WARP = 1 % WARPS, MATRIX_WARP = 2 % WARPS;

struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    alignas(16) activation_t k[HISTORY_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t queries[QUERIES * TOKEN_STRIDE];
    alignas(16) u16 scaled_queries[SCALED_QUERIES ? QUERIES * TOKEN_STRIDE : 8];
    alignas(16) u16 u[U_PLANES][HISTORY_ROWS * VALUE_STRIDE];
    alignas(16) WindowMatrices matrices;
    alignas(16) Gates gates;
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// body(row, chunk) for all of ROWS_ rows of CHUNKS, spread over the block's threads.
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

KERNEL(THREADS, MIN_CTAS)
gdn_window(
    // [T, Hk, dk], [T, Hk, dk], [T, Hv, dv], [T, Hv], [T, Hv]: tokens are *_stride elements apart, otherwise dense
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* a, const activation_t* b,
    // [Hv]
    const float* A_log, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    const state_t* checkpoint_in, const int* position_in, const activation_t* ring_k_in, const u16* ring_u_in,
    const float* ring_g_in, const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, int skip_prefill, int q_stride, int k_stride,
    int v_stride, int a_stride, int b_stride, int checkpoint_stride, int position_stride, int ring_k_stride,
    int ring_u_stride, int ring_g_stride,
    // [T, Hv, dv] dense, then the state parts again: in place, written through these
    activation_t* o, state_t* checkpoint, int* position, activation_t* ring_k, u16* ring_u, float* ring_g,
    int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x;
    const int lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;
    const int k_column = block.group * COLUMNS, v_column = block.head * ROWS + block.first_row;
    const int u_column = block.head * U_PLANES * ROWS + block.first_row;

    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], bias = dt_bias[block.head];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    int tile_position = 0, later_position = 0;
    if (has_slot) {
        tile_position = advance(position_in + tile_index, slot, position_stride)[0];
        tile_copy_start(shared.tile, advance(checkpoint_in + state_offset, slot, checkpoint_stride), &shared.barrier);
    }
    if (later.exists) later_position = advance(position_in + tile_index, later.slot, position_stride)[0];
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
    float raw_a = 0.f, raw_b = 0.f;
    if (warp == GATE_WARP && lane < copied) {
        raw_a = activation_to_float(advance(a + block.head, start + lane, a_stride)[0]);
        raw_b = activation_to_float(advance(b + block.head, start + lane, b_stride)[0]);
    }
    activation_t* output = o + v_column;
    const int c = seq_len ? tile_position : 0, history = seq_len - c, length = window_length;
    const bool in_range = seq_len >= 0 && (u32)seq_len + (u32)length <= (u32)max_seq_len;
    // The ordinary row, in few instructions; make_row says what is wrong with another.
    if (!has_slot || !copied || !in_range || (u32)seq_len - (u32)c > (u32)MAX_HISTORY) {
        const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                                 MAX_HISTORY);
        const SerialInputs inputs = {
            q + (long long)row.start * q_stride + k_column, k + (long long)row.start * k_stride + k_column,
            v + (long long)row.start * v_stride + v_column, a + (long long)row.start * a_stride + block.head,
            b + (long long)row.start * b_stride + block.head, q_stride, k_stride, v_stride, a_stride, b_stride,
            ring_k_in + (long long)slot * ring_k_stride + k_column,
            ring_u_in + (long long)slot * ring_u_stride + u_column,
            ring_g_in + (long long)slot * ring_g_stride + block.head, -expf(log_A), bias};
        finish_other_row(row, has_slot, &shared.barrier, skip_prefill, inputs,
                         advance(checkpoint_in + state_offset, slot, checkpoint_stride),
                         advance(checkpoint + state_offset, slot, checkpoint_stride),
                         advance(position + tile_index, slot, position_stride), output, error_flag);
        return;
    }

    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int first_entry = (u32)c % RING_LEN, first_new = wrapped(first_entry + history);  // in the ring
    float g_past = 0.f;
    if (warp == GATE_WARP && lane < history)
        g_past = advance(ring_g_in + block.head, slot, ring_g_stride)[wrapped(first_entry + lane) * HEADS];
    const activation_t* slot_ring_k = advance(ring_k_in + k_column, slot, ring_k_stride);
    const u16* slot_ring_u = advance(ring_u_in + u_column, slot, ring_u_stride);
    spread_chunks<HISTORY_ROWS, K_CHUNKS>([&](int j, int chunk) {
        copy_async_16(shared.k + j * TOKEN_STRIDE + chunk * 8,
                      advance(slot_ring_k + chunk * 8, wrapped(first_entry + j), GROUPS * COLUMNS), j < history);
    });
    spread_chunks<HISTORY_ROWS, U_PLANES * V_CHUNKS>([&](int j, int i) {
        const int plane = (u32)i / V_CHUNKS, offset = (u32)i % V_CHUNKS * 8;
        copy_async_16(&shared.u[0][0] + (plane * HISTORY_ROWS + j) * VALUE_STRIDE + offset,
                      advance(slot_ring_u + (plane * ROWS + offset), wrapped(first_entry + j), HEADS * U_PLANES * ROWS),
                      j < history);
    });
    if (later.exists)
        prefetch_history(later, later_position, block, advance(ring_k_in + k_column, later.slot, ring_k_stride),
                         advance(ring_u_in + u_column, later.slot, ring_u_stride),
                         advance(ring_g_in + block.head, later.slot, ring_g_stride));

    // L2-normalises q and k and appends k to the ring. These rows are no row's history yet, so nobody reads them during
    // this launch.
#pragma unroll
    for (int s = 0; s < QUERY_STEPS; s++) {
        if (s * THREADS + warp * 32 >= QUERIES * ROW_LANES) break;
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
        if (n < QUERIES && chunk < K_CHUNKS) {
            *(uint4*)(shared.queries + n * TOKEN_STRIDE + chunk * 8) = normal;
            if constexpr (SCALED_QUERIES) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    done[e] = (u32)float_to_fp16(activation_low(done[e]) * QUERY_UPSCALE) |
                              (u32)float_to_fp16(activation_high(done[e]) * QUERY_UPSCALE) << 16;
                *(uint4*)(shared.scaled_queries + n * TOKEN_STRIDE + chunk * 8) =
                    make_uint4(done[0], done[1], done[2], done[3]);
            }
            const int w = (int)n - MAX_WINDOW;
            if (block.first_of_group && w >= 0 && w < length)
                *(uint4*)(advance(ring_k + k_column, slot, ring_k_stride) +
                          (wrapped(first_new + w) * (GROUPS * COLUMNS) + (int)chunk * 8)) = normal;
        }
    }
    if (warp == GATE_WARP) {
        const float g_new = lane < length ? -expf(log_A) * softplus(raw_a + bias) : 0.f;
        write_gates(shared.gates, history, g_past, g_new, sigmoid(raw_b));
        if (block.first_of_head && lane < length)
            advance(ring_g + block.head, slot, ring_g_stride)[wrapped(first_new + lane) * HEADS] = g_new;
    }
    copy_async_wait();
    sync_threads();
    const u32 from_end = THREADS - 1 - tid;
    if ((flush || seq_len == 0) && from_end < CTA_TILES)
        advance(position + tile_index, slot, position_stride)[from_end] = seq_len;

    // The lane's v: row g + 8 (i % 2), and the token of query 2 t + i / 2.
    float values[TOKEN_TILES][4];
    const activation_t* slot_v = advance(v + (v_column + warp * 16 + g), start, v_stride);
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int w = MAX_WINDOW == 1 ? 0 : (m * 8 + 2 * t + i / 2) % (ONE_TILE ? 4 : WINDOW_ROWS);
            values[m][i] = 0.f;
            if (MAX_WINDOW == 1 && i >= 2) continue;
            if (w < length && warp * 16 + g + i % 2 * 8 < CTA_ROWS)
                values[m][i] = activation_to_float(slot_v[w * v_stride + i % 2 * 8]);
        }
    if (MAX_WINDOW > 1 && warp == MATRIX_WARP)
        write_window_matrices(shared.matrices, shared.queries, shared.gates);
    // Decay of the history and window behind each query, with the scale of q.
    const float base = flush ? 1.f : shared.gates.total;
    float factor[QUERY_TILES][2];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const bool is_q = ONE_TILE ? t < 2 : n < TOKEN_TILES;
        const float2 prefix = *(const float2*)(shared.gates.prefix + (ONE_TILE ? 2 * t % 4 : n % TOKEN_TILES * 8 + 2 * t));
        factor[n][0] = is_q ? QUERY_SCALE * prefix.x : prefix.x, factor[n][1] = is_q ? QUERY_SCALE * prefix.y : prefix.y;
    }

    const u16* planes[U_PLANES];
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++) planes[plane] = shared.u[plane];
    float sum[QUERY_TILES][4] = {};
    float own_score = 0.f;  // k . q of a single token
    if (MAX_WINDOW == 1 || !flush) {
        const activation_t* query_rows[(QUERY_TILES + 1) / 2];
        query_loads(query_rows, shared.queries);
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            const bool last = m == HISTORY_TILES - 1;
            if (m * 16 >= history && !(MAX_WINDOW == 1 && last)) continue;
            int token = m * 16 + lane % 16;
            if (token >= HISTORY_ROWS) token = HISTORY_ROWS - 1;
            const activation_t* from = shared.k + token * TOKEN_STRIDE;
            // A history that is not folded leaves the last row free: it stands for the new token.
            if (MAX_WINDOW == 1 && last && lane % 16 == 15) from = shared.queries + TOKEN_STRIDE;
            float score[QUERY_TILES][4] = {};
            token_scores(score, from + lane / 16 * 8, query_rows);
            if (MAX_WINDOW == 1 && last) own_score = shuffle_from(score[0][2], 28);
            if (flush) continue;
            const float even = shared.gates.history[m * 16 + g], odd = shared.gates.history[m * 16 + 8 + g];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) score[n][i] *= factor[n][i % 2] * (i < 2 ? even : odd);
            add_history<true>(sum, score, planes, m);
        }
    }
    const activation_t* query[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        query[n] = (SCALED_QUERIES ? shared.scaled_queries : shared.queries) + query_row(n, g) * TOKEN_STRIDE +
                   t * LANE_COLUMNS;
    StateProducts products;
    products.clear();
    tile_copy_wait(&shared.barrier);
    if (flush)
        fold_and_multiply_tile(products, shared.tile, advance(checkpoint + state_offset, slot, checkpoint_stride), c > 0,
                               shared.gates, planes, shared.k, query);
    else if (c > 0)
        multiply_tile(products, shared.tile, query);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[n][i] += factor[n][i % 2] * (base / QUERY_UPSCALE) * products.value(n, i);

    const int row_offset = warp * 16 + t % 2 * 8 + t / 2 * 4;
    u16* to_u = advance(ring_u + (u_column + row_offset), slot, ring_u_stride);
    activation_t* to_output = advance(output + row_offset, start, HEADS * ROWS);
    if constexpr (MAX_WINDOW == 1) {
        // Lanes 0 and 1 of four hold what q reads, 2 and 3 what k does. Query 0 becomes the output, 1 and 2 are u.
        float out[2], high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float mine = sum[0][2 * i], other = shuffle_xor(mine, 2);
            const float u = shared.gates.beta[0] * (values[0][i] - (t < 2 ? other : mine));
            out[i] = (t < 2 ? mine : other) + QUERY_SCALE * own_score * u;
            high[i] = bf16_low((u32)float_to_bf16(u)), low[i] = u - high[i];
        }
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            words[i] = t == 0   ? (u32)float_to_activation(out[i]) | (u32)float_to_bf16(high[i]) << 16
                       : t == 1 ? (u32)float_to_bf16(low[i])
                                : 0;
        const uint2 packed = rows_of_query(words[0], words[1]);
        u16* to = g == 0 ? (u16*)to_output : to_u + (first_new * (HEADS * U_PLANES) + g - 1) * ROWS;
        if (g <= U_PLANES && row_offset < CTA_ROWS) *(uint2*)to = packed;
    } else {
        sync_threads();  // the window's matrices
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++) {
            float out[4] = {0.f, 0.f, 0.f, 0.f}, u[4] = {0.f, 0.f, 0.f, 0.f};
            if (!ONE_TILE)
#pragma unroll
                for (int i = 0; i < 4; i++) out[i] = sum[m][i];
#pragma unroll
            for (int n = 0; n <= m; n++) {
                float known[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float predicted = sum[ONE_TILE ? 0 : TOKEN_TILES + n][i % 2 * 2 + i / 2];
                    known[i] = ONE_TILE && t < 2 ? predicted : values[n][i] - predicted;
                }
                constexpr int SIZE = WindowMatrices::SIZE;
                mix(out, known, shared.matrices.o + m * 8 * SIZE + n * 8);
                mix(u, known, shared.matrices.u + m * 8 * SIZE + n * 8);
            }
            const int w = m * 8 + g;
            const bool stored = w < length && row_offset < CTA_ROWS;
            const uint2 packed = rows_of_query(pack_activations(out[0], out[1]), pack_activations(out[2], out[3]));
            if (stored) *(uint2*)(to_output + w * (HEADS * ROWS)) = packed;
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++) {
                const u32 low = split_bf16(u[0], u[1]), high = split_bf16(u[2], u[3]);
                const uint2 half = rows_of_query(low, high);
                if (stored) *(uint2*)(to_u + (wrapped(first_new + w) * (HEADS * U_PLANES) + plane) * ROWS) = half;
            }
        }
    }
}
