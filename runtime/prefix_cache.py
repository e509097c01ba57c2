"""Snapshots of sequences at chunk ends of their prompts, for prompts that begin alike (design rule 9)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """State after `seq_len` tokens, what the drafter knew then, and how many of the tokens only the ring held."""

    seq_len: int
    blob: bytes
    drafter: object
    history: int = 0


class PrefixCache:
    """Snapshots under a byte limit; the least recently used goes first.

    A prompt of n tokens has boundaries at the multiples of the prefill chunk below its tail. A snapshot copies the
    whole recurrent state, so only two of them are worth one: the last, which a longer version of the same text will
    use, and the deepest that an earlier prompt had too, which is where prompts with a common beginning part.
    """

    def __init__(self, max_bytes: int, chunk: int) -> None:
        if max_bytes < 0 or chunk < 1:
            raise ValueError(f"expected max_bytes >= 0 and chunk >= 1, got {max_bytes} and {chunk}")
        self.max_bytes = max_bytes
        self.chunk = chunk
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        # Digests of boundaries that some prompt had; a few dozen bytes each, so far more of them than snapshots.
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._max_seen = 1 << 16

    def __len__(self) -> int:
        return len(self._snapshots)

    def lookup(self, tokens: Sequence[int], body: int) -> tuple[Snapshot | None, frozenset[int]]:
        """(longest snapshot of the prompt's first `body` tokens, boundaries behind it that are worth keeping)."""
        if not self.max_bytes:
            return None, frozenset()
        digests = self._digests(tokens, body)
        found, wanted = None, set()
        for index in reversed(range(len(digests))):
            digest = digests[index]
            if digest in self._snapshots:
                self._snapshots.move_to_end(digest)
                found = self._snapshots[digest]
                break
            if digest in self._seen and not wanted:
                wanted.add((index + 1) * self.chunk)
        if digests and digests[-1] not in self._snapshots:
            wanted.add(len(digests) * self.chunk)
        self.hits += found is not None
        self.misses += found is None
        for digest in digests:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return found, frozenset(wanted)

    def store(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Keep the snapshot of the first snapshot.seq_len tokens; one larger than the limit is dropped."""
        if len(snapshot.blob) > self.max_bytes:
            return
        digest = self._digests(tokens, snapshot.seq_len)[-1]
        old = self._snapshots.pop(digest, None)
        self.bytes += len(snapshot.blob) - (len(old.blob) if old else 0)
        self._snapshots[digest] = snapshot
        while self.bytes > self.max_bytes:
            _, dropped = self._snapshots.popitem(last=False)
            self.bytes -= len(dropped.blob)

    def _digests(self, tokens: Sequence[int], body: int) -> list[bytes]:
        """One digest per whole chunk of the first `body` tokens, of everything up to its end."""
        digests, state = [], hashlib.blake2b(digest_size=16)
        for end in range(self.chunk, body + 1, self.chunk):
            state.update(",".join(map(str, tokens[end - self.chunk : end])).encode() + b";")
            digests.append(state.digest())
        return digests
