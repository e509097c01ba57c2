"""One recurrent mixer: its state over TensorRT-LLM's pool, and the decode operator that takes the place of its own."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from replayssm.plugins.contract import RecurrentGeometry, state_parts
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, torch_dtype

from .batch import Batch
from .settings import RefusedError, say
from .steps import Rows
from .write_back import write_back

MAX_SEQ_LEN = 2**30
"""Positions are only compared here; TensorRT-LLM enforces the model's real limit."""

_running = threading.local()


def running_layer() -> Layer | None:
    """The layer whose mixer is computing in this thread; None outside of one."""
    return getattr(_running, "layer", None)


class GlobalDispatch:
    """Stands in a module's namespace for an operator that mixers call by its global name."""

    def __init__(self, name: str, original: Callable) -> None:
        self.__name__, self.original = name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = running_layer()
        return self.original(*args, **kwargs) if layer is None else layer.decode(*args, **kwargs)


def replace_global(function: Callable, name: str) -> Callable:
    """Put a GlobalDispatch in the namespace of the module that defines `function`; the operator that was there.

    Raises RefusedError if nothing of that name is there.
    """
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    found = namespace.get(name)
    if not callable(found):
        raise RefusedError(f"{getattr(function, '__module__', '?')} has no decode operator {name!r}")
    if not isinstance(found, GlobalDispatch):
        namespace[name] = found = GlobalDispatch(name, found)
    return found.original


class Layer(ABC):
    """A mixer and its replay. Subclasses know how the mixer spells things.

    index: the mixer's layer number. original: TensorRT-LLM's one-token decode operator.
    handled, replayed: whether the decode rows of the present call came to `decode`, and were computed by replay.
    served: whether any were since the state was attached, so that the pool may be behind.
    """

    def __init__(self, mixer: Any, index: int) -> None:
        self.mixer, self.index = mixer, index
        self.state: LayerState | None = None
        self.batch: Batch | None = None
        self.rows: Rows | None = None
        self.handled = self.replayed = self.served = False

    # ---------------------------------------------------------------- what a subclass provides

    original: Callable
    activation_dtype: torch.dtype

    @abstractmethod
    def replace(self) -> None:
        """Put `decode` where the mixer looks for its operator, if that is not a global name."""

    @abstractmethod
    def geometry(self) -> RecurrentGeometry:
        """Sizes of this rank's part of the mixer."""

    @abstractmethod
    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Called in the place of `original`, with its arguments."""

    @abstractmethod
    def sample(self, tokens: int, pool: torch.Tensor, generator: torch.Generator) -> list[tuple[tuple, dict]]:
        """(args, kwargs) of `tokens` calls of `original` on row 0's slot 1 of a small `pool`, with random inputs."""

    def constants(self) -> torch.Tensor | None:
        """A_log [heads] where a write-back needs it."""
        return None

    # ---------------------------------------------------------------- state

    def attach(
        self, pool: torch.Tensor, settings: ReplaySettings, positions: torch.Tensor, error_flag: torch.Tensor
    ) -> None:
        """Lay the replay state over `pool` [slots, heads, rows, columns] and allocate the rings.

        positions: int32 [slots, heads * tiles], this layer's part of the shared tensor. Raises RefusedError for a pool
        that the operators cannot address.
        """
        geometry = self.geometry()
        heads, rows, columns = geometry.state_shape
        if tuple(pool.shape[1:]) != (heads, rows, columns):
            raise RefusedError(
                f"layer {self.index}: the state pool is {list(pool.shape)}, "
                f"expected [slots, {heads}, {rows}, {columns}]"
            )
        dense = pool[0].is_contiguous() and pool.data_ptr() % 16 == 0
        step = pool.stride(0)
        if not dense or step * pool.element_size() % 16 or step >= 2**31:
            raise RefusedError(
                f"layer {self.index}: states of a slot must be dense and slots a multiple of 16 bytes apart, got "
                f"strides {pool.stride()}"
            )
        tensors = {"checkpoint": pool, "checkpoint_position": positions.view(-1, heads, geometry.row_tiles)}
        for part in geometry.ring_parts(settings):
            shape = (pool.shape[0], *part.shape)
            tensors[part.name] = torch.zeros(shape, dtype=torch_dtype(part.dtype), device=pool.device)
        assert list(tensors) == [part.name for part in state_parts(geometry, settings)]
        self.state = LayerState(geometry, settings, tensors, error_flag)
        self._pool_key, self.served = memory_key(pool), False

    def lies_over(self, pool: torch.Tensor) -> bool:
        """Whether the state was attached to the memory of `pool`."""
        return self.state is not None and self._pool_key == memory_key(pool)

    def bind(self, pool: torch.Tensor) -> None:
        """Hold the pool for the time of a call. TensorRT-LLM frees pools, so nobody else may keep them alive."""
        assert self.state is not None
        self.state.tensors["checkpoint"] = pool

    def unbind(self) -> None:
        if self.state is not None:
            self.state.tensors["checkpoint"] = None

    @property
    def ring_bytes(self) -> int:
        assert self.state is not None
        rings = (tensor for name, tensor in self.state.tensors.items() if name.startswith("ring"))
        return sum(tensor.numel() * tensor.element_size() for tensor in rings)

    # ---------------------------------------------------------------- one call of the mixer

    def enter(self, batch: Batch, rows: Rows | None) -> None:
        self.batch, self.rows = batch, rows
        self.handled = self.replayed = False
        _running.layer = self

    def leave(self) -> None:
        self.batch = self.rows = _running.layer = None
        self.unbind()

    def serves(self, pool: torch.Tensor, slots: torch.Tensor | None, tokens: int) -> bool:
        """Whether a call of the decode operator is the one-token step of this batch on this layer's pool."""
        batch, rows = self.batch, self.rows
        if batch is None or rows is None or self.state is None or slots is None or not batch.one_token:
            return False
        own = batch.slots[batch.contexts :]
        return tokens == batch.decodes and same_memory(pool, self.state["checkpoint"]) and same_memory(slots, own)

    def operands(self) -> tuple[LayerState, Rows]:
        """State and rows of the step that is being computed by replay; notes that it is."""
        assert self.state is not None
        assert self.rows is not None
        self.handled = self.replayed = self.served = True
        return self.state, self.rows

    def call_original(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Let TensorRT-LLM's code compute the decode rows: the pool is made current before, and taken so behind."""
        self.handled = True
        if self.rows is None or self.state is None:
            return function(*args, **kwargs)
        say(f"layer {self.index}: a call that this module does not know goes to TensorRT-LLM's operator", warning=True)
        self.write_back(self.rows.slots, self.rows.seq_lens)
        result = function(*args, **kwargs)
        self.pool_advanced()
        return result

    def write_back(self, slots: torch.Tensor, ends: torch.Tensor) -> None:
        """Make the pool current for int64 `slots` [n] up to int32 `ends` [n]; nothing for a layer without state."""
        if self.state is not None:
            write_back(self.state, slots, ends, self.constants())

    def pool_advanced(self) -> None:
        """TensorRT-LLM's code has computed the decode rows on a current pool: checkpoints are behind their token."""
        if self.rows is not None and self.state is not None:
            positions, end = self.state["checkpoint_position"], self.rows.seq_lens + 1
            positions[self.rows.slots] = end[:, None, None].expand(-1, *positions.shape[1:])


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return memory_key(first) == memory_key(second)


def memory_key(tensor: torch.Tensor) -> tuple:
    """Equal for two tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
