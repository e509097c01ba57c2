"""What a scheduler is told and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.runtime.draft_length import DraftCosts


class QueueFullError(RuntimeError):
    """The queue is full; retry_after_s says when a place is likely."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting already: try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests share the session.

    max_num_tokens: tokens of one step. None takes 8192, or what a chunk beside decoding rows needs if that is more.
    max_queue: requests that may wait for their first slot; None does not limit them.
    time_slice: steps after which a request gives its slot to a waiting one and waits itself, in host memory; None lets
        every request finish.
    swap_bytes: host memory for requests that gave their slots away.
    prefix_cache_bytes: host memory for snapshots of prompts' beginnings; 0 keeps none.
    draft_len: drafts per call; None takes the engine's max_draft_len.
    draft_costs: choose fewer drafts where they fall, by these measured costs; None always drafts draft_len.
    draft_sampling: requests with a temperature get drafts that a draft model drew, verified by rejection sampling. More
        of them stand, but the output no longer equals that without drafts token for token: only in distribution.
    """

    max_num_tokens: int | None = None
    max_queue: int | None = None
    time_slice: int | None = None
    swap_bytes: int = 1 << 30
    prefix_cache_bytes: int = 0
    draft_len: int | None = None
    draft_costs: DraftCosts | None = None
    draft_sampling: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_num_tokens", 1), ("max_queue", 1), ("time_slice", 1), ("swap_bytes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.prefix_cache_bytes < 0:
            raise ValueError(f"prefix_cache_bytes must be at least 0, got {self.prefix_cache_bytes}")


@dataclass
class SchedulerStats:
    """Counts since the start; tokens count what was computed, drafts what was proposed and what stood."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
