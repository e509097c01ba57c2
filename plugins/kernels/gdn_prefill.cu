// Gated DeltaNet over long (prefill) rows, in chunks on tensor cores: folds the history and the window into the
// checkpoint and appends nothing to the ring. Rows of at most MAX_WINDOW tokens, padding and invalid rows belong to
// gdn_window.cu or gdn_readout.cu; blocks of such rows end at once. See chunk.cuh and plugins/reference/gdn.py.
//
// Per chunk, with S the state before it, G the sums of g within it and L the strict lower triangle
// L_ij = beta_i e^{G_i - G_j} (k_i . k_j), the u of all tokens solve (I + L) u = r, r_i = beta_i (v_i - e^{G_i} S k_i).
// The system is solved by forward substitution over blocks of 16 tokens; the preparing warps invert their triangles.
//
// Stamped in: as for gdn_window.cu, and CHUNK, STAGES and SWIZZLE; for the formats of gdn_readout.cu also READOUT_FORMAT
// and STOCHASTIC (chunk_store.cuh).
#define CHUNK_BETA 1
#include "gdn_window.cuh"
#include "chunk_prepare.cuh"
#include "chunk_store.cuh"
#include "gdn_parameters.cuh"

struct Shared {
    alignas(128) activation_t k[STAGES][CHUNK * CHUNK_STRIDE];
    alignas(128) activation_t q[STAGES][CHUNK * CHUNK_STRIDE];
    alignas(16) uint4 scores[2][FRAGMENTS * 32];  // decay and q . k of pairs of tokens
    alignas(16) uint4 solve[2][FRAGMENTS * 32];   // -L between blocks, inverses of I + L within them
    alignas(16) activation_t v[WARPS][CHUNK * 16];
    Gates gates[GATE_STAGES];
    alignas(16) Sum prefix[2][CHUNK];  // of the preparing warps
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/prefill_geometry.py computes the dynamic shared memory");

// What the threads of a block know of its row.
struct Inputs {
    const activation_t *q, *k, *v, *a, *b;  // of the row's first token
    long long q_stride, k_stride, v_stride, a_stride, b_stride;
    const activation_t* ring_k;  // of the slot's entry 0
    const u16* ring_u;
    const float* ring_g;
    int history, first_entry, length, chunks;
    float A, dt_bias;
    DEVICE_MEMBER Chunk chunk(int index) const {
        const int rest = length - index * CHUNK;
        return {index, index < 0 ? history : rest < CHUNK ? rest : CHUNK};
    }
};

DEVICE void load_tokens(Shared& shared, const Inputs& in, const Chunk& chunk, int stage) {
    if (chunk.is_history()) {
        history_copy_start(shared.k[stage], in.ring_k, in.first_entry, in.history);
    } else {
        const long long first = (long long)chunk.index * CHUNK;
        tokens_copy_start(shared.k[stage], in.k + first * in.k_stride, in.k_stride, chunk.valid);
        tokens_copy_start(shared.q[stage], in.q + first * in.q_stride, in.q_stride, chunk.valid);
    }
}

// L2-normalises the rows of tokens that the warp has copied, in place, and rounds them to the activation format. Four
// lanes share a row.
DEVICE void normalize_tokens(activation_t* tokens) {
    constexpr int COPIES = COLUMNS / 8, WARP_TOKENS = CHUNK / PREPARING_WARPS, LANE_COPIES = (COPIES + 3) / 4;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int first = 0; first < WARP_TOKENS; first += 8) {
        const int row = ((int)threadIdx.x / 32 - WARPS) * WARP_TOKENS + first + g;
        // Padded rows of odd lanes start 4 banks on: three copies later they meet the 16 that even ones leave.
        const auto copy_of = [&](int i) { return COPIES % 4 ? 4 * i + t : (4 * i + t + g % 2 * 3) % COPIES; };
        uint4 packed[LANE_COPIES];
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < LANE_COPIES; i++) {
            const int copy = copy_of(i);
            packed[i] = make_uint4(0, 0, 0, 0);
            if (COPIES % 4 == 0 || copy < COPIES) packed[i] = *(const uint4*)token_at(tokens, row, copy * 8);
        }
#pragma unroll
        for (int i = 0; i < LANE_COPIES; i++) {
            const u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum = multiply_add(activation_low(words[e]), activation_low(words[e]),
                                   multiply_add(activation_high(words[e]), activation_high(words[e]), sum));
        }
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        const float scale = rsqrtf(sum + L2_NORM_EPS);
#pragma unroll
        for (int i = 0; i < LANE_COPIES; i++) {
            const int copy = copy_of(i);
            u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                words[e] = pack_activations(activation_low(words[e]) * scale, activation_high(words[e]) * scale);
            if (COPIES % 4 == 0 || copy < COPIES)
                *(uint4*)token_at(tokens, row, copy * 8) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Bits of the raw gates of a chunk: of the history, g in fp32 and nothing; else activations.
struct RawGates {
    u32 a[LANE_TOKENS], b[LANE_TOKENS];
};

// Tokens that do not exist get the last one's.
DEVICE void load_gates(RawGates& raw, const Inputs& in, const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        const int lane_token = threadIdx.x % 32 * LANE_TOKENS + i;
        const int token = lane_token < chunk.valid ? lane_token : chunk.valid - 1;
        if (chunk.is_history()) {
            raw.a[i] = float_to_bits(in.ring_g[wrapped(in.first_entry + token) * HEADS]);
            raw.b[i] = 0;
        } else {
            const long long at = (long long)chunk.index * CHUNK + token;
            raw.a[i] = in.a[at * in.a_stride];
            raw.b[i] = in.b[at * in.b_stride];
        }
    }
}

DEVICE void compute_gates(Shared& shared, const Inputs& in, const Chunk& chunk, const RawGates& raw) {
    Gates& gates = shared.gates[(chunk.index + 1) % GATE_STAGES];
    float g[LANE_TOKENS], exists[LANE_TOKENS];
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        const int token = threadIdx.x % 32 * LANE_TOKENS + i;
        const bool valid = token < chunk.valid;
        exists[i] = valid ? 1.f : 0.f;
        g[i] = chunk.is_history() ? bits_to_float(raw.a[i])
                                  : in.A * softplus(activation_to_float(raw.a[i]) + in.dt_bias);
        if (!valid) g[i] = 0.f;
        gates.beta[token] = valid ? sigmoid(activation_to_float(raw.b[i])) : 0.f;
    }
    scan_chunk(gates, shared.prefix[chunk.index & 1], g, exists);
}

