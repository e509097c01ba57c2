// Attention of packed windows over a position-addressed KV cache. A block serves one KV head and a tile of QUERIES
// queries: neighbouring tokens of one row times the query heads that share the KV head, so that a verify window reads
// the cache once or twice, not once a token. Tiles of 8 leave half of a score's fragments empty, but need half the
// sums. Its warps split the positions, each with the next values on their way while it works on keys and the next keys
// while it works on values, and merge their running softmax at the end. The window's own keys and values are read from
// the inputs, earlier ones from the cache. See plugins/reference/attention.py.
//
// Stamped in: KV_HEADS, GROUP (query heads per KV head), HEAD_DIM, QUERIES (8 or 16), WARPS, ACTIVATION_FORMAT,
// SHARED_BYTES.
#include "rows.cuh"

constexpr int THREADS = WARPS * 32, HEAD_TILES = (GROUP + QUERIES - 1) / QUERIES;
constexpr bool PACKED = GROUP <= QUERIES;  // else a tile holds QUERIES heads of one token
constexpr int STRIDE = HEAD_DIM + 8, SUM_STRIDE = HEAD_DIM + 4, POSITIONS = 16, OUTPUT_TILES = HEAD_DIM / 16;
constexpr int HALVES = QUERIES / 8;
constexpr int ROW = KV_HEADS * HEAD_DIM, ROW_CHUNKS = HEAD_DIM / 8;  // of the cache; of one head, 16 bytes each
constexpr bool WHOLE_ROWS = ROW_CHUNKS <= 32 && 32 % ROW_CHUNKS == 0;  // a warp loads these many rows at once
constexpr int ROWS_AT_ONCE = WHOLE_ROWS ? 32 / ROW_CHUNKS : POSITIONS;

