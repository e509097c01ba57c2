"""A session whose engine is divided over several ranks.

`open_session` starts the other ranks and returns rank 0's session, which takes the calls of `Session`: each is sent to
the other ranks, which make it too. What they compute meets in collectives inside; logits, choices and hidden states are
rank 0's. Memory and bytes that a session tells are those of one rank.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from replayssm.plugins.manifest import EngineManifest
from replayssm.plugins.state import dtype_name, torch_dtype
from replayssm.runtime.cuda_graphs import StepGraph
from replayssm.runtime.engine import Engine
from replayssm.runtime.parallel import RankEngine, rank_engine
from replayssm.runtime.parallel_processes import EXPECTED, Peers, Place, join_group
from replayssm.runtime.session import PREFILL_CHUNK, DraftRow, Row, Session, StepResult, checked_device
from replayssm.runtime.step_rows import Finish

BLOB_MAGIC = b"replayssm ranks\n"


@dataclass(frozen=True)
class _Plan:
    """What another rank loads, how its products are computed, and how its session is made."""

    directory: Path
    manifest: EngineManifest
    products: dict[str, bool]
    slots: int | None
    prefill_chunk: int
    graphs: bool | None


def open_session(
    engine: Engine,
    slots: int | None = None,
    device: torch.device | str = "cpu",
    prefill_chunk: int = PREFILL_CHUNK,
    graphs: bool | None = None,
) -> Session:
    """A session over `engine`, with the other ranks of a `RankEngine` of rank 0.

    Rank r runs on GPU r, or on this machine's CPU. Arguments are `Session`'s.
    """
    if not isinstance(engine, RankEngine):
        return Session(engine, slots, device, prefill_chunk, graphs)
    return ParallelSession(engine, slots, device, prefill_chunk, graphs)


class ParallelSession(Session):
    """Rank 0's session. Use it from one thread at a time, and `close` it."""

    def __init__(
        self,
        engine: RankEngine,
        slots: int | None = None,
        device: torch.device | str = "cpu",
        prefill_chunk: int = PREFILL_CHUNK,
        graphs: bool | None = None,
    ) -> None:
        if engine.rank != 0:
            raise ValueError(f"rank 0 leads the others, got rank {engine.rank}")
        names = ("emulate_activation_quantization", "fp8_products", "fp8_experts")
        products = {name: getattr(engine, name) for name in names}
        plan = _Plan(engine.directory, engine.manifest, products, slots, prefill_chunk, graphs)
        self._inside, self._last = False, ""
        self._numbers = itertools.count()
        self._peers = Peers(engine.ranks, checked_device(device), _follow, plan)
        try:
            with self._peers.call():
                super().__init__(engine, slots, self._peers.places[0].torch_device, prefill_chunk, graphs)
                self._peers.receive()
        except BaseException:
            self._peers.close()
            raise
        # At the latest when the session is forgotten or the interpreter ends.
        self._finalizer = weakref.finalize(self, self._peers.close)

    def close(self) -> None:
        """End the other ranks. The session is of no use afterwards."""
        self._programs = {}
        gc.collect()
        self._finalizer()

    @contextmanager
    def _mirrored(self, name: str, *arguments: Any, each: Sequence[tuple] = ()) -> Iterator[None]:
        """Have the other ranks make a call while this one makes it. each: arguments by rank instead."""
        if self._inside:
            yield
            return
        self._peers.send(*((name, part, self._last) for part in each or [arguments]))
        self._inside, self._last = True, ""
        try:
            with self._peers.call():
                yield
        except EXPECTED as error:
            self._last = type(error).__name__
            raise
        finally:
            self._inside = False

    def allocate(self) -> int:
        with self._mirrored("allocate"):
            return super().allocate()

    def free(self, slot: int) -> None:
        """Works without the other ranks too, so that whoever holds a slot can end in order."""
        if not self._peers.are_there:
            return super().free(slot)
        with self._mirrored("free", slot):
            return super().free(slot)

    def step(self, rows: Sequence[Row]) -> StepResult:
        with self._mirrored("step", rows):
            own = super().step(rows)
        return own if self._inside else self._shared(own)

    def _shared(self, own: StepResult) -> StepResult:
        """The last result, whose logits the ranks join when they are read: few are."""

        def logits() -> torch.Tensor:
            with self._mirrored("logits"):
                return own.logits

        return StepResult(logits, lambda: own.hidden_states, own.logits_spans, own.token_spans, own.chosen)

    def start_step(self, rows: Sequence[Row], chosen_only: bool = False) -> Finish:
        if self._inside:
            return super().start_step(rows, chosen_only)
        number = next(self._numbers)  # of what this call begins and another ends
        with self._mirrored("start_step", number, rows, chosen_only):
            own = super().start_step(rows, chosen_only)

        def finish() -> StepResult:
            with self._mirrored("finish", number):
                result = own()
            return self._shared(result)

        return finish

    def advance(self, accepted: Mapping[int, int]) -> None:
        with self._mirrored("advance", dict(accepted)):
            super().advance(accepted)

    def fork(self, slot: int) -> int:
        with self._mirrored("fork", slot):
            return super().fork(slot)

    def warm_up(self) -> None:
        with self._mirrored("warm_up"):
            super().warm_up()

    def draft_step(self, rows: Sequence[DraftRow]) -> StepResult:
        """Hidden states travel between the devices: the drafter's are rank 0's."""
        if self._inside:
            return super().draft_step(rows)
        hidden = torch.cat([row.hidden_states for row in rows]).contiguous()
        shape, dtype = tuple(hidden.shape), dtype_name(hidden.dtype)
        with self._mirrored("draft_step", [replace(row, hidden_states=None) for row in rows], shape, dtype):
            dist.broadcast(hidden, 0)
            return super().draft_step(rows)

    def decode_ahead(self, slots: Sequence[int], tokens: Sequence[int], steps: int) -> Iterator[list[int]]:
        number, own = next(self._numbers), super().decode_ahead(slots, tokens, steps)
        with self._mirrored("decode_ahead", number, list(slots), list(tokens), steps):
            pass
        try:
            while True:
                with self._mirrored("next", number):
                    chosen = next(own, None)
                if chosen is None:
                    return
                yield chosen
        finally:
            own.close()
            if self._peers.are_there:
                with self._mirrored("stop", number):
                    pass

    def save(self, slot: int) -> bytes:
        """All ranks' parts of the slot, for a session over an equal engine with as many ranks."""
        with self._mirrored("save", slot):
            own = super().save(slot)
            return _join_blobs([own, *self._peers.receive()])

    def load(self, blob: bytes) -> int:
        parts = _split_blob(blob, self.engine.ranks)
        with self._mirrored("load", each=[(part,) for part in parts[1:]]):
            return super().load(parts[0])

    def capture_prompts(self) -> None:
        with self._mirrored("capture_prompts"):
            super().capture_prompts()

    def step_graph(self, rows: int, window: int = 1, kind: str = "greedy") -> StepGraph:
        raise ValueError("a graph of one rank waits for the others: run every rank's session in a process of its own")


