"""Processes of a tensor-parallel group: this one is rank 0, and the others follow its calls.

Calls travel through pipes, one per rank, so that nothing waits in a collective while there is no work. Tensors meet in
torch.distributed's default group: NCCL between GPUs, gloo between CPUs. A rank that dies is noticed by a thread here: a
call in progress then ends with `RankLostError`, or the process does where the device cannot be got out of it. Ranks
whose rank 0 dies end themselves.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from replayssm.runtime.errors import InferenceError, RankLostError

START_S = 600.0
"""Time for a rank to load its part of the engine."""

COLLECTIVE_S = 300.0
"""Time for ranks to meet in a collective that is not captured."""

CALL_S = 1800.0
"""Time for a call, graphs captured in it included. A rank that hangs in a captured collective shows by this alone."""

GRACE_S = 10.0
"""Time for a call to end by itself after a rank is lost."""

NOTICE_S = 3.0
"""Time from a pipe or collective that breaks to the end of the process at its other side."""

EXPECTED = (ValueError, InferenceError)
"""What a call raises on every rank alike: nothing has happened then, or the same everywhere."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs. store: a file in a folder of the group's own, through which ranks find each other."""

    rank: int
    ranks: int
    device: str
    store: str
    threads: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device(self.device)

    @property
    def error_file(self) -> Path:
        return Path(f"{self.store}.{self.rank}")


def join_group(place: Place) -> None:
    """Make torch.distributed's default group; waits for the other ranks."""
    device = place.torch_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # The host's name need not have an address, and all ranks are here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{place.store}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
    )


Follow = Callable[[Place, Connection, Any], None]
"""What another rank does: sends True when it is ready to join, joins, and follows until its pipe is closed."""