// Inverts the unit lower triangle whose strict part a warp left transposed as fp32 [16 tokens][16 queries] where the
// fragments will be. Lane l and lane l + 16 compute column l, element by element: each updates all behind it.
DEVICE void invert_triangle(uint4* fragments) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, column = lane % 16;
    float* triangle = (float*)fragments;
    float inverse[16];
#pragma unroll
    for (int i = 0; i < 16; i++) inverse[i] = i == column ? 1.f : 0.f;
    sync_warp();
#pragma unroll
    for (int j = 0; j < 15; j++)
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
            const float4 factor = *(const float4*)(triangle + j * 16 + i);
            if (i > j) inverse[i] -= factor.x * inverse[j];
            if (i + 1 > j) inverse[i + 1] -= factor.y * inverse[j];
            if (i + 2 > j) inverse[i + 2] -= factor.z * inverse[j];
            if (i + 3 > j) inverse[i + 3] -= factor.w * inverse[j];
        }
    sync_warp();
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) triangle[i * 16 + column] = inverse[i];
    }
    sync_warp();
    float values[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float2 pair = *(const float2*)(triangle + (g + 8 * half) * 16 + 8 * m + 2 * t);
            values[m][2 * half] = pair.x, values[m][2 * half + 1] = pair.y;
        }
    sync_warp();
    fragments[lane] = make_fragment(values[0][0], values[0][1], values[1][0], values[1][1]);
    fragments[32 + lane] = make_fragment(values[0][2], values[0][3], values[1][2], values[1][3]);
}

