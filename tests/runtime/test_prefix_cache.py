"""Which prompt beginnings are kept, found and dropped."""

from __future__ import annotations

import pytest

from replayssm.runtime.prefix_cache import PrefixCache, Snapshot


def store(cache, tokens, seq_len, size=10):
    cache.store(tokens, Snapshot(seq_len, bytes(size), None))


def test_the_longest_snapshot_is_found():
    cache = PrefixCache(100, 4)
    tokens = list(range(20))
    store(cache, tokens, 4)
    store(cache, tokens, 12)
    assert cache.lookup(tokens, 19)[0].seq_len == 12
    assert cache.lookup(tokens, 11)[0].seq_len == 4
    assert cache.lookup([*tokens[:6], 99, *tokens[7:]], 19)[0].seq_len == 4
    assert cache.lookup([99, *tokens[1:]], 19)[0] is None
    assert (cache.hits, cache.misses) == (3, 1)


def test_digests_are_of_tokens_not_of_digits():
    cache = PrefixCache(100, 2)
    store(cache, [1, 23], 2)
    assert cache.lookup([12, 3], 2)[0] is None
    assert cache.lookup([1, 23], 2)[0] is not None


def test_boundaries_worth_keeping():
    """A prompt's last boundary, and the deepest that it shares with an earlier prompt."""
    cache = PrefixCache(100, 4)
    first, second = list(range(20)), [*range(10), *range(50, 60)]
    assert cache.lookup(first, 18)[1] == {16}
    assert cache.lookup(second, 18)[1] == {8, 16}
    store(cache, second, 8)
    assert cache.lookup([*range(8), *range(90, 99)], 16)[1] == {16}
    assert cache.lookup([1, 2], 1)[1] == set()


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(25, 4)
    a, b, c = ([value] * 4 for value in range(3))
    store(cache, a, 4)
    store(cache, b, 4)
    cache.lookup(a, 4)
    store(cache, c, 4)
    assert [cache.lookup(tokens, 4)[0] is None for tokens in (a, b, c)] == [False, True, False]
    store(cache, a, 4, size=5)
    assert (cache.bytes, len(cache)) == (15, 2)
    store(cache, b, 4, size=26)
    assert cache.bytes == 15
    none = PrefixCache(0, 4)
    assert none.lookup(a, 4) == (None, frozenset())
    with pytest.raises(ValueError, match="max_bytes >= 0"):
        PrefixCache(-1, 4)
