// Depthwise causal convolution with silu over a position-addressed ring of its inputs. A thread owns 8 channels of one
// row and walks its window; blocks along z share the chunks of long windows. See plugins/reference/conv.py.
//
// Stamped in: CHANNELS, TAPS, CONV_RING_LEN, MAX_WINDOW, CHUNK, ROWS (of a block, one after the other but for decode
// steps, whose loads are all asked for first), ACTIVATION_FORMAT, WEIGHT_FORMAT, HAS_BIAS.
#include "rows.cuh"

#if WEIGHT_FORMAT == FORMAT_FP32
typedef float weight_t;
#else
typedef u16 weight_t;
#endif
constexpr int THREADS = 128;
// Blocks wait for the row's description and then for its inputs, so many of them help: with 8 a multiprocessor
// Qwen3.5-4B, batch 256, H200 takes 9.1 us (decode) and 26.9 (windows of 5), with as many as 79 registers let 10.1 and
// 30.5. The code for sm_100 and later, and weights of 32 bits, would spill. Two rows of decode a block, half as many
// blocks: 7.9 us instead of 8.8, Nano-4B (with a bias, 6 blocks) 9.0 instead of 10.8.
#if __CUDA_ARCH__ < 1000
constexpr int MIN_BLOCKS = WEIGHT_FORMAT == FORMAT_FP32 ? 4 : HAS_BIAS ? (ROWS > 1 ? 6 : 7) : 8;
#else
constexpr int MIN_BLOCKS = 4;
#endif

DEVICE float weight_to_float(weight_t value) {
    if constexpr (WEIGHT_FORMAT == FORMAT_FP32) return (float)value;
    if constexpr (WEIGHT_FORMAT == FORMAT_BF16) return bits_to_float((u32)value << 16);
    return fp16_to_float((u16)value);
}

// COUNT weights from a 16-byte boundary.
template <int COUNT>
DEVICE void load_weights(const weight_t* from, float (&values)[COUNT]) {
    constexpr int PER_LOAD = 16 / sizeof(weight_t);
#pragma unroll
    for (int i = 0; i < COUNT / PER_LOAD; i++) {
        const uint4 v = ((const uint4*)from)[i];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < PER_LOAD; e++) {
            if constexpr (WEIGHT_FORMAT == FORMAT_FP32)
                values[i * PER_LOAD + e] = bits_to_float(words[e]);
            else
                values[i * PER_LOAD + e] = weight_to_float((weight_t)(words[e / 2] >> 16 * (e % 2)));
        }
    }
}

// The weights of 8 channels as they are in memory: half the registers, and some instructions at every use.
struct PackedTaps {
    static constexpr int COUNT = 8 * TAPS * (int)sizeof(weight_t) / 16;
    uint4 chunks[COUNT];
    DEVICE_MEMBER float operator[](int i) const {
        const int word = i * (int)sizeof(weight_t) / 4;
        const uint4 v = chunks[word / 4];
        const u32 bits = word % 4 == 0 ? v.x : word % 4 == 1 ? v.y : word % 4 == 2 ? v.z : v.w;
        if constexpr (WEIGHT_FORMAT == FORMAT_FP32) return bits_to_float(bits);
        return weight_to_float((weight_t)(i % 2 ? bits >> 16 : bits));
    }
};

// Inputs of 8 channels at TAPS positions, oldest first, to the outputs at the last.
template <class Taps>
DEVICE uint4 convolved(const uint4 (&inputs)[TAPS], const Taps& taps, const float (&offset)[8]) {
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < TAPS; k++) {
        const u32 words[4] = {inputs[k].x, inputs[k].y, inputs[k].z, inputs[k].w};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float value = e % 2 ? activation_high(words[e / 2]) : activation_low(words[e / 2]);
            sum[e] += value * taps[e * TAPS + k];
        }
    }
    u32 packed[4];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        const float a = sum[e] + offset[e], b = sum[e + 1] + offset[e + 1];
        packed[e / 2] = pack_activation(a * sigmoid_side_by_side(a), b * sigmoid_side_by_side(b));
    }
    return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

struct Channels {
    const activation_t *inputs, *history;  // of the row's first token, of the slot
    activation_t* appended;
};

// The input `w` tokens from the row's first, older ones from the ring; zeros before the sequence.
DEVICE uint4 input_at(const Channels& at, const Row& row, int w, int x_stride) {
    const int p = row.seq_len + w;
    if (w >= 0) return *(const uint4*)(at.inputs + (long long)w * x_stride);
    return p >= 0 ? *(const uint4*)(at.history + p % CONV_RING_LEN * CHANNELS) : make_uint4(0, 0, 0, 0);
}