struct Tile {
    alignas(16) activation_t k[POSITIONS * STRIDE];
    alignas(16) activation_t v[POSITIONS * STRIDE];
};
struct Shared {
    union {
        Tile tiles[WARPS];
        float sums[WARPS][QUERIES][SUM_STRIDE];
    };
    alignas(16) activation_t q[QUERIES * STRIDE];
    float largest[WARPS][QUERIES], total[WARPS][QUERIES];
    int row;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Query r of a tile: `token` of the window and `head` among those that share the KV head.
struct Query {
    int token, head;
    bool valid;
};
DEVICE Query tile_query(int tile, int first_head, int r, int length) {
    const int flat = tile * QUERIES + r;
    if constexpr (PACKED) return {flat / GROUP, flat % GROUP, flat < length * GROUP};
    return {tile, first_head + r, first_head + r < GROUP};
}

// The active row that `token` belongs to, or -1. In steps whose rows have equal windows, one after the other, the first look
// finds it.
DEVICE int find_row(int token, const int* seq_lens, const int* window_starts, const int* window_lens,
                    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len, int num_rows,
                    int* error_flag, int* found) {
    const int tid = threadIdx.x;
    const bool reports = blockIdx.x == 0 && blockIdx.y == 0;
    if (num_rows > 0 && !reports) {
        const int guess = (int)((long long)token * num_rows / num_tokens);
        const Row row = read_row(guess, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                                 num_slots, max_seq_len, nullptr, 0, 0);
        if (row.active && token >= row.start && token < row.start + row.length) return guess;
    }
    if (tid == 0) *found = -1;
    sync_threads();
    for (int b = tid; b < num_rows; b += THREADS) {
        // Only who reports needs to know more of rows that the token is not in.
        if (!reports && (u32)token - (u32)window_starts[b] >= (u32)window_lens[b]) continue;
        const Row row = read_row(b, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens, num_slots,
                                 max_seq_len, nullptr, 0, 0);
        if (row.error && reports) atomic_or(error_flag, row.error);
        if (row.active && token >= row.start && token < row.start + row.length) *found = b;
    }
    sync_threads();
    return *found;
}

KERNEL(THREADS, 1)
attention_window(
    // q [T, KV_HEADS * GROUP, HEAD_DIM], k, v [T, KV_HEADS, HEAD_DIM]; caches [slots, max_seq_len, KV_HEADS, HEAD_DIM]
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* k_cache_in,
    const activation_t* v_cache_in, const int* error_flag_in, const int* seq_lens, const int* window_starts,
    const int* window_lens, const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len,
    int num_rows, int scale_bits, int q_stride, int k_stride, int v_stride, int cache_stride_high, int cache_stride_low,
    activation_t* out, activation_t* k_cache, activation_t* v_cache, int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int head = (int)blockIdx.y / HEAD_TILES, first_head = (int)blockIdx.y % HEAD_TILES * QUERIES;

    const int b = find_row(blockIdx.x, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                           num_slots, max_seq_len, num_rows, error_flag, &shared.row);
    if (b < 0) {
        const int heads = GROUP - first_head < QUERIES ? GROUP - first_head : QUERIES;
        const long long at = ((long long)blockIdx.x * KV_HEADS + head) * GROUP + first_head;
        for (int i = tid; i < heads * HEAD_DIM / 8; i += THREADS)
            *(uint4*)(out + at * HEAD_DIM + i * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int seq_len = seq_lens[b], start = window_starts[b], length = window_lens[b];
    // Tiles of a row are never more than its tokens, so the block of its token `tile` takes tile `tile`.
    const int tile_index = (int)blockIdx.x - start;
    if (PACKED && tile_index * QUERIES >= length * GROUP) return;
    const Query last = tile_query(tile_index, first_head, PACKED ? QUERIES - 1 : 0, length);
    const int last_token = last.token < length ? last.token : length - 1, position = seq_len + last_token;
    // A slot may exceed 2^31 elements, so the stride between slots comes in two parts.
    const long long cache_stride = (long long)cache_stride_high * 65536 + cache_stride_low;
    const long long slot = state_batch_indices[b] * cache_stride + head * HEAD_DIM;
    const float scale = bits_to_float((u32)scale_bits);

    // Keys or values of POSITIONS positions from `base` on.
    auto load = [&](activation_t* tile, int base, const activation_t* cache, const activation_t* own, int own_stride) {
        if (WHOLE_ROWS && base + POSITIONS <= seq_len) {  // all of it cached: one address, and distances known here
            const int row = lane / ROW_CHUNKS, offset = row * STRIDE + lane % ROW_CHUNKS * 8;
            const long long at = slot + (long long)(base + row) * ROW + lane % ROW_CHUNKS * 8;
#pragma unroll
            for (int j = 0; j < POSITIONS; j += ROWS_AT_ONCE)
                copy_async_16(tile + j * STRIDE + offset, cache + at + j * ROW, true);
        } else if (base <= position) {
            for (int i = lane; i < POSITIONS * ROW_CHUNKS; i += 32) {
                const int j = i / ROW_CHUNKS, offset = i % ROW_CHUNKS * 8, p = base + j;
                const bool valid = p <= position, cached = p < seq_len;
                const long long token = start + (valid && !cached ? p - seq_len : 0);
                const activation_t* from = cached ? cache + slot + (long long)p * ROW + offset
                                                  : own + token * own_stride + head * HEAD_DIM + offset;
                copy_async_16(tile + j * STRIDE + offset, from, valid);
            }
        }
        copy_async_commit();
    };
    Tile& tile = shared.tiles[warp];
    auto load_keys = [&](int base) { load(tile.k, base, k_cache_in, k, k_stride); };
    auto load_values = [&](int base) { load(tile.v, base, v_cache_in, v, v_stride); };
    for (int i = tid; i < QUERIES * (HEAD_DIM / 8); i += THREADS) {
        const int r = i / (HEAD_DIM / 8), offset = i % (HEAD_DIM / 8) * 8;
        const Query query = tile_query(tile_index, first_head, r, length);
        const int token = start + (query.valid ? query.token : 0), at = head * GROUP + (query.valid ? query.head : 0);
        copy_async_16(shared.q + r * STRIDE + offset, q + (long long)token * q_stride + at * HEAD_DIM + offset,
                      query.valid);
    }
    copy_async_commit();
    constexpr int STEP = WARPS * POSITIONS;
    load_keys(warp * POSITIONS);
    load_values(warp * POSITIONS);
    copy_async_wait_but_last();
    sync_threads();  // every warp reads all queries

    // The last position that the queries of this lane's scores may see.
    int limit[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const Query query = tile_query(tile_index, first_head, g + 8 * half, length);
        limit[half] = query.valid ? seq_len + query.token : position;
    }
    // Scores have a row for each query, sums a column: the weights of one product are an operand of the other as they
    // are.
    float sums[OUTPUT_TILES][HALVES][4] = {}, largest[HALVES], total[HALVES] = {};
#pragma unroll
    for (int half = 0; half < HALVES; half++) largest[half] = -INFINITY;
    for (int base = warp * POSITIONS; base <= position; base += STEP) {
        copy_async_wait_but_last();  // all but the values
        sync_warp();
        // Two sums of each score, over every other 16 columns: one product need not wait for the one before it.
        float parts[2][2][4] = {};
#pragma unroll 4
        for (int column = 0; column < HEAD_DIM; column += 32) {
            u32 queries[2][4] = {};
            if constexpr (QUERIES == 8) {
                u32 loaded[4];  // of two products, whose lower halves stay empty
                load_matrix_x4(loaded, shared.q + lane % 8 * STRIDE + column + lane / 8 * 8);
                queries[0][0] = loaded[0], queries[0][2] = loaded[1], queries[1][0] = loaded[2], queries[1][2] = loaded[3];
            }
#pragma unroll
            for (int odd = 0; odd < 2 && column + odd * 16 < HEAD_DIM; odd++) {
                u32(&a)[4] = queries[odd];
                u32 keys[4];
                const int at = column + odd * 16;
                if constexpr (QUERIES == 16) load_matrix_x4(a, shared.q + lane % 16 * STRIDE + at + lane / 16 * 8);
                load_matrix_x4(keys, tile.k + (lane / 16 * 8 + lane % 8) * STRIDE + at + (lane / 8 & 1) * 8);
                mma_16bit<ACTIVATION_FORMAT>(parts[odd][0], a[0], a[1], a[2], a[3], keys[0], keys[1]);
                mma_16bit<ACTIVATION_FORMAT>(parts[odd][1], a[0], a[1], a[2], a[3], keys[2], keys[3]);
            }
        }
        sync_warp();  // the keys have been read
        load_keys(base + STEP);
        float score[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) score[i / 4][i % 4] = parts[0][i / 4][i % 4] + parts[1][i / 4][i % 4];
        float correction[HALVES];
        // The weights as the sum of two 16-bit numbers, so that they lose nothing that the output could show.
        u32 high[HALVES][2], low[HALVES][2];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const float previous = largest[half];
            float top = previous;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& value = score[n][2 * half + e];
                    value = base + n * 8 + 2 * t + e <= limit[half] ? value * scale : -INFINITY;
                    top = fmaxf(top, value);
                }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            largest[half] = top, top = top == -INFINITY ? 0.f : top;  // a query may see nothing of its first tiles
            correction[half] = expf(previous - top);
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float x = expf(score[n][2 * half] - top), y = expf(score[n][2 * half + 1] - top);
                sum += x, sum += y;
                const u32 x_high = float_to_activation(x), y_high = float_to_activation(y);
                high[half][n] = x_high | y_high << 16;
                low[half][n] = (u32)float_to_activation(x - activation_to_float(x_high)) |
                               (u32)float_to_activation(y - activation_to_float(y_high)) << 16;
            }
            total[half] = total[half] * correction[half] + sum;
        }
        bool changed = false;  // seldom, once the largest score has been met
#pragma unroll
        for (int half = 0; half < HALVES; half++) changed |= correction[half] != 1.f;
        if (ballot(changed)) {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                // This lane's sums belong to queries 2 t and 2 t + 1, whose scores lie in the lanes of those rows.
                const float first = shuffle_from(correction[half], 8 * t);
                const float second = shuffle_from(correction[half], 8 * t + 4);
#pragma unroll
                for (int n = 0; n < OUTPUT_TILES; n++) {
                    sums[n][half][0] *= first, sums[n][half][2] *= first;
                    sums[n][half][1] *= second, sums[n][half][3] *= second;
                }
            }
        }
        copy_async_wait_but_last();  // all but the next keys
        sync_warp();
        constexpr int TOGETHER = OUTPUT_TILES % 4 == 0 ? 4 : OUTPUT_TILES % 2 == 0 ? 2 : 1;  // do not wait for each other
#pragma unroll
        for (int n = 0; n < OUTPUT_TILES; n += TOGETHER) {
            u32 values[TOGETHER][4];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                load_matrix_x4_transposed(values[i], tile.v + (lane / 16 * 8 + lane % 8) * STRIDE + (n + i) * 16 +
                                                         (lane / 8 & 1) * 8);
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int i = 0; i < TOGETHER; i++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++) {
                        const u32* v = values[i];
                        const u32* w = part ? low[half] : high[half];
                        mma_16bit<ACTIVATION_FORMAT>(sums[n + i][half], v[0], v[1], v[2], v[3], w[0], w[1]);
                    }
        }
        sync_warp();  // the values have been read
        load_values(base + STEP);
    }
    copy_async_wait();
    sync_threads();  // the tiles make room for the sums
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        float sum = total[half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (t == 0) shared.largest[warp][g + 8 * half] = largest[half], shared.total[warp][g + 8 * half] = sum;
#pragma unroll
        for (int n = 0; n < OUTPUT_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                shared.sums[warp][8 * half + 2 * t + e % 2][n * 16 + g + e / 2 * 8] = sums[n][half][e];
    }
    sync_threads();
    for (int i = tid; i < QUERIES * HEAD_DIM / 4; i += THREADS) {
        const int r = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        const Query query = tile_query(tile_index, first_head, r, length);
        if (!query.valid) break;
        float top = shared.largest[0][r];
#pragma unroll
        for (int w = 1; w < WARPS; w++) top = fmaxf(top, shared.largest[w][r]);
        float sum[4] = {}, weight = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float share = expf(shared.largest[w][r] - top);
            const float4 part = *(const float4*)&shared.sums[w][r][d];
            sum[0] += share * part.x, sum[1] += share * part.y, sum[2] += share * part.z, sum[3] += share * part.w;
            weight += share * shared.total[w][r];
        }
        const long long at = ((long long)(start + query.token) * KV_HEADS + head) * GROUP + query.head;
        u32 packed[2];
#pragma unroll
        for (int e = 0; e < 4; e += 2)
            packed[e / 2] = (u32)float_to_activation(sum[e] / weight) | (u32)float_to_activation(sum[e + 1] / weight)
                                                                            << 16;
        *(uint2*)(out + at * HEAD_DIM + d) = make_uint2(packed[0], packed[1]);
    }
    // Each token is stored by the tile of its first query.
    if (first_head) return;
    const int from = PACKED ? (tile_index * QUERIES + GROUP - 1) / GROUP : tile_index;
    const int to = PACKED ? (tile_index * QUERIES + QUERIES - 1) / GROUP + 1 : tile_index + 1, end = to < length ? to : length;
    for (int i = tid; i < (end - from) * (HEAD_DIM / 8); i += THREADS) {
        const int w = from + i / (HEAD_DIM / 8), offset = i % (HEAD_DIM / 8) * 8;
        const long long at = slot + (long long)(seq_len + w) * (KV_HEADS * HEAD_DIM) + offset, token = start + w;
        *(uint4*)(k_cache + at) = *(const uint4*)(k + token * k_stride + head * HEAD_DIM + offset);
        *(uint4*)(v_cache + at) = *(const uint4*)(v + token * v_stride + head * HEAD_DIM + offset);
    }
}