def _join_blobs(parts: Sequence[bytes]) -> bytes:
    """BLOB_MAGIC, the SHA-256 of all that follows, the number of parts and their sizes (uint64), and the parts."""
    body = struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)
    return BLOB_MAGIC + hashlib.sha256(body).digest() + body


def _split_blob(blob: bytes, ranks: int) -> list[bytes]:
    start = len(BLOB_MAGIC) + 32
    body = blob[start:]
    if not blob.startswith(BLOB_MAGIC) or hashlib.sha256(body).digest() != blob[len(BLOB_MAGIC) : start]:
        raise ValueError("not a whole blob of a session with several ranks: save it again")
    count, parts = struct.unpack_from("<Q", body)[0], []
    if count != ranks:
        raise ValueError(f"the blob is that of {count} ranks, this session has {ranks}: save it in one of as many")
    at = 8 * (1 + count)
    for size in struct.unpack_from(f"<{count}Q", body, 8):
        parts.append(body[at : at + size])
        at += size
    return parts


def _follow(place: Place, pipe: Connection, plan: _Plan) -> None:
    """Another rank: the same engine, divided, and a session that makes rank 0's calls."""
    engine = replace(Engine.load(plan.directory), manifest=plan.manifest, **plan.products)
    engine = rank_engine(engine, place.rank, place.ranks)
    pipe.send(True)
    join_group(place)
    session = Session(engine, plan.slots, place.torch_device, plan.prefill_chunk, plan.graphs)
    pipe.send(True)
    begun: dict[int, Any] = {}
    results: deque[StepResult] = deque(maxlen=1)
    outcome = ""
    while True:
        name, arguments, expected = pipe.recv()
        if outcome != expected:
            raise RuntimeError(f"the call before {name!r} ended with {outcome or 'no error'}, on rank 0 otherwise")
        outcome = ""
        try:
            _make_call(session, pipe, begun, results, name, arguments)
        except EXPECTED as error:
            outcome = type(error).__name__


def _make_call(
    session: Session, pipe: Connection, begun: dict[int, Any], results: deque[StepResult], name: str, arguments: tuple
) -> None:
    """begun: calls that others end, by their number. results: the last one, whose logits may be wanted."""
    if name in ("start_step", "decode_ahead"):
        number, *rest = arguments
        begun[number] = getattr(session, name)(*rest)
    elif name == "finish":
        results.append(begun.pop(arguments[0])())
    elif name == "step":
        results.append(session.step(*arguments))
    elif name == "logits":
        _ = results[0].logits
    elif name == "next":
        next(begun[arguments[0]], None)
    elif name == "stop":
        begun.pop(arguments[0]).close()
    elif name == "draft_step":
        rows, shape, dtype = arguments
        hidden = torch.empty(shape, dtype=torch_dtype(dtype), device=session.device)
        dist.broadcast(hidden, 0)
        parts = hidden.split([len(row.tokens) for row in rows])
        session.draft_step([replace(row, hidden_states=part) for row, part in zip(rows, parts, strict=True)])
    elif name == "save":
        pipe.send(session.save(*arguments))
    else:
        getattr(session, name)(*arguments)