// All pairs of 16 queries, the warp's own, from the diagonal on.
DEVICE void compute_scores(Shared& shared, const Chunk& chunk, int stage) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, queries = (int)threadIdx.x / 32 - WARPS;
    const Gates& gates = shared.gates[(chunk.index + 1) % GATE_STAGES];
    uint4* solve = shared.solve[chunk.index & 1];
    const float beta[2] = {gates.beta[queries * 16 + g], gates.beta[queries * 16 + g + 8]};
    u32 q[COLUMNS / 16][4], k[COLUMNS / 16][4];
#pragma unroll
    for (int c = 0; c < COLUMNS / 16; c++) {
        load_matrix_x4(q[c], first_operand(shared.q[stage], queries, c * 16));
        load_matrix_x4(k[c], first_operand(shared.k[stage], queries, c * 16));
    }
#pragma unroll 1
    for (int tokens = queries; tokens >= 0; tokens--) {
        const PairBlock block = {queries, tokens};
        float decay[2][4], with_q[2][4] = {}, with_k[2][4] = {};
        pair_decays(decay, shared.prefix[chunk.index & 1], block);
#pragma unroll
        for (int c = 0; c < COLUMNS / 16; c++) {
            u32 b[4];
            load_matrix_x4(b, second_operand(shared.k[stage], tokens, c * 16));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_16bit<ACTIVATION_FORMAT>(with_q[m], q[c][0], q[c][1], q[c][2], q[c][3], b[2 * m], b[2 * m + 1]);
                mma_16bit<ACTIVATION_FORMAT>(with_k[m], k[c][0], k[c][1], k[c][2], k[c][3], b[2 * m], b[2 * m + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = 2 * half + i % 2;
                with_q[i / 2][e] *= QUERY_SCALE * decay[half][i];
                with_k[i / 2][e] *= -beta[half] * decay[half][i];
            }
        uint4* solve_block = solve + (queries * (queries + 1) / 2 + tokens) * 64;
        if (queries == tokens) {
            float* triangle = (float*)solve_block;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int query = g + 8 * half, token = i / 2 * 8 + 2 * t + i % 2, e = 2 * half + i % 2;
                    if (token > query) with_q[i / 2][e] = 0.f;
                    triangle[token * 16 + query] = token < query ? -with_k[i / 2][e] : 0.f;
                }
            invert_triangle(solve_block);
        } else {
            store_fragments(solve, block, with_k);
        }
        store_fragments(shared.scores[chunk.index & 1], block, with_q);
    }
}

// The preparing warps' part: pairs of tokens of chunk i + 1 and decays of chunk i + 2 while the state warps are at i.
DEVICE void prepare(Shared& shared, const Inputs& in, int first) {
    const int warp = threadIdx.x / 32 - WARPS, last = in.chunks - 1;
    const bool scans = warp == 0;  // the warp with the fewest pairs
    RawGates raw;
    if (scans) {
        load_gates(raw, in, in.chunk(first));
        compute_gates(shared, in, in.chunk(first), raw);
    }
    if (STAGES > 2) {
        load_tokens(shared, in, in.chunk(first), 0);
        copy_async_commit();
    }
    for (int i = first - 1; i <= last; i++) {
        const int ahead = i + STAGES - 1;
        if (ahead <= last) load_tokens(shared, in, in.chunk(ahead), (ahead - first) % STAGES);
        copy_async_commit();
        if (i < last) {
            const Chunk chunk = in.chunk(i + 1);
            const int stage = (chunk.index - first) % STAGES;
            const bool more = scans && i + 1 < last;
            if (more) load_gates(raw, in, in.chunk(i + 2));
            if (STAGES > 2)
                copy_async_wait_but_last();
            else
                copy_async_wait();
            if (!chunk.is_history()) {
                sync_warp();
                normalize_tokens(shared.k[stage]);
                normalize_tokens(shared.q[stage]);
            }
            sync_group(BARRIER_PREPARING, PREPARING_THREADS);
            if (!chunk.is_history()) compute_scores(shared, chunk, stage);
            if (more) compute_gates(shared, in, in.chunk(i + 2), raw);
        }
        sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    }
}

