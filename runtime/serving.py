"""From an engine to a loop that serves it: slots by memory, drafter, scheduler."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path

import torch

from replayssm.plugins import traffic
from replayssm.runtime.calibration import measure_draft_costs
from replayssm.runtime.draft_engine import EngineDrafter
from replayssm.runtime.drafting import checked_draft_len
from replayssm.runtime.engine import Engine
from replayssm.runtime.engine_loop import EngineLoop
from replayssm.runtime.parallel_session import open_session
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import PREFILL_CHUNK, Session, checked_device
from replayssm.runtime.speculation import Drafter, MtpDrafter, NgramDrafter

logger = logging.getLogger("replayssm.server")
DRAFTERS = ("none", "ngram", "mtp", "engine")
TRADE_LENGTHS = 4


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


def check_draft_options(draft: str, draft_len: int | None, adaptive: bool, sampling: bool) -> None:
    """ValueError for options of drafts where there are none."""
    given = {"--draft-len": draft_len is not None, "--adaptive-drafts": adaptive, "--draft-sampling": sampling}
    if draft == "none" and any(given.values()):
        name = next(name for name, value in given.items() if value)
        raise ValueError(
            f"{name} means nothing without drafts: choose --draft {', '.join(DRAFTERS[1:])}, or leave it out"
        )


def slot_bytes(engine: Engine, draft_engine: Engine | None = None) -> tuple[int, int]:
    """(state of one sequence, the part of it that is attention cache for max_seq_len tokens), bytes.

    A draft engine holds a sequence of its own beside each.
    """
    total = cache = 0
    for each in (engine, draft_engine):
        if each is not None:
            settings = each.manifest.replay
            states = [spec for network in each.networks.values() for spec in network.states.values()]
            size = traffic.slot_bytes((spec.geometry for spec in states), settings, (spec.number for spec in states))
            total += size.total(settings.max_seq_len)
            cache += size.total(settings.max_seq_len) - size.recurrent
    return total, cache


def with_max_seq_len(engine: Engine, max_seq_len: int | None) -> Engine:
    """The engine for sequences of at most `max_seq_len` tokens, which take less attention cache."""
    limit = engine.manifest.replay.max_seq_len
    if max_seq_len is None:
        return engine
    if not 2 <= max_seq_len <= limit:
        raise ValueError(f"max_seq_len must be between 2 and the engine's {limit}, got {max_seq_len}")
    if engine.has_plans and max_seq_len != limit:
        raise ValueError(
            f"plans are compiled for their max_seq_len of {limit}: leave out --max-seq-len, or build the engine with it"
        )
    settings = replace(engine.manifest.replay, max_seq_len=max_seq_len)
    limits = replace(engine.manifest.limits, max_seq_len=max_seq_len)
    manifest = replace(engine.manifest, replay=settings, limits=limits)
    return replace(engine, manifest=manifest, built_max_seq_len=engine.built_max_seq_len or limit)


def free_bytes(device: torch.device | str) -> int:
    """Memory of `device` that nothing uses."""
    device = checked_device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available: give the number of slots")


def usable_bytes(
    engine: Engine, device: torch.device | str, fraction: float, draft_engine: Engine | None = None
) -> int:
    """Memory for state, of one rank: this share of what is free on `device` beside the weights."""
    engines = [engine] if draft_engine is None else [engine, draft_engine]
    weights = sum(each.weight_bytes for each in engines)
    sharing = engine.ranks if torch.device(device).type == "cpu" else 1
    return int(max(free_bytes(device) // sharing - weights, 0) * fraction)


def slots_that_fit(engine: Engine, memory_bytes: int, wanted: int | None, draft_engine: Engine | None = None) -> int:
    """Slots for a session: `wanted`, or as many as `memory_bytes` hold up to the engines' max_batch_size.

    A slot is admitted with its state and the attention cache of max_seq_len tokens, so that no request that has a slot
    ever runs out of memory. Raises ValueError where not even one fits, or fewer than wanted. Plans hold the state of
    all their slots.
    """
    limit = min(each.manifest.limits.max_batch_size for each in (engine, draft_engine) if each is not None)
    size, cache = slot_bytes(engine, draft_engine)
    fitting = memory_bytes // size
    if engine.has_plans and fitting < limit:
        raise ValueError(
            f"the plans hold the state of {limit} sequences, {limit * size / 1e9:.2f} GB, and "
            f"{memory_bytes / 1e9:.2f} GB may be used: build them with a smaller --max-batch-size or --max-seq-len"
        )
    if fitting < (wanted or 1):
        length, count = engine.manifest.replay.max_seq_len, wanted or 1
        shorter = int((memory_bytes / count - (size - cache)) * length / cache) if cache else 0
        ways = [f"lower --max-batch-size to {fitting}"] if 1 <= fitting < count else []
        ways += [f"lower --max-seq-len to {shorter}"] if shorter >= 2 else []
        raise ValueError(
            f"state for {count} x {length} tokens takes {count * size / 1e9:.2f} GB "
            f"({cache / size:.0%} of it attention cache), {memory_bytes / 1e9:.2f} GB may be used: "
            + " or ".join([*ways, "free memory"])
        )
    return min(limit, fitting) if wanted is None else wanted


def describe_memory(engine: Engine, memory_bytes: int, slots: int, draft_engine: Engine | None = None) -> list[str]:
    """Lines that say what a slot takes, and how many sequences the memory would hold at shorter max_seq_len.

    The attention cache is linear: a slot holds it for max_seq_len tokens whether a request uses them or not. That is
    the trade these lines show.
    """
    size, cache = slot_bytes(engine, draft_engine)
    length, limit = engine.manifest.replay.max_seq_len, engine.manifest.limits.max_batch_size
    lines = [
        f"{slots} slot{'s' if slots > 1 else ''} of {size / 1e6:.1f} MB: {(size - cache) / 1e6:.1f} MB of state and "
        f"rings, {cache / 1e6:.1f} MB of attention cache for {length} tokens; "
        f"{slots * size / 1e9:.2f} of {memory_bytes / 1e9:.2f} GB"
    ]
    lengths = [length // 2**step for step in range(TRADE_LENGTHS) if length // 2**step >= 2]
    counts = [f"{memory_bytes // (size - cache + cache * each // length)} of {each}" for each in lengths]
    if cache:
        lines.append(
            f"{memory_bytes / 1e9:.2f} GB would hold this many sequences of so many tokens (--max-seq-len): "
            f"{', '.join(counts)}; the engine's max_batch_size is {limit}, which "
            "`replayssm build --max-batch-size N` raises"
        )
    return lines


def with_draft_costs(session: Session, drafter: Drafter | None, options: SchedulerOptions) -> SchedulerOptions:
    """Options with what drafts cost on this session's device, measured now; as they are without a drafter."""
    if drafter is None:
        return options
    logger.info("timing steps with and without drafts, at several batch sizes, before the server is ready")
    costs = measure_draft_costs(session, drafter, checked_draft_len(session, drafter, options.draft_len))
    for batch, chance in costs.crossovers().items():
        logger.info(
            "drafts for %d rows: a step with 0, 1, ... costs %s; the first pays where it stands with chance above %.2f",
            *(batch, ", ".join(f"{value:.2f}" for value in costs.relative(batch)), chance),
        )
    return replace(options, draft_costs=costs)


def settle_heap() -> None:
    """Let the garbage collector skip everything that is alive now: weights, modules and graphs outlive all requests.

    For a process that has loaded all it serves. Walking it again and again took a third of the host's time of a step.
    """
    gc.collect()
    gc.freeze()


def make_loop(
    engine: Engine,
    slots: int,
    options: SchedulerOptions | None = None,
    draft: str = "none",
    prefill_chunk: int = PREFILL_CHUNK,
    device: torch.device | str = "cpu",
    draft_engine: Engine | None = None,
    adaptive_drafts: bool = False,
    graphs: bool | None = None,
) -> EngineLoop:
    """A loop, not started yet, over a new session that is warm.

    adaptive_drafts: measure drafts and choose lengths. graphs: as `Session` takes it.
    """
    session = open_session(engine, slots, device, prefill_chunk, graphs)
    drafter, options = make_drafter(draft, session, draft_engine), options or SchedulerOptions()
    scheduler = Scheduler(session, drafter, options)
    session.warm_up()
    if adaptive_drafts:
        scheduler = Scheduler(session, drafter, with_draft_costs(session, drafter, options))
    return EngineLoop(scheduler)
