// Rows that may fold begin early: a fold takes several times as long as another row's work, and one that begins last is
// waited for alone. Blocks keep their places; the rows that they work on are exchanged: the n-th of the late rows that may
// fold changes with the n-th of the early ones that may not. Every block finds its row by itself, without a word to others,
// so what they see must not change while they run: a row without history counts as one that may fold, because a row that
// has just been folded is one.
//
// Stamped in: EARLY_64THS and LATE_64THS, the shares of the places that are early, from the front, and late, from the end;
// ORDERED_ROWS, the fewest rows that are worth it. EARLY_64THS 0 leaves every row in its place.
#pragma once
#include "replay.cuh"

constexpr int MAX_ORDERED_ROWS = 1024;

DEVICE bool rows_are_ordered() {
    return EARLY_64THS && gridDim.y >= (u32)ORDERED_ROWS && gridDim.y <= (u32)MAX_ORDERED_ROWS;
}
DEVICE u32 early_places() { return gridDim.y * EARLY_64THS / 64; }
// From here on they are late.
DEVICE u32 late_places() { return gridDim.y - gridDim.y * LATE_64THS / 64; }
static_assert(EARLY_64THS + LATE_64THS <= 64, "a place is not both");

// Whether a row may fold in this launch, or already has. `position` is what its tile holds.
DEVICE bool may_fold(int seq_len, int position, int length) {
    const int history = seq_len ? seq_len - position : 0;
    return length >= 1 && length <= MAX_WINDOW && history >= 0 && history <= MAX_HISTORY &&
           (history == 0 || history + length > BUFFER_LEN);
}

// Bits of the lane's word that belong to rows below `row`; lane n has those of rows 32 n on.
DEVICE u32 bits_below(u32 row) {
    const u32 first = threadIdx.x % 32u * 32u;
    return row <= first ? 0u : row >= first + 32u ? 0xffffffffu : (1u << (row - first)) - 1u;
}
// Index of bit number n (from 0) of the lanes' words, which have more than n.
DEVICE u32 place_of_bit(u32 word, u32 n) {
    const u32 lane = threadIdx.x % 32u, own = (u32)count_bits(word);
    u32 sum = own;  // up to and with the lane's
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const u32 before = float_to_bits(shuffle_up(bits_to_float(sum), delta));
        if (lane >= (u32)delta) sum += before;
    }
    const u32 from = lowest_bit(ballot(n < sum)), before = float_to_bits(shuffle_from(bits_to_float(sum - own), (int)from));
    const u32 found = float_to_bits(shuffle_from(bits_to_float(word), (int)from));
    const u32 below = (u32)count_bits(found & ((1u << lane) - 1u));
    return from * 32 + lowest_bit(ballot((found >> lane & 1u) && below == n - before));
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
    const u32 gives_way = ~word & bits_below(early_places()), folds = word & ~bits_below(late_places());
    const bool in_front = place < early_places();
    const u32 from = in_front ? gives_way : folds, to = in_front ? folds : gives_way;
    const u32 rank = reduce_add((u32)count_bits(from & bits_below(place)));
    const bool moves = rank < reduce_add((u32)count_bits(from & bits_below(place + 1)));
    return moves && rank < reduce_add((u32)count_bits(to)) ? place_of_bit(to, rank) : place;
}

// ---------------------------------------------------------------------------------------------------------- sets
// The same with fewer reads. Early places begin at EARLY_FROM, behind those of a launch's first blocks, whose reads
// nothing hides; LATE_64THS of what follows is late. A set is EARLY_MEMBERS neighbours of the ones and LATE_MEMBERS of
// the others: in it the n-th late row that may fold changes with the n-th early one that may not. A warp looks at its
// set by itself.
#ifdef EARLY_MEMBERS
constexpr u32 MEMBERS = EARLY_MEMBERS + LATE_MEMBERS;
static_assert(MEMBERS <= 32, "a lane for each");
static_assert(LATE_64THS * (int)MEMBERS <= 64 * LATE_MEMBERS, "a place is not both");

DEVICE u32 set_count() {
    return gridDim.y < (u32)ORDERED_ROWS ? 0u : (gridDim.y - EARLY_FROM) * LATE_64THS / (64 * LATE_MEMBERS);
}
DEVICE bool is_early_in_set(u32 place) { return place - EARLY_FROM < EARLY_MEMBERS * set_count(); }
DEVICE u32 first_late_in_set() { return gridDim.y - LATE_MEMBERS * set_count(); }

// The row at an early or late place. early(row) says whether a row may fold. For all lanes of a warp.
template <class Early>
DEVICE u32 row_in_set(u32 place, const Early& early) {
    constexpr u32 EARLY = (1u << EARLY_MEMBERS) - 1u;
    const bool is_late = place >= first_late_in_set();
    const u32 before = place - (is_late ? first_late_in_set() : EARLY_FROM);
    const u32 set = before / (is_late ? LATE_MEMBERS : EARLY_MEMBERS);
    const u32 member = is_late ? EARLY_MEMBERS + before % LATE_MEMBERS : before % EARLY_MEMBERS;
    const auto place_of = [&](u32 m) {
        return m < EARLY_MEMBERS ? EARLY_FROM + set * EARLY_MEMBERS + m
                                 : first_late_in_set() + set * LATE_MEMBERS + (m - EARLY_MEMBERS);
    };
    const u32 lane = threadIdx.x % 32u, folds = ballot(early(place_of(lane < MEMBERS ? lane : 0u)) && lane < MEMBERS);
    const u32 gives_way = ~folds & EARLY, late = folds & ~EARLY;
    const u32 from = is_late ? late : gives_way, to = is_late ? gives_way : late, own = 1u << member;
    const u32 rank = (u32)count_bits(from & (own - 1u));
    const u32 found = ballot((to >> lane & 1u) && (u32)count_bits(to & ((1u << lane) - 1u)) == rank);
    return (from & own) && found ? place_of(lowest_bit(found)) : place;
}
#endif
