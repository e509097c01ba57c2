"""From an engine to a loop that serves it: slots by memory, drafter, scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from replayssm.plugins import traffic
from replayssm.runtime.draft_engine import EngineDrafter
from replayssm.runtime.engine import Engine
from replayssm.runtime.engine_loop import EngineLoop
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import PREFILL_CHUNK, Session, checked_device
from replayssm.runtime.speculation import Drafter, MtpDrafter, NgramDrafter

DRAFTERS = ("none", "ngram", "mtp", "engine")


def make_drafter(name: str, session: Session, draft_engine: Engine | None = None) -> Drafter | None:
    """The drafter called `name`, one of DRAFTERS; "engine" goes with a draft engine."""
    if name not in DRAFTERS:
        raise ValueError(f"drafts must be one of {', '.join(DRAFTERS)}, got {name!r}")
    if (name == "engine") != (draft_engine is not None):
        raise ValueError("--draft engine and --draft-engine DIR go together")
    if name == "none":
        return None
    if draft_engine is not None:
        return EngineDrafter(draft_engine, session, session.device)
    return NgramDrafter() if name == "ngram" else MtpDrafter(session)


def slot_bytes(engine: Engine) -> tuple[int, int]:
    """(state of one sequence, the part of it that is attention cache for max_seq_len tokens), bytes."""
    settings = engine.manifest.replay
    states = (spec for network in engine.networks.values() for spec in network.states.values())
    size = traffic.slot_bytes((spec.geometry for spec in states), settings)
    return size.total(settings.max_seq_len), size.total(settings.max_seq_len) - size.recurrent


def with_max_seq_len(engine: Engine, max_seq_len: int | None) -> Engine:
    """The engine for sequences of at most `max_seq_len` tokens, which take less attention cache."""
    limit = engine.manifest.replay.max_seq_len
    if max_seq_len is None:
        return engine
    if not 2 <= max_seq_len <= limit:
        raise ValueError(f"max_seq_len must be between 2 and the engine's {limit}, got {max_seq_len}")
    settings = replace(engine.manifest.replay, max_seq_len=max_seq_len)
    limits = replace(engine.manifest.limits, max_seq_len=max_seq_len)
    return replace(engine, manifest=replace(engine.manifest, replay=settings, limits=limits))


def free_bytes(device: torch.device | str) -> int:
    """Memory of `device` that nothing uses."""
    device = checked_device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available: give the number of slots")


def usable_bytes(engine: Engine, device: torch.device | str, fraction: float) -> int:
    """Memory for state: this share of what is free on `device` beside the weights."""
    weights = sum(tensor.nbytes for tensor in engine.weights.values())
    return int(max(free_bytes(device) - weights, 0) * fraction)


def slots_that_fit(engine: Engine, memory_bytes: int, wanted: int | None) -> int:
    """Slots for a session: `wanted`, or as many as `memory_bytes` hold up to the engine's max_batch_size.

    Raises ValueError where not even one fits, or fewer than wanted.
    """
    limit = engine.manifest.limits.max_batch_size
    size, cache = slot_bytes(engine)
    fitting = memory_bytes // size
    if fitting < (wanted or 1):
        raise ValueError(
            f"{wanted or 1} sequences of {engine.manifest.replay.max_seq_len} tokens take "
            f"{(wanted or 1) * size / 1e9:.2f} GB of state ({cache / size:.0%} of it attention cache), "
            f"{memory_bytes / 1e9:.2f} GB may be used: lower --max-batch-size or --max-seq-len"
        )
    return min(limit, fitting) if wanted is None else wanted


def make_loop(
    engine: Engine,
    slots: int,
    options: SchedulerOptions | None = None,
    draft: str = "none",
    prefill_chunk: int = PREFILL_CHUNK,
    device: torch.device | str = "cpu",
    draft_engine: Engine | None = None,
) -> EngineLoop:
    """A loop, not started yet, over a new session that is warm."""
    session = Session(engine, slots, device, prefill_chunk)
    scheduler = Scheduler(session, make_drafter(draft, session, draft_engine), options)
    session.warm_up()
    return EngineLoop(scheduler)