DEVICE void walk_row(const Row& row, const Channels& at, const float (&taps)[8 * TAPS], const float (&offset)[8],
                     int channel, int x_stride, activation_t* out) {
    const bool prefill = row.length > MAX_WINDOW;
    for (int begin = (int)blockIdx.z * CHUNK; begin < row.length; begin += (int)gridDim.z * CHUNK) {
        uint4 inputs[TAPS];  // up to that of `w`, oldest first
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) inputs[i] = input_at(at, row, begin - (TAPS - 1) + i, x_stride);
        const int end = begin + CHUNK < row.length ? begin + CHUNK : row.length;
        for (int w = begin; w < end; w++) {
            inputs[TAPS - 1] = *(const uint4*)(at.inputs + (long long)w * x_stride);
            *(uint4*)(out + (long long)(row.start + w) * CHANNELS + channel) = convolved(inputs, taps, offset);
            if (!prefill) *(uint4*)(at.appended + (row.seq_len + w) % CONV_RING_LEN * CHANNELS) = inputs[TAPS - 1];
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) inputs[i] = inputs[i + 1];
        }
    }
    // Only this thread reads these channels' history, in its first chunk, so it may now overwrite it.
    if (prefill && blockIdx.z == 0) {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int w = row.length - (TAPS - 1) + i;
            if (w >= 0)
                *(uint4*)(at.appended + (row.seq_len + w) % CONV_RING_LEN * CHANNELS) =
                    *(const uint4*)(at.inputs + (long long)w * x_stride);
        }
    }
}

// Rows of one token each, all loads first, so that the second row's come for free.
template <class ChannelsOf>
DEVICE void decode_rows(const Row (&rows)[ROWS], const ChannelsOf& channels_of, const weight_t* weight,
                        const weight_t* bias, int channel, int x_stride, activation_t* out) {
    uint4 inputs[ROWS][TAPS];
    PackedTaps taps;
#pragma unroll
    for (int i = 0; i < PackedTaps::COUNT; i++) taps.chunks[i] = ((const uint4*)(weight + channel * TAPS))[i];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < TAPS; i++) inputs[r][i] = input_at(channels_of(rows[r]), rows[r], i - (TAPS - 1), x_stride);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float offset[8] = {};
        if constexpr (HAS_BIAS) load_weights<8>(bias + channel, offset);
        *(uint4*)(out + (long long)rows[r].start * CHANNELS + channel) = convolved(inputs[r], taps, offset);
        *(uint4*)(channels_of(rows[r]).appended + rows[r].seq_len % CONV_RING_LEN * CHANNELS) = inputs[r][TAPS - 1];
    }
}

KERNEL(THREADS, MIN_BLOCKS)
causal_conv1d_window(
    // x [T, C], tokens x_stride elements apart; weight [C, K]; bias [C] or null; ring [slots, R, C]
    const activation_t* x, const weight_t* weight, const weight_t* bias, const activation_t* ring_in,
    const int* error_flag_in, const int* seq_lens, const int* window_starts, const int* window_lens,
    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len, int x_stride, int ring_stride,
    activation_t* out, activation_t* ring, int* error_flag) {
    // A decode kernel behind it starts early and waits by itself. H200, qwen4b, batch 256: both 152.8 us without, 152.3
    // with.
    let_next_grid_start();
    const int channel = ((int)blockIdx.x * THREADS + (int)threadIdx.x) * 8;
    auto row_at = [&](int r) {
        return read_row((int)blockIdx.y * ROWS + r, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                        num_slots, max_seq_len, nullptr, 0, 0);
    };
    auto channels_of = [&](const Row& row) -> Channels {
        const long long slot = (long long)row.slot * ring_stride + channel;
        return {x + (long long)row.start * x_stride + channel, ring_in + slot, ring + slot};
    };
    if constexpr (ROWS > 1) {
        Row rows[ROWS];
        bool decode = blockIdx.z == 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            rows[r] = row_at(r);
            decode &= rows[r].active && rows[r].length == 1;
        }
        if (decode) {
            if (channel < CHANNELS) decode_rows(rows, channels_of, weight, bias, channel, x_stride, out);
            return;
        }
    }
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
        const Row row = row_at(r);
        if (row.error && blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) atomic_or(error_flag, row.error);
        if (channel >= CHANNELS) continue;
        if (!row.active) {
            if (row.in_range)
                for (int w = blockIdx.z; w < row.length; w += (int)gridDim.z)
                    *(uint4*)(out + (long long)(row.start + w) * CHANNELS + channel) = make_uint4(0, 0, 0, 0);
            continue;
        }
        float taps[8 * TAPS], offset[8] = {};
        load_weights<8 * TAPS>(weight + channel * TAPS, taps);
        if constexpr (HAS_BIAS) load_weights<8>(bias + channel, offset);
        walk_row(row, channels_of(row), taps, offset, channel, x_stride, out);
    }
}