// r [rows x tokens] becomes u by forward substitution, and o gains what the chunk's own tokens add to their outputs:
// each block's part of it fills the waits of the next block's substitution.
DEVICE void substitute(float (&r)[TOKEN_TILES][4], float (&o)[TOKEN_TILES][4], const uint4* solve,
                       const uint4* scores) {
    Wide u;
    for_each_index<TOKEN_BLOCKS>([&](auto index) {
        constexpr int block = decltype(index)::value, before = block ? block - 1 : 0;
        const Wide rest = make_wide(r[2 * block], r[2 * block + 1]);
        const uint4 left = solve[fragment_index(2 * block, block) * 32];
        const uint4 right = solve[fragment_index(2 * block + 1, block) * 32];
        float solved[2][4] = {};
        accumulate_wide<0>(solved[0], rest, left), accumulate_wide<0>(solved[1], rest, right);
        accumulate_wide<1>(solved[0], rest, left), accumulate_wide<1>(solved[1], rest, right);
        accumulate_wide<2>(solved[0], rest, left), accumulate_wide<2>(solved[1], rest, right);
        if constexpr (block > 0) accumulate_tiles<2 * before, before>(o, u, scores);
#pragma unroll
        for (int i = 0; i < 8; i++) r[2 * block + i / 4][i % 4] = solved[i / 4][i % 4];
        u = make_wide(solved[0], solved[1]);
        if constexpr (block + 1 < TOKEN_BLOCKS) accumulate_tiles<2 * block + 2, block>(r, u, solve);
    });
    accumulate_tiles<TOKEN_TILES - 2, TOKEN_BLOCKS - 1>(o, u, scores);
}

// u of the history, [rows x tokens].
DEVICE void load_history_u(float (&u)[TOKEN_TILES][4], const Inputs& in, int rows) {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) u[n][i] = 0.f;
#pragma unroll
        for (int plane = 0; plane < U_PLANES; plane++) {
            u32 words[2];
            transposed_history(words, in.ring_u + plane * ROWS, in.first_entry, HEADS * U_PLANES * ROWS, n, in.history,
                               rows);
#pragma unroll
            for (int half = 0; half < 2; half++)
                u[n][2 * half] += bf16_low(words[half]), u[n][2 * half + 1] += bf16_high(words[half]);
        }
    }
}

// A state warp's part: 16 rows of the state over all chunks. `output` points at the warp's first row.
DEVICE void walk(Shared& shared, const Inputs& in, int first, float (&s)[COLUMN_TILES][4], activation_t* output,
                 int rows) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    activation_t* own_v = shared.v[warp];
    values_copy_start(own_v, in.v, in.v_stride, in.chunk(0).valid, rows);
    sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    for (int i = first; i < in.chunks; i++) {
        const Chunk chunk = in.chunk(i);
        const Gates& gates = shared.gates[(i + 1) % GATE_STAGES];
        const int stage = (i - first) % STAGES;
        float products[2][TOKEN_TILES][4] = {};  // of S with k, later u, and of S with q, later o
        float(&u)[TOKEN_TILES][4] = products[0];
        float(&o)[TOKEN_TILES][4] = products[1];
        if (chunk.is_history()) {
            load_history_u(u, in, rows);
        } else {
            const activation_t* const tokens[2] = {shared.k[stage], shared.q[stage]};
            multiply_state<2>(products, s, tokens);
            copy_async_wait();
            sync_warp();
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                const float2 decay = *(const float2*)(gates.entering + n * 8 + 2 * t);
                const float2 beta = *(const float2*)(gates.beta + n * 8 + 2 * t);
                u32 v[2];
                transposed_values(v, own_v, n);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u[n][2 * half] = beta.x * (activation_low(v[half]) - decay.x * u[n][2 * half]);
                    u[n][2 * half + 1] = beta.y * (activation_high(v[half]) - decay.y * u[n][2 * half + 1]);
                    o[n][2 * half] *= QUERY_SCALE * decay.x, o[n][2 * half + 1] *= QUERY_SCALE * decay.y;
                }
            }
            sync_warp();
            if (i + 1 < in.chunks)
                values_copy_start(own_v, in.v + (long long)(i + 1) * CHUNK * in.v_stride, in.v_stride,
                                  in.chunk(i + 1).valid, rows);
            const int lane = threadIdx.x % 32;
            substitute(u, o, shared.solve[i & 1] + lane, shared.scores[i & 1] + lane);
            store_outputs(o, output + (long long)i * CHUNK * (HEADS * ROWS), chunk.valid, rows);
        }
        decay_state(s, gates.total);
