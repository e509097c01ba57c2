// Attention of packed windows over a position-addressed KV cache. A block serves one KV head and a tile of 16 queries:
// neighbouring tokens of one row times the query heads that share the KV head, so that a verify window reads the cache
// once or twice, not once a token. Its warps split the positions, each with the next keys and values on their way while
// it works, and merge their running softmax at the end. The window's own keys and values are read from the inputs,
// earlier ones from the cache. See plugins/reference/attention.py.
//
// Stamped in: KV_HEADS, GROUP (query heads per KV head), HEAD_DIM, WARPS, ACTIVATION_FORMAT, SHARED_BYTES.
#include "rows.cuh"

constexpr int THREADS = WARPS * 32, HEAD_TILES = (GROUP + 15) / 16;
constexpr bool PACKED = GROUP <= 16;  // else a tile holds 16 heads of one token
constexpr int STRIDE = HEAD_DIM + 8, POSITIONS = 16, OUTPUT_TILES = HEAD_DIM / 8;
constexpr int ROW = KV_HEADS * HEAD_DIM, ROW_CHUNKS = HEAD_DIM / 8;  // of the cache; of one head, 16 bytes each
constexpr bool WHOLE_ROWS = ROW_CHUNKS <= 32 && 32 % ROW_CHUNKS == 0;  // a warp loads these many rows at once
constexpr int ROWS_AT_ONCE = WHOLE_ROWS ? 32 / ROW_CHUNKS : POSITIONS;

struct Tile {
    alignas(16) activation_t k[POSITIONS * STRIDE];
    alignas(16) activation_t v[POSITIONS * STRIDE];
};
struct Shared {
    union {
        Tile tiles[WARPS][2];
        float sums[WARPS][16][HEAD_DIM];
    };
    alignas(16) activation_t q[16 * STRIDE];
    float largest[WARPS][16], total[WARPS][16];
    int row;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Query r of a tile: `token` of the window and `head` among those that share the KV head.
struct Query {
    int token, head;
    bool valid;
};
DEVICE Query tile_query(int tile, int first_head, int r, int length) {
    const int flat = tile * 16 + r;
    if constexpr (PACKED) return {flat / GROUP, flat % GROUP, flat < length * GROUP};
    return {tile, first_head + r, first_head + r < GROUP};
}

// The active row that `token` belongs to, or -1. In steps whose rows have equal windows the first look finds it.
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
    const int head = (int)blockIdx.y / HEAD_TILES, first_head = (int)blockIdx.y % HEAD_TILES * 16;