class Peers:
    """The other ranks, started and watched."""

    def __init__(self, ranks: int, device: torch.device, follow: Follow, plan: Any) -> None:
        """plan: for `follow`, picklable. Raises RankLostError if a rank does not come up."""
        if device.type == "cuda" and torch.cuda.device_count() < ranks:
            raise ValueError(
                f"{ranks} ranks need {ranks} GPUs, torch sees {torch.cuda.device_count()}: lower --tensor-parallel-size"
            )
        if dist.is_initialized():
            raise ValueError("this process already has a torch.distributed group: it can hold one session of ranks")
        self._folder = Path(tempfile.mkdtemp(prefix="replayssm-ranks-"))
        store, threads = str(self._folder / "store"), torch.get_num_threads()
        self.places = [Place(rank, ranks, device.type, store, threads) for rank in range(ranks)]
        self.failure: str | None = None
        self._lost = threading.Event()
        self._closing = False
        self._busy_since: float | None = None
        self._idle = threading.Event()
        self._idle.set()
        # A fresh interpreter: CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for place in self.places[1:]:
            here, there = context.Pipe()
            name = f"replayssm-rank-{place.rank}"
            process = context.Process(target=_run, args=(follow, place, there, plan), name=name, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._watcher = threading.Thread(target=self._watch, name="replayssm-ranks", daemon=True)
        self._watcher.start()
        try:
            self.receive(START_S)
            join_group(self.places[0])
        except BaseException:
            self.close()
            raise

    @property
    def are_there(self) -> bool:
        """Neither lost nor closed."""
        return self.failure is None and not self._closing

    def send(self, *messages: Any) -> None:
        """One message for all ranks, or one for each. Raises RankLostError if one is gone."""
        self._raise_failure()
        try:
            for pipe, message in zip(self._pipes, messages * (len(self._pipes) // len(messages)), strict=True):
                pipe.send(message)
        except OSError:
            self._lost.wait(NOTICE_S)
            self._raise_failure()
            raise

    def receive(self, timeout_s: float = CALL_S) -> list[Any]:
        """One message of every rank."""
        values = []
        for place, pipe in zip(self.places[1:], self._pipes, strict=True):
            if not pipe.poll(timeout_s):
                self._lose(f"rank {place.rank} did not answer within {timeout_s:.0f} s")
                self._raise_failure()
            try:
                values.append(pipe.recv())
            except (EOFError, OSError):
                self._lost.wait(NOTICE_S)
                self._raise_failure()
                raise
        return values

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that all ranks make: errors of a lost rank become RankLostError, errors here lose the group."""
        self._idle.clear()
        self._busy_since = time.monotonic()
        try:
            yield
            if self.failure is not None:
                self._raise_failure()
        except EXPECTED:
            raise
        except BaseException as error:
            # A rank's end shows in collectives a moment before the process has ended.
            if isinstance(error, RuntimeError):
                self._lost.wait(NOTICE_S)
            if self.failure is None:
                self._lose(f"rank 0 failed in a call ({type(error).__name__}: {error})")
                raise
            raise RankLostError(self.failure) from error
        finally:
            self._busy_since = None
            self._idle.set()

    def close(self) -> None:
        """End the other ranks and leave the group. Graphs that hold collectives must be gone."""
        if self._closing:
            return
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join(GRACE_S)
        self._watcher.join(GRACE_S)
        if dist.is_initialized():
            self._leave()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        """Leave the group, in order where that ends: a thread left in it would abort the interpreter's end."""
        for leave in (dist.destroy_process_group, _abort) if self.failure is None else (_abort,):
            leaving = threading.Thread(target=leave, daemon=True)
            leaving.start()
            leaving.join(GRACE_S / 2)
            if not leaving.is_alive():
                return

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankLostError(self.failure)
        if self._closing:
            raise RankLostError("the ranks were closed")

    def _watch(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while not self._closing and self.failure is None:
            if wait(sentinels, timeout=1.0):
                self._note_death()
            elif self._busy_since is not None and time.monotonic() - self._busy_since > CALL_S:
                self._lose(f"a call took more than {CALL_S:.0f} s: a rank hangs")
        if self.failure is not None and not self._closing:
            self._free_caller()

    def _note_death(self) -> None:
        for place, process in zip(self.places[1:], self._processes, strict=True):
            if not process.is_alive() and not self._closing:
                try:
                    said = place.error_file.read_text(encoding="utf-8")
                except OSError:
                    said = "without a word: killed, or out of memory"
                self._lose(f"rank {place.rank} of {place.ranks} ended (exit code {process.exitcode}), {said}")

    def _lose(self, failure: str) -> None:
        """The group is of no use any more: no rank waits for another."""
        if self.failure is None:
            self.failure = failure
        self._lost.set()
        for process in self._processes:
            if process.is_alive():
                process.kill()

    def _free_caller(self) -> None:
        """Get a call out of a collective that will never end. gloo notices by itself."""
        if dist.is_initialized() and dist.get_backend() == "nccl" and not self._idle.is_set():
            threading.Thread(target=_abort, daemon=True).start()
        if not self._idle.wait(GRACE_S):
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)


def _abort() -> None:
    """Leave the group without waiting for what is on the device."""
    if dist.get_backend() == "nccl":
        # Without a public name in torch 2.11 to 2.13.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _run(follow: Follow, place: Place, pipe: Connection, plan: Any) -> None:
    """The process of another rank."""
    # Ctrl-C goes to all processes of a terminal, and rank 0 ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(place.threads)
    code = 0
    try:
        follow(place, pipe, plan)
    except EOFError:
        pass
    except BaseException as error:
        code = 1
        place.error_file.write_text(f"{type(error).__name__}: {' '.join(str(error).split())}", encoding="utf-8")
    # Not through exit handlers: a communicator would wait for ranks that are not there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """End this process a moment after the one that started it; for a thread of its own."""
    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    # Rank 0 closes the pipe when it ends in order, and the rank then leaves by itself.
    time.sleep(GRACE_S / 2)
    os._exit(1)
