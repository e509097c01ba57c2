// Rows that may fold begin early: a fold takes three times as long as another row's work, and one that begins last is waited
// for alone. Where a call has rows enough, the i-th of its last LATE_ROWS that may fold changes places with row i. Every
// block finds its row by itself, so what it goes by must not change while the launch runs: a row without history counts as
// one that may fold, because a row that has just been folded is one.
//
// Stamped in: EARLY_ROWS, the most rows that change places; 0 leaves all where they are.
#pragma once
#include "replay.cuh"

constexpr int LATE_ROWS = 64;

// `position` is what the row's tile holds.
DEVICE bool may_fold(int seq_len, int position, int length) {
    const int history = seq_len ? seq_len - position : 0;
    return length >= 1 && length <= MAX_WINDOW && history >= 0 && history <= MAX_HISTORY &&
           (history == 0 || history + length > BUFFER_LEN);
}

// The row at place `place` of `rows`; early(row) says whether a row may fold. For all lanes of a warp.
template <class Early>
DEVICE u32 row_at(u32 place, u32 rows, const Early& early) {
    if (!EARLY_ROWS || rows < 2 * LATE_ROWS) return place;
    const u32 lane = threadIdx.x % 32, late = rows - LATE_ROWS;
    if (place >= (u32)EARLY_ROWS && place < late) return place;
    const u32 first = ballot(early(late + lane)), second = ballot(early(late + 32 + lane));
    if (place < (u32)EARLY_ROWS) {
        const int rank = (int)place - count_bits(first);
        const u32 word = rank < 0 ? first : second;
        const int wanted = rank < 0 ? (int)place : rank;
        if (wanted >= count_bits(word)) return place;
        const bool found = (word >> lane & 1u) && count_bits(word & ((1u << lane) - 1u)) == wanted;
        return late + (rank < 0 ? 0u : 32u) + lowest_bit(ballot(found));
    }
    const u32 at = place - late, word = at < 32 ? first : second;
    if (!(word >> at % 32 & 1u)) return place;
    const int rank = (at < 32 ? 0 : count_bits(first)) + count_bits(word & ((1u << at % 32) - 1u));
    return rank < EARLY_ROWS ? (u32)rank : place;
}