    const int b = find_row(blockIdx.x, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                           num_slots, max_seq_len, num_rows, error_flag, &shared.row);
    if (b < 0) {
        const int heads = GROUP - first_head < 16 ? GROUP - first_head : 16;
        const long long at = ((long long)blockIdx.x * KV_HEADS + head) * GROUP + first_head;
        for (int i = tid; i < heads * HEAD_DIM / 8; i += THREADS)
            *(uint4*)(out + at * HEAD_DIM + i * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int seq_len = seq_lens[b], start = window_starts[b], length = window_lens[b];
    // Tiles of a row are never more than its tokens, so the block of its token `tile` takes tile `tile`.
    const int tile_index = (int)blockIdx.x - start;
    if (PACKED && tile_index * 16 >= length * GROUP) return;
    const Query last = tile_query(tile_index, first_head, PACKED ? 15 : 0, length);
    const int last_token = last.token < length ? last.token : length - 1, position = seq_len + last_token;
    // A slot may exceed 2^31 elements, so the stride between slots comes in two parts.
    const long long cache_stride = (long long)cache_stride_high * 65536 + cache_stride_low;
    const long long slot = state_batch_indices[b] * cache_stride + head * HEAD_DIM;
    const float scale = bits_to_float((u32)scale_bits);

    auto load = [&](Tile& tile, int base) {
        if (WHOLE_ROWS && base + POSITIONS <= seq_len) {  // all of it cached: one address, and distances known here
            const int row = lane / ROW_CHUNKS, offset = row * STRIDE + lane % ROW_CHUNKS * 8;
            const long long at = slot + (long long)(base + row) * ROW + lane % ROW_CHUNKS * 8;
#pragma unroll
            for (int j = 0; j < POSITIONS; j += ROWS_AT_ONCE) {
                copy_async_16(tile.k + j * STRIDE + offset, k_cache_in + at + j * ROW, true);
                copy_async_16(tile.v + j * STRIDE + offset, v_cache_in + at + j * ROW, true);
            }
        } else if (base <= position) {
            for (int i = lane; i < POSITIONS * ROW_CHUNKS; i += 32) {
                const int j = i / ROW_CHUNKS, offset = i % ROW_CHUNKS * 8, p = base + j;
                const bool valid = p <= position, cached = p < seq_len;
                const int own = start + (valid && !cached ? p - seq_len : 0);
                const long long at = slot + (long long)(cached ? p : 0) * ROW + offset;
                const activation_t* key = cached ? k_cache_in + at : k + (long long)own * k_stride + head * HEAD_DIM + offset;
                const activation_t* value =
                    cached ? v_cache_in + at : v + (long long)own * v_stride + head * HEAD_DIM + offset;
                copy_async_16(tile.k + j * STRIDE + offset, key, valid);
                copy_async_16(tile.v + j * STRIDE + offset, value, valid);
            }
        }
        copy_async_commit();
    };
    for (int i = tid; i < 16 * (HEAD_DIM / 8); i += THREADS) {
        const int r = i / (HEAD_DIM / 8), offset = i % (HEAD_DIM / 8) * 8;
        const Query query = tile_query(tile_index, first_head, r, length);
        const int token = start + (query.valid ? query.token : 0), at = head * GROUP + (query.valid ? query.head : 0);
        copy_async_16(shared.q + r * STRIDE + offset, q + (long long)token * q_stride + at * HEAD_DIM + offset,
                      query.valid);
    }
    copy_async_commit();
    constexpr int STEP = WARPS * POSITIONS;
    load(shared.tiles[warp][0], warp * POSITIONS);
    copy_async_wait_but_last();
    sync_threads();  // every warp reads all queries

    // The last position that the two queries of this lane's fragments may see.
    int limit[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Query query = tile_query(tile_index, first_head, g + 8 * half, length);
        limit[half] = query.valid ? seq_len + query.token : position;
    }
    float sums[OUTPUT_TILES][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
    for (int base = warp * POSITIONS, stage = 0; base <= position; base += STEP, stage ^= 1) {
        sync_warp();  // the other tile has been read
        load(shared.tiles[warp][stage ^ 1], base + STEP);
        copy_async_wait_but_last();
        sync_warp();
        const Tile& tile = shared.tiles[warp][stage];
        // Two sums of each score, over every other 16 columns: one product need not wait for the one before it.
        float parts[2][2][4] = {};
#pragma unroll 4
        for (int column = 0; column < HEAD_DIM; column += 32) {
#pragma unroll
            for (int odd = 0; odd < 2 && column + odd * 16 < HEAD_DIM; odd++) {
                u32 a[4], keys[4];
                const int at = column + odd * 16;
                load_matrix_x4(a, shared.q + lane % 16 * STRIDE + at + lane / 16 * 8);
                load_matrix_x4(keys, tile.k + (lane / 16 * 8 + lane % 8) * STRIDE + at + (lane / 8 & 1) * 8);
                mma_16bit<ACTIVATION_FORMAT>(parts[odd][0], a[0], a[1], a[2], a[3], keys[0], keys[1]);
                mma_16bit<ACTIVATION_FORMAT>(parts[odd][1], a[0], a[1], a[2], a[3], keys[2], keys[3]);
            }
        }
        float score[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) score[i / 4][i % 4] = parts[0][i / 4][i % 4] + parts[1][i / 4][i % 4];
        float correction[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
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
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& value = score[n][2 * half + e];
                    value = expf(value - top);
                    sum += value;
                }
            total[half] = total[half] * correction[half] + sum;
        }
        // The weights as the sum of two 16-bit numbers, so that they lose nothing that the output could show.
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = score[i / 2][2 * (i % 2)], y = score[i / 2][2 * (i % 2) + 1];
            const u32 x_high = float_to_activation(x), y_high = float_to_activation(y);
            high[i] = x_high | y_high << 16;
            low[i] = (u32)float_to_activation(x - activation_to_float(x_high)) |
                     (u32)float_to_activation(y - activation_to_float(y_high)) << 16;
        }
        if (correction[0] != 1.f || correction[1] != 1.f) {  // seldom, once the largest score has been met
#pragma unroll
            for (int n = 0; n < OUTPUT_TILES; n++) {
                sums[n][0] *= correction[0], sums[n][1] *= correction[0];
                sums[n][2] *= correction[1], sums[n][3] *= correction[1];
            }
        }
        constexpr int TOGETHER = OUTPUT_TILES % 4 ? 2 : 4;  // products that do not wait for each other
#pragma unroll
        for (int n = 0; n < OUTPUT_TILES; n += TOGETHER) {
            u32 values[TOGETHER / 2][4];
#pragma unroll
            for (int i = 0; i < TOGETHER; i += 2)
                load_matrix_x4_transposed(values[i / 2], tile.v + lane % 16 * STRIDE + (n + i) * 8 + lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const u32* v = values[i / 2] + i % 2 * 2;
                mma_16bit<ACTIVATION_FORMAT>(sums[n + i], high[0], high[1], high[2], high[3], v[0], v[1]);
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const u32* v = values[i / 2] + i % 2 * 2;
                mma_16bit<ACTIVATION_FORMAT>(sums[n + i], low[0], low[1], low[2], low[3], v[0], v[1]);
            }
        }
    }
    copy_async_wait();
    sync_threads();  // the tiles make room for the sums
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = total[half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (t == 0) shared.largest[warp][g + 8 * half] = largest[half], shared.total[warp][g + 8 * half] = sum;
#pragma unroll
        for (int n = 0; n < OUTPUT_TILES; n++)
            *(float2*)&shared.sums[warp][g + 8 * half][n * 8 + 2 * t] =
                make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
    sync_threads();
    for (int i = tid; i < 16 * HEAD_DIM / 4; i += THREADS) {
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
    const int from = PACKED ? (tile_index * 16 + GROUP - 1) / GROUP : tile_index;
    const int to = PACKED ? (tile_index * 16 + 15) / GROUP + 1 : tile_index + 1, end = to < length ? to : length;
    for (int i = tid; i < (end - from) * (HEAD_DIM / 8); i += THREADS) {
        const int w = from + i / (HEAD_DIM / 8), offset = i % (HEAD_DIM / 8) * 8;
        const long long at = slot + (long long)(seq_len + w) * (KV_HEADS * HEAD_DIM) + offset, token = start + w;
        *(uint4*)(k_cache + at) = *(const uint4*)(k + token * k_stride + head * HEAD_DIM + offset);
        *(uint4*)(v_cache + at) = *(const uint4*)(v + token * v_stride + head * HEAD_DIM + offset);
    }
}
