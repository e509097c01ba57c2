// Mamba2 over long (prefill) rows, in chunks on tensor cores: folds the history and the window into the checkpoint and
// appends nothing to the ring. Rows of at most MAX_WINDOW tokens, padding and invalid rows belong to mamba2_window.cu
// or mamba2_readout.cu; blocks of such rows end at once. See chunk.cuh and plugins/reference/mamba2.py.
//
// Stamped in: as for mamba2_window.cu, and CHUNK, STAGES and SWIZZLE; for the formats of mamba2_readout.cu also READOUT_FORMAT
// and STOCHASTIC (chunk_store.cuh).
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#define CHUNK_BETA 0
#include "chunk_prepare.cuh"
#include "chunk_store.cuh"
#include "mamba2_parameters.cuh"

struct Shared {
    alignas(128) activation_t B[STAGES][CHUNK * CHUNK_STRIDE];
    alignas(128) activation_t C[STAGES][CHUNK * CHUNK_STRIDE];
    alignas(16) uint4 scores[2][FRAGMENTS * 32];       // decay, dt and B . C of pairs of tokens, D on the diagonal
    alignas(16) activation_t x[WARPS][CHUNK * 16];
    Gates gates[GATE_STAGES];
    // of the preparing warps
    alignas(16) Sum prefix[2][CHUNK];
    alignas(16) float dt[2][CHUNK];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/prefill_geometry.py computes the dynamic shared memory");

// What the threads of a block know of its row.
struct Inputs {
    const activation_t *x, *dt, *B, *C;  // of the row's first token
    long long x_stride, dt_stride, B_stride, C_stride;
    const activation_t *ring_x, *ring_B;  // of the slot's entry 0
    const float* ring_dt;
    int history, first_entry, length, chunks;
    float A, D, dt_bias;
    DEVICE_MEMBER Chunk chunk(int index) const {
        const int rest = length - index * CHUNK;
        return {index, index < 0 ? history : rest < CHUNK ? rest : CHUNK};
    }
};

DEVICE void load_tokens(Shared& shared, const Inputs& in, const Chunk& chunk, int stage) {
    if (chunk.is_history()) {
        history_copy_start(shared.B[stage], in.ring_B, in.first_entry, in.history);
    } else {
        const long long first = (long long)chunk.index * CHUNK;
        tokens_copy_start(shared.B[stage], in.B + first * in.B_stride, in.B_stride, chunk.valid);
        tokens_copy_start(shared.C[stage], in.C + first * in.C_stride, in.C_stride, chunk.valid);
    }
}

// Bits of the raw dt of a chunk: fp32 of the history, else activations. Tokens that do not exist get the last one's.
DEVICE void load_dt(u32 (&raw)[LANE_TOKENS], const Inputs& in, const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        const int lane_token = threadIdx.x % 32 * LANE_TOKENS + i;
        const int token = lane_token < chunk.valid ? lane_token : chunk.valid - 1;
        raw[i] = chunk.is_history() ? float_to_bits(in.ring_dt[wrapped(in.first_entry + token) * HEADS])
                                    : in.dt[((long long)chunk.index * CHUNK + token) * in.dt_stride];
    }
}

DEVICE void compute_gates(Shared& shared, const Inputs& in, const Chunk& chunk, const u32 (&raw)[LANE_TOKENS]) {
    float log_decay[LANE_TOKENS], dt[LANE_TOKENS];
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        const int token = threadIdx.x % 32 * LANE_TOKENS + i;
        dt[i] = chunk.is_history() ? bits_to_float(raw[i]) : softplus(activation_to_float(raw[i]) + in.dt_bias);
        if (token >= chunk.valid) dt[i] = 0.f;
        log_decay[i] = in.A * dt[i];
        shared.dt[chunk.index & 1][token] = dt[i];
    }
    scan_chunk(shared.gates[(chunk.index + 1) % GATE_STAGES], shared.prefix[chunk.index & 1], log_decay, dt);
}

