"""Replay kernels of other projects for Mamba2, where they can be imported, at several launch configurations.

Each works on a layer's checkpoints with rings of its own. The host keeps these kernels' cursors: the number of tokens
in every slot's ring, which begins at entry 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from peers import per_head, version_of, windows_of

Launch = Callable[[], torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], Launch]
"""(slots [batch], tokens in every slot's ring [slots], both int32) -> launch of that step, which returns y."""


class ReplayPeer:
    """One kernel and its rings; the subclasses know how it is called."""

    flushing_history: int
    """Tokens in a ring before the decode step that folds it."""

    def __init__(self, layer, entries: int) -> None:
        """entries: tokens that a ring holds."""
        self.layer = layer
        (H, P, N), slots, x = layer.geometry.state_shape, layer.state.slots, layer.inputs[0]
        self.x = torch.zeros(slots, H, entries, P, device=x.device, dtype=x.dtype)
        self.B = torch.zeros(slots, layer.geometry.ngroups, entries, N, device=x.device, dtype=x.dtype)
        self.dt = torch.zeros(slots, H, entries, device=x.device)
        self.constants = per_head(layer)

    def copy_rings(self, position: int, history: int) -> None:
        """The last `history` tokens before `position` from the layer's rings."""
        state, length = self.layer.state, self.layer.settings.ring_len
        for i in range(history):
            entry = (position - history + i) % length
            self.x[:, :, i].copy_(state["ring_x"][:, entry])
            self.B[:, :, i].copy_(state["ring_B"][:, entry])
            self.dt[:, :, i].copy_(state["ring_dt"][:, entry])

    def steps(self) -> dict[str, Step]:
        """name -> step, for every launch configuration tried; a name begins with the project."""
        raise NotImplementedError


class FlashInfer(ReplayPeer):
    """checkpointing_ssu."""

    def __init__(self, layer) -> None:
        from flashinfer.mamba import allocate_checkpointing_ssu_scratch, checkpointing_ssu

        L, window, x = layer.settings.buffer_len, layer.window, layer.inputs[0]
        super().__init__(layer, L + window)
        self.flushing_history, self._run = L - window + 1, checkpointing_ssu
        x, dt, B, C = windows_of(layer)
        # This kernel's tokens have an axis of their own, a decode step's too.
        self._inputs = [t[:, None] for t in (x, dt, B, C)] if window == 1 else [x, dt, B, C]
        self._first = torch.zeros(layer.state.slots, device=x.device, dtype=torch.int32)
        self._out = torch.empty_like(self._inputs[0])
        scratch = allocate_checkpointing_ssu_scratch(layer.batch, x.shape[-2], window, L, x.dtype, x.device)
        self._scratch = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True))

    def steps(self) -> dict[str, Step]:
        name = f"flashinfer {version_of('flashinfer-python')} checkpointing_ssu"
        variants = {"": self._scratch | {"algorithm": "two-kernel"}, " monolith": {"algorithm": "monolith"}}

        def step(slots: torch.Tensor, history: torch.Tensor, options: dict) -> Launch:
            return partial(self._launch, slots, history, options)

        return {f"{name}{label}": partial(step, options=options) for label, options in variants.items()}

    def _launch(self, slots: torch.Tensor, history: torch.Tensor, options: dict) -> torch.Tensor:
        (x, dt, B, C), (A, D, dt_bias) = self._inputs, self.constants
        self._run(
            self.layer.state["checkpoint"], self.x, self.B, self.dt, self._first, history, x, dt, A, B, C, self._out,
            D=D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots, enable_pdl=True, **options,
        )  # fmt: skip
        return self._out.flatten(0, 1)


VLLM_CONFIGS = (
    (16, 1, 64, 128, 2), (16, 1, 64, 64, 2), (16, 1, 128, 128, 2), (16, 2, 128, 128, 2), (32, 1, 64, 64, 2),
    (32, 2, 64, 64, 2), (64, 1, 32, 64, 2),
)  # fmt: skip
"""(rows per program, warps, columns per pass without and with a fold, stages). The first is what vLLM picks on Hopper,
the last what it picks on Blackwell; the others are the fastest of thirteen tried on an H200 at batch 256."""


class Vllm(ReplayPeer):
    """The Mamba2 replay decode of vLLM 0.27 and later. It folds with the step's own token, so one step earlier."""

    def __init__(self, layer) -> None:
        from vllm.model_executor.layers.mamba.ops import selective_state_update_replayssm_output_only as module

        if layer.window > 1:
            raise ImportError("vLLM has no replay verification in Triton")
        L, x = layer.settings.buffer_len, layer.inputs[0]
        super().__init__(layer, L)
        self.flushing_history = L - 1
        self._module = module
        self._out = torch.empty_like(x)
        self._products = torch.empty(layer.batch, layer.geometry.ngroups, L, device=x.device)

    def steps(self) -> dict[str, Step]:
        def step(slots: torch.Tensor, history: torch.Tensor, config: tuple[int, ...]) -> Launch:
            flushes = (history >= self.flushing_history).to(torch.int8)
            return partial(self._launch, slots, history, flushes, config)

        name = f"vllm {version_of('vllm')} replay"
        return {
            f"{name} {'x'.join(map(str, config))}": partial(step, config=config)
            for config in VLLM_CONFIGS
            if config[0] < 2 * self.layer.geometry.headdim
        }

    def _launch(
        self, slots: torch.Tensor, history: torch.Tensor, flushes: torch.Tensor, config: tuple[int, ...]
    ) -> torch.Tensor:
        (x, dt, B, C), (A, D, dt_bias) = windows_of(self.layer), self.constants
        # The kernel's launcher takes its configuration from this function alone.
        with patch.object(self._module, "get_replayssm_config", lambda *_, **__: config):
            return self._module.selective_state_update_replayssm_output_only(
                self.layer.state["checkpoint"], x, dt, A, B, C, D, dt_bias, dt_softplus=True, x_cache=self.x,
                dt_cache=self.dt, B_cache=self.B, bc_pre=self._products, write_pos=history, is_flush=flushes,
                max_cache_len=self.layer.settings.buffer_len, state_batch_indices=slots, null_block_id=-1,
                out=self._out,
            )  # fmt: skip


def replay_peers(layer) -> Iterator[ReplayPeer]:
    """Every kernel that can be imported and has this layer's shape."""
    for project in (Vllm, FlashInfer):
        try:
            yield project(layer)
        except ImportError:
            continue
