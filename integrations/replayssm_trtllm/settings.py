"""What environment variables set, and the one place that talks to the user.

TensorRT-LLM starts its workers with only those variables of the environment whose names begin with TRTLLM or TLLM, so
ours do too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from replayssm.plugins.geometry import MAX_HISTORY

SWITCH = "TRTLLM_REPLAYSSM"
BUFFER_LEN = "TRTLLM_REPLAYSSM_BUFFER_LEN"
TRUST = "TRTLLM_REPLAYSSM_TRUST"
TRUSTED = ("version", "arguments", "manager")


class RefusedError(Exception):
    """Replay would not be safe or not be the same here. The message says why and what would change that."""


@dataclass(frozen=True)
class Settings:
    """enabled: TRTLLM_REPLAYSSM, "1" unless set to "0".
    buffer_len: TRTLLM_REPLAYSSM_BUFFER_LEN, tokens between two rewrites of the state, 16 unless set.
    trust: TRTLLM_REPLAYSSM_TRUST, which checks the user vouches for: any of "version", "arguments", "manager".
    """

    enabled: bool = True
    buffer_len: int = 16
    trust: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """From `os.environ` or `environment`. Raises RefusedError for a value that means nothing."""
        environment = os.environ if environment is None else environment
        switch = environment.get(SWITCH, "1").strip()
        if switch not in ("0", "1"):
            raise RefusedError(f"{SWITCH} must be 0 or 1, got {switch!r}")
        text = environment.get(BUFFER_LEN, "16").strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_HISTORY):
            raise RefusedError(f"{BUFFER_LEN} must be an integer between 1 and {MAX_HISTORY}, got {text!r}")
        trust = frozenset(filter(None, (word.strip() for word in environment.get(TRUST, "").split(","))))
        if unknown := trust - set(TRUSTED):
            raise RefusedError(
                f"{TRUST} must be a comma-separated choice of {', '.join(TRUSTED)}, got {', '.join(sorted(unknown))}"
            )
        return cls(switch == "1", int(text), trust)


def logger():
    """TensorRT-LLM's logger, so that lines appear where its own do; Python's where there is none."""
    try:
        from tensorrt_llm.logger import logger as found
    except ImportError:
        return logging.getLogger("replayssm_trtllm")
    return found


_SAID: set[str] = set()


def say(text: str, warning: bool = False) -> None:
    """Log a line once per process."""
    line = f"[ReplaySSM] {text}"
    if line not in _SAID:
        _SAID.add(line)
        log = logger()
        (log.warning if warning else log.info)(line)


def say_refused(reason: object) -> None:
    """Say that TensorRT-LLM is left as it is, and why."""
    say(f"not active, TensorRT-LLM is unchanged: {reason}", warning=True)