// All pairs of 16 queries, the warp's own.
DEVICE void compute_scores(Shared& shared, const Inputs& in, const Chunk& chunk, int stage) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, queries = (int)threadIdx.x / 32 - WARPS;
    u32 a[COLUMNS / 16][4];
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) load_matrix_x4(a[k], first_operand(shared.C[stage], queries, k * 16));
#pragma unroll 1
    for (int tokens = queries; tokens >= 0; tokens--) {
        const PairBlock block = {queries, tokens};
        float factors[2][4], sum[2][4] = {};
        pair_decays(factors, shared.prefix[chunk.index & 1], block);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float2 dt = *(const float2*)(shared.dt[chunk.index & 1] + tokens * 16 + 8 * m + 2 * t);
#pragma unroll
            for (int half = 0; half < 2; half++) factors[half][2 * m] *= dt.x, factors[half][2 * m + 1] *= dt.y;
        }
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            u32 b[4];
            load_matrix_x4(b, second_operand(shared.B[stage], tokens, k * 16));
            mma_16bit<ACTIVATION_FORMAT>(sum[0], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma_16bit<ACTIVATION_FORMAT>(sum[1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& value = sum[i / 2][2 * half + i % 2];
                value *= factors[half][i];
                if (tokens < queries) continue;
                const int query = g + 8 * half, token = i / 2 * 8 + 2 * t + i % 2;
                value = token > query ? 0.f : token == query ? value + in.D : value;
            }
        store_fragments(shared.scores[chunk.index & 1], block, sum);
    }
}

// The preparing warps' part: pairs of tokens of chunk i + 1 and decays of chunk i + 2 while the state warps are at i.
DEVICE void prepare(Shared& shared, const Inputs& in, int first) {
    const int warp = threadIdx.x / 32 - WARPS, last = in.chunks - 1;
    const bool scans = warp == 0;  // the warp with the fewest pairs
    u32 raw[LANE_TOKENS];
    if (scans) {
        load_dt(raw, in, in.chunk(first));
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
            const bool more = scans && i + 1 < last;
            if (more) load_dt(raw, in, in.chunk(i + 2));
            if (STAGES > 2)
                copy_async_wait_but_last();
            else
                copy_async_wait();
            sync_group(BARRIER_PREPARING, PREPARING_THREADS);
            if (!chunk.is_history()) compute_scores(shared, in, chunk, (chunk.index - first) % STAGES);
            if (more) compute_gates(shared, in, in.chunk(i + 2), raw);
        }
        sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    }
}

// A state warp's part: 16 rows of the state over all chunks. `state` and `output` point at the warp's first row.
DEVICE void walk(Shared& shared, const Inputs& in, int first, float (&s)[COLUMN_TILES][4], activation_t* output,
                 int rows) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    activation_t* own_x = shared.x[warp];
    values_copy_start(own_x, in.x, in.x_stride, in.chunk(0).valid, rows);
    sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    for (int i = first; i < in.chunks; i++) {
        const Chunk chunk = in.chunk(i);
        const Gates& gates = shared.gates[(i + 1) % GATE_STAGES];
        const int stage = (i - first) % STAGES;
        u32 x[TOKEN_BLOCKS][4];  // first operands [rows x tokens]
        if (chunk.is_history()) {
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                u32 words[2];
                transposed_history(words, in.ring_x, in.first_entry, HEADS * ROWS, n, in.history, rows);
                x[n / 2][n % 2 * 2] = words[0], x[n / 2][n % 2 * 2 + 1] = words[1];
            }
        } else {
            float product[1][TOKEN_TILES][4] = {};
            float(&y)[TOKEN_TILES][4] = product[0];
            const activation_t* const queries[1] = {shared.C[stage]};
            multiply_state<1>(product, s, queries);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                const float2 decay = *(const float2*)(gates.entering + n * 8 + 2 * t);
                y[n][0] *= decay.x, y[n][1] *= decay.y, y[n][2] *= decay.x, y[n][3] *= decay.y;
            }
            copy_async_wait();
            sync_warp();
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                u32 words[2];
                transposed_values(words, own_x, n);
                x[n / 2][n % 2 * 2] = words[0], x[n / 2][n % 2 * 2 + 1] = words[1];
            }
            sync_warp();
            if (i + 1 < in.chunks)
                values_copy_start(own_x, in.x + (long long)(i + 1) * CHUNK * in.x_stride, in.x_stride,
                                  in.chunk(i + 1).valid, rows);
            const uint4* scores = shared.scores[i & 1] + threadIdx.x % 32;
            for_each_index<TOKEN_BLOCKS>([&](auto block) {
                constexpr int index = decltype(block)::value;
                accumulate_tiles<index>(y, x[index], scores);
            });
            store_outputs(y, output + (long long)i * CHUNK * (HEADS * ROWS), chunk.valid, rows);
        }
        decay_state(s, gates.total);