#pragma unroll
        for (int block = 0; block < TOKEN_BLOCKS; block++) {
            const float2 low = *(const float2*)(gates.leaving + block * 16 + 2 * t);
            const float2 high = *(const float2*)(gates.leaving + block * 16 + 8 + 2 * t);
            const float(&left)[4] = u[2 * block];
            const float(&right)[4] = u[2 * block + 1];
            add_outer(s,
                      make_wide(low.x * left[0], low.y * left[1], low.x * left[2], low.y * left[3], high.x * right[0],
                                high.y * right[1], high.x * right[2], high.y * right[3]),
                      shared.k[stage], block);
        }
        sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    }
}

KERNEL(BLOCK_THREADS, MIN_CTAS)
gdn_prefill(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32;
    const Block block = this_block();
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, position_in + block.tile, position_stride, MAX_HISTORY);
    if (!row.active || row.length <= MAX_WINDOW) return;
    const long long slot = row.slot, start = row.start;
    const int own_row = block.first_row + (warp < WARPS ? warp * 16 : 0);
    const int k_column = block.group * COLUMNS, v_column = block.head * ROWS + own_row;
    const Inputs in = {q + start * q_stride + k_column, k + start * k_stride + k_column,
                       v + start * v_stride + v_column, a + start * a_stride + block.head,
                       b + start * b_stride + block.head, q_stride, k_stride, v_stride, a_stride, b_stride,
                       ring_k_in + slot * ring_k_stride + k_column,
                       ring_u_in + slot * ring_u_stride + block.head * U_PLANES * ROWS + own_row,
                       ring_g_in + slot * ring_g_stride + block.head, row.seq_len - row.checkpoint_position,
                       row.checkpoint_position % RING_LEN, row.length, (row.length + CHUNK - 1) / CHUNK,
                       -expf(A_log[block.head]), dt_bias[block.head]};
    const int first = in.history > 0 ? -1 : 0;
    if (warp >= WARPS) {
        prepare(shared, in, first);
        return;
    }
    const int rows = CTA_ROWS - warp * 16;
    float s[COLUMN_TILES][4];
    activation_t* const output = o + start * (HEADS * ROWS) + v_column;
#ifdef READOUT_FORMAT
    load_rows(s, STATE_ROWS(row.slot).from(v_column), rows, row.checkpoint_position > 0);
    walk(shared, in, first, s, output, rows);
    // All warps have used what the tokens' buffers hold.
    static_assert(WARPS * STORE_SIZE <= sizeof(Shared), "warps stage their rows there");
    u32 slot_now = (u32)row.slot;
    hold_until_here(slot_now);  // addresses that are computed from it before the walk would cost registers
    store_rows(s, (float*)(memory + warp * STORE_SIZE), STATE_ROWS((int)slot_now).from(v_column), rows, own_row,
               ROUNDING_KEY(block.head, row.seq_len + row.length));
#else
    const long long state_offset = slot * checkpoint_stride + (long long)v_column * COLUMNS;
    load_state(s, checkpoint_in + state_offset, rows, row.checkpoint_position > 0);
    walk(shared, in, first, s, output, rows);
    store_state(s, checkpoint + state_offset, rows);
#endif
    if (threadIdx.x < CTA_TILES) position[slot * position_stride + block.tile + threadIdx.x] = row.seq_len + row.length;
}
