// Rows that may fold begin first: a fold takes several times as long as another row's work, and one that begins last is
// waited for alone. Blocks keep their places; the rows that they work on are exchanged: the i-th row that may fold belongs
// to place i, and the rows that stood there go where it came from. Every block finds its row by itself, without a word to
// others, so what they see must not change while they run: a row without history counts as one that may fold, because a
// row that has just been folded is one.
//
// Stamped in: EARLY_64THS, the share of the places that such rows may take, and ORDERED_ROWS, the fewest rows that are
// worth it; 0 leaves every row in its place.
#pragma once
#include "replay.cuh"

constexpr int MAX_ORDERED_ROWS = 1024;

DEVICE bool rows_are_ordered() {
    return EARLY_64THS && gridDim.y >= (u32)ORDERED_ROWS && gridDim.y <= (u32)MAX_ORDERED_ROWS;
}
DEVICE u32 early_places() { return gridDim.y * EARLY_64THS / 64; }

// Whether a row may fold in this launch, or already has. `position` is what its tile holds.
DEVICE bool may_fold(int seq_len, int position, int length) {
    const int history = seq_len ? seq_len - position : 0;
    return length >= 1 && length <= MAX_WINDOW && history >= 0 && history <= MAX_HISTORY &&
           (history == 0 || history + length > BUFFER_LEN);
}

// Index of bit number n of the lanes' words, of which `before` are in the words of lower lanes.
DEVICE u32 place_of_bit(u32 word, float before, float n) {
    const u32 lane = threadIdx.x % 32u;
    const float count = (float)count_bits(word);
    const u32 from = lowest_bit(ballot(before <= n && n < before + count));
    const u32 found = float_to_bits(shuffle_from(bits_to_float(word), from));
    const float rest = n - shuffle_from(before, from);
    return from * 32 + lowest_bit(ballot((found >> lane & 1u) && (float)count_bits(found & ((1u << lane) - 1u)) == rest));
}
// Bits in the words of lower lanes.
DEVICE float bits_before(u32 word) {
    const u32 lane = threadIdx.x % 32u;
    const float own = (float)count_bits(word);
    float sum = own;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const float before = shuffle_up(sum, delta);
        if (lane >= (u32)delta) sum += before;
    }
    return sum - own;
}

// The row at place `place`. `words` [MAX_ORDERED_ROWS / 32] are the block's; early(row) says whether a row may fold. For all
// threads of the block, which have met when it returns.
template <class Early>
DEVICE u32 row_at(u32 place, u32* words, const Early& early) {
    const u32 lane = threadIdx.x % 32u, rows = gridDim.y;
    constexpr int AT_ONCE = 256 / THREADS > 0 ? 256 / THREADS : 1;  // rows of a thread whose reads travel together
    for (u32 first = threadIdx.x / 32u * 32; first < rows; first += THREADS * AT_ONCE) {
        bool is_early[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const u32 row = first + i * THREADS + lane;
            is_early[i] = early(row < rows ? row : rows - 1) && row < rows;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const u32 word = ballot(is_early[i]);
            if (lane == 0 && first + i * THREADS < rows) words[first / 32 + i * WARPS] = word;
        }
    }
    sync_threads();
    const u32 word = lane < (rows + 31) / 32 ? words[lane] : 0u;
    const float before = bits_before(word);
    const float total = shuffle_from(before + (float)count_bits(word), 31);
    const u32 places = total < (float)early_places() ? (u32)total : early_places();
    if (place < places) return place_of_bit(word, before, (float)place);
    const u32 own_word = float_to_bits(shuffle_from(bits_to_float(word), place / 32));
    const u32 below = own_word & ((1u << place % 32) - 1u);
    const float rank = shuffle_from(before, place / 32) + (float)count_bits(below);
    if (!(own_word >> place % 32 & 1u) || rank >= (float)places) return place;
    // The place of a row that has gone to the front takes one of those that stood there.
    const u32 within = places <= lane * 32 ? 0u : places >= lane * 32 + 32 ? 0xffffffffu : (1u << places % 32) - 1u;
    const u32 stay = word & within, leave = ~word & within;
    const float stayed = shuffle_from(bits_before(stay) + (float)count_bits(stay), 31);
    return place_of_bit(leave, bits_before(leave), rank - stayed);
}
