"""What a session checks of its arguments, and how it says that an engine cannot be run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import InferenceError


def checked_device(device: torch.device | str) -> torch.device:
    """`device`; ValueError if it is a GPU that torch cannot use."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device (`replayssm doctor` says why): use device cpu")
    return device


def check_token_ids(tokens: Iterable[int], vocab_size: int) -> None:
    """ValueError for the first token id outside the vocabulary."""
    tokens = tokens if isinstance(tokens, list) else list(tokens)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")


def unfit(error: Exception, engine: Engine, slots: int, device: torch.device) -> Exception:
    """What to raise for an error that a checked engine of this version cannot cause, or else `error` itself."""
    if device.type != "cpu" or isinstance(error, InferenceError):
        return error
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return ValueError(f"the memory does not hold the weights and the state of {slots} sequences ({error})")
    return EngineDirectoryError(
        f"the networks of {engine.directory} do not fit this version ({type(error).__name__}: {error}): "
        "rebuild the engine"
    )
