"""The replay of one model: what its layers share, from the first forward call to the last."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from replayssm.plugins import cuda_ops
from replayssm.plugins.contract import ErrorBit
from replayssm.plugins.geometry import UnsupportedGeometryError, window_config
from replayssm.plugins.launch import device_arch
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import torch_dtype

from .batch import Batch, state_pool
from .layer import MAX_SEQ_LEN, Layer
from .probe import check_operator
from .safety import check_manager
from .settings import RefusedError, Settings, say, say_refused
from .steps import Rows, Steps

RING_SHARE = 0.9
"""Largest share of the free memory that the rings may take."""

_ENTRY_ALIGNMENT = 4
"""Checkpoint positions of a layer start on 16 bytes, as the kernels want."""


class ReplayModel:
    """stopped: TensorRT-LLM's own operators serve everything, and the wrappers only pass calls on."""

    def __init__(self, layers: Sequence[Layer], settings: Settings) -> None:
        self.layers, self.settings = list(layers), settings
        self.stopped = False
        self.steps: Steps | None = None
        self._order = {id(layer): number for number, layer in enumerate(self.layers)}
        self._last = len(self.layers)
        self._batch: Batch | None = None
        self._rows: Rows | None = None
        self._captured = False
        self._stopping: str | None = None
        self._errors: _ErrorWatch | None = None
        self._tried: set[tuple] = set()

    # ---------------------------------------------------------------- one call of a mixer

    def enter(self, layer: Layer, attn_metadata: Any, mamba_metadata: Any) -> bool:
        """Before a mixer's forward. False if the call is none of ours."""
        manager = getattr(attn_metadata, "kv_cache_manager", None)
        if manager is None:
            return False  # some warm-ups
        # Layers run in order; pipeline ranks skip some of them. An earlier one, or the same again, begins a new call.
        number = self._order[id(layer)]
        if number <= self._last:
            self._begin_or_refuse(attn_metadata, mamba_metadata)
        self._last = number
        if self.stopped:
            return False
        if self._batch is None or not self._batch.is_of(attn_metadata):
            raise RuntimeError("ReplaySSM: the mixers of one forward call were given different batches")
        layer.enter(self._batch, self._rows)
        return True

    def check(self, layer: Layer) -> None:
        """Behind a mixer's forward: its decode rows must have come through our operator, or been handed on by it.

        A mixer that never calls it has lost nothing yet: the next forward call begins with handing everything back.
        """
        if self._rows is None or layer.handled:
            return
        reason = f"the mixer of layer {layer.index} decodes without the operator that this module knows"
        if layer.served or self._captured:
            raise RuntimeError(f"ReplaySSM: {reason}, on states that are behind; restart with TRTLLM_REPLAYSSM=0")
        layer.pool_advanced()
        self._stopping = reason

    # ---------------------------------------------------------------- one forward call of the model

    def _begin_or_refuse(self, attn_metadata: Any, mamba_metadata: Any) -> None:
        """Until replay has begun, whatever goes wrong is a reason not to begin; afterwards it is an error."""
        try:
            self._begin(attn_metadata.kv_cache_manager, Batch.read(attn_metadata, mamba_metadata))
        except RefusedError as reason:
            self._refuse(reason)
        except Exception as error:
            if self.steps is not None:
                raise
            self._refuse(f"{type(error).__name__}: {error}")

    def _refuse(self, reason: object) -> None:
        self.stopped = True
        self._release()
        say_refused(reason)

    def _begin(self, manager: Any, batch: Batch) -> None:
        capturing = batch.slots.is_cuda and torch.cuda.is_current_stream_capturing()
        self._batch, self._rows = batch, None
        pools = self._pools(manager)
        changed = any(not own.lies_over(pool) for own, pool in pools.items())
        if self._stopping is not None:
            self._stop({} if changed else pools)
            return
        if changed or not pools:
            if capturing:
                raise RuntimeError("ReplaySSM: the state pool changed without a call outside of graph capture")
            self._set_up(manager, pools)
        for own, pool in pools.items():
            own.bind(pool)
        self._captured = self._captured or capturing
        if not capturing:
            self._errors.check()
        self._update_constants()
        self._take(batch)

    def _pools(self, manager: Any) -> dict[Layer, torch.Tensor]:
        """The layers that have a pool: all but those of other pipeline ranks."""
        pools = {}
        for layer in self.layers:
            with contextlib.suppress(KeyError, IndexError):
                pools[layer] = state_pool(manager, layer.index)
        return pools

    def _take(self, batch: Batch) -> None:
        """Note what the batch does to the slots, and make the pool current wherever TensorRT-LLM will read it."""
        if batch.contexts:
            slots = batch.slots[: batch.contexts]
            if batch.continues:
                self._write_back(slots.long(), self.steps.history_ends(batch))
            self.steps.forget(slots)
        if batch.decodes and batch.one_token:
            self._rows = self.steps.advance(batch)
        elif batch.decodes:
            index = batch.slots[batch.contexts :].long()
            self._write_back(index, self.steps.expected[index])

    def _update_constants(self) -> None:
        """A_log of all Mamba2 layers in two launches: weights may be updated in place at any time."""
        layers = [layer for layer in self.layers if layer.state is not None and layer.geometry().kind == "mamba2"]
        if layers:
            logs = torch._foreach_log(torch._foreach_neg([layer.mixer.A.detach().float() for layer in layers]))
            for layer, A_log in zip(layers, logs, strict=True):
                layer.A_log = A_log

    def _write_back(self, slots: torch.Tensor, ends: torch.Tensor) -> None:
        for layer in self.layers:
            layer.write_back(slots, ends)

    # ---------------------------------------------------------------- beginning and end

    @torch.inference_mode(False)
    def _set_up(self, manager: Any, pools: dict[Layer, torch.Tensor]) -> None:
        """Lay replay over the pools of `manager`; all slots start with a current pool."""
        check_manager(manager, self.settings)
        self._release()
        self._captured = False  # graphs on an earlier pool are of no use to anybody
        if not pools:
            raise RefusedError("the state manager has no pool for any layer of this rank")
        first, pool = next(iter(pools.items()))
        replay = self._replay_settings(first, pool)
        self._require_kernels(pools, replay, pool.device)
        for layer, own in pools.items():
            layer.activation_dtype = torch_dtype(replay.activation_dtype)
            trial = (layer.geometry(), replay)
            if trial not in self._tried:
                self._update_constants_of(layer)
                check_operator(layer, own, replay)
                self._tried.add(trial)
        self._allocate(pools, replay, pool.device)

    def _replay_settings(self, layer: Layer, pool: torch.Tensor) -> ReplaySettings:
        activations = getattr(getattr(layer.mixer, "conv1d", None), "weight", None)
        dtype = torch.bfloat16 if activations is None else activations.dtype
        names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
        if pool.dtype not in names or dtype not in names:
            raise RefusedError(f"states of {pool.dtype} with activations of {dtype} are not supported")
        return ReplaySettings(
            self.settings.buffer_len, 1, MAX_SEQ_LEN, state_dtype=names[pool.dtype], activation_dtype=names[dtype]
        )

    def _require_kernels(self, pools: dict[Layer, torch.Tensor], replay: ReplaySettings, device: torch.device) -> None:
        if device.type != "cuda":
            return
        cuda_ops.register()
        try:
            for layer in pools:
                window_config(layer.geometry(), replay, device_arch(device))
        except UnsupportedGeometryError as error:
            raise RefusedError(f"no kernel for this model on this GPU: {error}") from error

    def _update_constants_of(self, layer: Layer) -> None:
        if layer.geometry().kind == "mamba2":
            layer.A_log = torch.log(-layer.mixer.A.detach().float())

    def _allocate(self, pools: dict[Layer, torch.Tensor], replay: ReplaySettings, device: torch.device) -> None:
        slots = {own.shape[0] for own in pools.values()}
        if len(slots) != 1:
            raise RefusedError(f"layers have pools of {sorted(slots)} slots, expected one size")
        (count,) = slots
        widths = [layer.geometry().state_shape[0] * layer.geometry().row_tiles for layer in pools]
        padded = [-(-width // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT for width in widths]
        needed = count * sum(part.nbytes for layer in pools for part in layer.geometry().ring_parts(replay))
        self._require_memory(needed, count, device)
        steps = Steps(count, sum(padded), device)
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        start = 0
        for (layer, own), width, step in zip(pools.items(), widths, padded, strict=True):
            layer.attach(own, replay, steps.positions[:, start : start + width], flag)
            start += step
        # Replay has begun once there are steps: an allocation that failed above is a reason not to begin.
        self._errors, self.steps = _ErrorWatch(flag), steps
        total = sum(layer.ring_bytes for layer in pools) + self.steps.nbytes
        say(
            f"active for {len(pools)} recurrent layers: the state ({replay.state_dtype}) is rewritten every "
            f"{replay.buffer_len} tokens; rings of {count} slots take {total / 2**20:,.1f} MiB"
        )

    def _require_memory(self, needed: int, slots: int, device: torch.device) -> None:
        if device.type != "cuda":
            return
        # What torch keeps for itself counts: the rings of an earlier pool are in there.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        if needed > RING_SHARE * free:
            raise RefusedError(
                f"the rings of {slots} slots need {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free; lower "
                "kv_cache_config.free_gpu_memory_fraction or max_batch_size"
            )

    def _stop(self, pools: dict[Layer, torch.Tensor]) -> None:
        """Hand everything back: the pools become current, and TensorRT-LLM's operators go on from there."""
        assert self.steps is not None
        for layer, pool in pools.items():
            layer.bind(pool)
        self._update_constants()
        if pools:  # else they are new ones, which hold no history
            every = torch.arange(self.steps.expected.shape[0], device=self.steps.expected.device)
            self._write_back(every, self.steps.expected)
        self.stopped = True
        self._release()
        say(f"stopped, TensorRT-LLM's operators go on: {self._stopping}", warning=True)

    def _release(self) -> None:
        for layer in self.layers:
            layer.state = None
        self.steps = None


class _ErrorWatch:
    """Raises when an operator met a row that it could not compute; without making the host wait for the device."""

    EVERY = 32
    """Calls between two looks at the flag."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag, self._calls = flag, 0
        self._copy = torch.zeros_like(flag, device="cpu", pin_memory=flag.is_cuda)
        self._event = torch.cuda.Event() if flag.is_cuda else None
        self._pending = False

    def check(self) -> None:
        if self._pending and (self._event is None or self._event.query()):
            self._pending = False
            if bits := int(self._copy):
                raise RuntimeError(
                    f"ReplaySSM: {ErrorBit.describe(bits)}; outputs since the last check are wrong. Restart with "
                    "TRTLLM_REPLAYSSM=0 and report this"
                )
        self._calls += 1
        if not self._pending and self._calls % self.EVERY == 0:
            self._copy.copy_(self._flag, non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._pending = True
