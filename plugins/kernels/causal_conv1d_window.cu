// Depthwise causal convolution with silu over a position-addressed ring of its inputs. A thread owns 8 channels of one
// row and walks its window; blocks along z share the chunks of long windows. See plugins/reference/conv.py.
//
// Stamped in: CHANNELS, TAPS, CONV_RING_LEN, MAX_WINDOW, CHUNK, ACTIVATION_FORMAT, WEIGHT_FORMAT, HAS_BIAS.
#include "rows.cuh"

#if WEIGHT_FORMAT == FORMAT_FP32
typedef float weight_t;
#else
typedef u16 weight_t;
#endif
constexpr int THREADS = 128;
// Blocks wait for the row's description and then for its inputs, so many of them help: with 8 a multiprocessor Qwen3.5-4B,
// batch 256, H200 takes 9.1 us (decode) and 26.9 (windows of 5), with as many as 79 registers let 10.1 and 30.5. The code
// for sm_100 and later, and weights of 32 bits, would spill.
#if __CUDA_ARCH__ < 1000
constexpr int MIN_BLOCKS = WEIGHT_FORMAT == FORMAT_FP32 ? 4 : 8;
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
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, nullptr, 0, 0);
    if (row.error && blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) atomic_or(error_flag, row.error);
    if (channel >= CHANNELS) return;
    if (!row.active) {
        if (row.in_range)
            for (int w = blockIdx.z; w < row.length; w += (int)gridDim.z)
                *(uint4*)(out + (long long)(row.start + w) * CHANNELS + channel) = make_uint4(0, 0, 0, 0);
        return;
    }
    float taps[8 * TAPS], offset[8] = {};
    load_weights<8 * TAPS>(weight + channel * TAPS, taps);
    if constexpr (HAS_BIAS) load_weights<8>(bias + channel, offset);
    const activation_t* inputs = x + (long long)row.start * x_stride + channel;
    const activation_t* history = ring_in + (long long)row.slot * ring_stride + channel;
    activation_t* appended = ring + (long long)row.slot * ring_stride + channel;
    const bool prefill = row.length > MAX_WINDOW;

    for (int begin = (int)blockIdx.z * CHUNK; begin < row.length; begin += (int)gridDim.z * CHUNK) {
        uint4 past[TAPS - 1];  // the inputs before `w`, oldest first
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int w = begin - (TAPS - 1) + i, p = row.seq_len + w;
            past[i] = make_uint4(0, 0, 0, 0);
            if (w >= 0)
                past[i] = *(const uint4*)(inputs + (long long)w * x_stride);
            else if (p >= 0)
                past[i] = *(const uint4*)(history + p % CONV_RING_LEN * CHANNELS);
        }
        const int end = begin + CHUNK < row.length ? begin + CHUNK : row.length;
        for (int w = begin; w < end; w++) {
            const uint4 now = *(const uint4*)(inputs + (long long)w * x_stride);
            float sum[8] = {};
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                const uint4 v = k < TAPS - 1 ? past[k < TAPS - 1 ? k : 0] : now;
                const u32 words[4] = {v.x, v.y, v.z, v.w};
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
                packed[e / 2] = (u32)float_to_activation(a * sigmoid(a)) |
                                (u32)float_to_activation(b * sigmoid(b)) << 16;
            }
            *(uint4*)(out + (long long)(row.start + w) * CHANNELS + channel) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
            if (!prefill) *(uint4*)(appended + (row.seq_len + w) % CONV_RING_LEN * CHANNELS) = now;
#pragma unroll
            for (int i = 0; i < TAPS - 2; i++) past[i] = past[i + 1];
            past[TAPS - 2] = now;
        }
    }
    // Only this thread reads these channels' history, in its first chunk, so it may now overwrite it.
    if (prefill && blockIdx.z == 0) {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int w = row.length - (TAPS - 1) + i;
            if (w >= 0)
                *(uint4*)(appended + (row.seq_len + w) % CONV_RING_LEN * CHANNELS) =
                    *(const uint4*)(inputs + (long long)w * x_stride);
        }
    }
}
