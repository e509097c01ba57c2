// Chooses each token's experts: the TOP_K largest scores, in falling order, and their weights. A warp serves a token.
//
// SIGMOID: scores are sigmoid(logit), the choice is by score + bias, weights are scores, normalised if NORMALIZE, times
// a factor. Else: softmax, normalised over the chosen. See runtime/functional_ops.py. Equal scores go to the lower
// expert; a token whose logits are NaN gets experts that exist and NaN weights.
//
// Stamped in: EXPERTS, TOP_K (at most 32), SIGMOID, NORMALIZE, LOGIT_PARTS (summands of a logit, EXPERTS apart), LOGITS_FP32,
// THREADS, ACTIVATION_FORMAT.
#include "elementwise.cuh"

constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane: lane, lane + 32, ...
static_assert(TOP_K <= 32 && TOP_K <= EXPERTS, "a lane keeps one choice");
// Keys order scores; these two lie below all numbers'.
constexpr u32 TAKEN = 0, NO_NUMBER = 1;

#if LOGITS_FP32
typedef float logit_t;
DEVICE float logit_to_float(float value) { return value; }
#else
typedef activation_t logit_t;
DEVICE float logit_to_float(activation_t value) { return activation_to_float(value); }
#endif

DEVICE float logit_of(const logit_t* logits, int expert) {
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < LOGIT_PARTS; i++) value += logit_to_float(logits[i * EXPERTS + expert]);
    return value;
}

DEVICE u32 key_of(float score) {
    if (score != score) return NO_NUMBER;
    const u32 bits = float_to_bits(score);
    const u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return key > NO_NUMBER ? key : NO_NUMBER + 1;
}

KERNEL(THREADS, 1)
route_tokens(
    // logits [tokens, LOGIT_PARTS * EXPERTS], rows stride apart; bias fp32 [EXPERTS] or null; the factor's bits
    const logit_t* logits, const float* bias, int tokens, int stride, int scaling_bits,
    // [tokens, TOP_K]
    long long* ids, float* weights) {
    const int token = (int)blockIdx.x * (THREADS / 32) + (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (token >= tokens) return;
    logits += offset_of(token, stride);
    // All loads first: those behind a sigmoid's branches would wait for each other.
    float scores[OWN], biases[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int expert = lane + 32 * i < EXPERTS ? lane + 32 * i : EXPERTS - 1;
        scores[i] = logit_of(logits, expert);
        biases[i] = SIGMOID ? bias[expert] : 0.f;
    }
    u32 keys[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float score = SIGMOID ? sigmoid_side_by_side(scores[i]) + biases[i] : scores[i];
        keys[i] = lane + 32 * i < EXPERTS ? key_of(score) : TAKEN;
    }
    int chosen = 0;
    for (int choice = 0; choice < TOP_K; choice++) {
        u32 best = keys[0];
        int at = 0;
#pragma unroll
        for (int i = 1; i < OWN; i++)
            if (keys[i] > best) best = keys[i], at = i;
        const u32 largest = reduce_max(best);
        const int own = lane + 32 * at;
        const int expert = (int)~reduce_max(best == largest ? ~(u32)own : 0u);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (lane + 32 * i == expert) keys[i] = TAKEN;
        if (lane == choice) chosen = expert;
    }
    const bool holds = lane < TOP_K;
    const float logit = holds ? logit_of(logits, chosen) : 0.f;
    const float largest = shuffle_from(logit, 0);  // the first choice's
    float weight = SIGMOID ? sigmoid(logit) : expf(logit - largest);
    if (!holds) weight = 0.f;
    if constexpr (!SIGMOID || NORMALIZE) weight /= warp_sum(weight) + (SIGMOID ? 1e-20f : 0.f);
    if (!holds) return;
    ids[(long long)token * TOP_K + lane] = chosen;
    weights[(long long)token * TOP_K + lane] = SIGMOID ? weight * bits_to_float((u32)scaling_bits) : weight;
}