#pragma unroll
        for (int block = 0; block < TOKEN_BLOCKS; block++) {
            const float2 low = *(const float2*)(gates.leaving + block * 16 + 2 * t);
            const float2 high = *(const float2*)(gates.leaving + block * 16 + 8 + 2 * t);
            const u32(&w)[4] = x[block];
            add_outer(s,
                      make_wide(low.x * activation_low(w[0]), low.y * activation_high(w[0]),
                                low.x * activation_low(w[1]), low.y * activation_high(w[1]),
                                high.x * activation_low(w[2]), high.y * activation_high(w[2]),
                                high.x * activation_low(w[3]), high.y * activation_high(w[3])),
                      shared.B[stage], block);
        }
        sync_group(BARRIER_CHUNK, BLOCK_THREADS);
    }
}

KERNEL(BLOCK_THREADS, MIN_CTAS)
mamba2_prefill(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32;
    const Block block = this_block();
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, position_in + block.tile, position_stride, MAX_HISTORY);
    if (!row.active || row.length <= MAX_WINDOW) return;
    const long long slot = row.slot, start = row.start;
    const int own_row = block.head * ROWS + block.first_row + (warp < WARPS ? warp * 16 : 0);
    const int B_column = block.group * COLUMNS;
    const Inputs in = {x + start * x_stride + own_row, dt + start * dt_stride + block.head,
                       B + start * B_stride + B_column, C + start * C_stride + B_column,
                       x_stride, dt_stride, B_stride, C_stride, ring_x_in + slot * ring_x_stride + own_row,
                       ring_B_in + slot * ring_B_stride + B_column, ring_dt_in + slot * ring_dt_stride + block.head,
                       row.seq_len - row.checkpoint_position, row.checkpoint_position % RING_LEN, row.length,
                       (row.length + CHUNK - 1) / CHUNK, -expf(A_log[block.head]), D[block.head], dt_bias[block.head]};
    const int first = in.history > 0 ? -1 : 0;
    if (warp >= WARPS) {
        prepare(shared, in, first);
        return;
    }
    const int rows = CTA_ROWS - warp * 16;
    float s[COLUMN_TILES][4];
    activation_t* const output = y + start * (HEADS * ROWS) + own_row;
#ifdef READOUT_FORMAT
    load_rows(s, STATE_ROWS(row.slot).from(own_row), rows, row.checkpoint_position > 0);
    walk(shared, in, first, s, output, rows);
    // All warps have used what the tokens' buffers hold.
    static_assert(WARPS * STORE_SIZE <= sizeof(Shared), "warps stage their rows there");
    u32 slot_now = (u32)row.slot;
    hold_until_here(slot_now);  // addresses that are computed from it before the walk would cost registers
    store_rows(s, (float*)(memory + warp * STORE_SIZE), STATE_ROWS((int)slot_now).from(own_row), rows, own_row % ROWS,
               ROUNDING_KEY(block.head, row.seq_len + row.length));
#else
    const long long state_offset = slot * checkpoint_stride + (long long)own_row * COLUMNS;
    load_state(s, checkpoint_in + state_offset, rows, row.checkpoint_position > 0);
    walk(shared, in, first, s, output, rows);
    store_state(s, checkpoint + state_offset, rows);
#endif
    if (threadIdx.x < CTA_TILES) position[slot * position_stride + block.tile + threadIdx.x] = row.seq_len + row.length;
}
