"""Mamba2 mixers: `selective_state_update` becomes `mamba2_window`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replayssm.plugins import torch_ops
from replayssm.plugins.contract import Mamba2Geometry
from replayssm.plugins.cuda_ops import gaps_left_unwritten

from .layer import GlobalDispatch, Layer, replace_global
from .settings import RefusedError

ATTRIBUTES = ("_stp_ssu_func", "selective_state_update_func", "selective_state_update_func_no_mtp")
"""Where a mixer keeps its decode operator, newest spelling first. The oldest has none and calls the global below."""

GLOBAL = "selective_state_update"


class Mamba2Layer(Layer):
    """tensorrt_llm/_torch/modules/mamba/mamba2_mixer.py: Mamba2Mixer."""

    def __init__(self, mixer: Any, index: int) -> None:
        super().__init__(mixer, index)
        missing = [
            name
            for name in ("A", "D", "dt_bias", "tp_nheads", "tp_ngroups", "head_dim", "d_state")
            if not hasattr(mixer, name)
        ]
        if missing:
            raise RefusedError(f"the mixer of layer {index} lacks {', '.join(missing)}: its spelling is unknown")
        if getattr(mixer, "delta_softplus", True) is not True:
            raise RefusedError(f"the mixer of layer {index} does not apply softplus to dt")
        self.attribute = next((name for name in ATTRIBUTES if callable(getattr(mixer, name, None))), None)
        self.A_log: torch.Tensor | None = None
        if self.attribute is None:
            self.original = replace_global(type(mixer).forward, GLOBAL)
        else:
            found = getattr(mixer, self.attribute)
            self.original = found.original if isinstance(found, GlobalDispatch) else found

    def replace(self) -> None:
        """Put `decode` where the mixer looks for its operator."""
        if self.attribute is not None:
            setattr(self.mixer, self.attribute, self.decode)

    def geometry(self) -> Mamba2Geometry:
        mixer = self.mixer
        return Mamba2Geometry(mixer.tp_nheads, mixer.head_dim, mixer.d_state, mixer.tp_ngroups)

    def constants(self) -> torch.Tensor | None:
        return self.A_log

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        call = _arguments(*args, **kwargs)
        if call is None or not self._is_one_token(**call):
            # A verify step, or a call that this package does not know: not ours.
            return self.call_original(self.original, *args, **kwargs)
        state, rows = self.operands()
        inputs = (call["x"], call["dt"][..., 0], call["B"], call["C"], self.A_log, self.mixer.D, self.mixer.dt_bias)
        with gaps_left_unwritten():  # every token is a row's
            y = torch_ops.mamba2_window(*inputs, state, *rows.arguments, self.index)
        if call["z"] is not None:
            z = call["z"].float()
            y = (y.float() * z * torch.sigmoid(z)).to(y.dtype)
        if call["out"] is None:
            return y
        return call["out"].copy_(y)

    def _is_one_token(self, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, out) -> bool:
        activations = x.dtype == B.dtype == C.dtype
        return (
            x.dim() == dt.dim() == 3
            and activations
            and dt_softplus is True
            and D is not None
            and dt_bias is not None
            and self.serves(state, state_batch_indices, x.shape[0])
            and str(x.dtype) == f"torch.{self.state.settings.activation_dtype}"
            and (out is None or out.shape == x.shape)
        )

    def sample(self, tokens: int, pool: torch.Tensor, generator: torch.Generator) -> list[tuple[tuple, dict]]:
        mixer, geometry = self.mixer, self.geometry()
        H, P, N, G = geometry.nheads, geometry.headdim, geometry.dstate, geometry.ngroups
        act = self.activation_dtype

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(pool.device, act)

        A = mixer.A.float()[:, None, None].expand(H, P, N)
        D, dt_bias = (constant[:, None].expand(H, P) for constant in (mixer.D, mixer.dt_bias))
        slots = torch.ones(1, dtype=torch.int32, device=pool.device)
        takes_out = "out" in inspect.signature(self.original).parameters
        calls = []
        for _ in range(tokens):
            x, dt = random(1, H, P), random(1, H).float()[..., None].expand(1, H, P)
            options = {"z": None, "dt_bias": dt_bias, "dt_softplus": True, "state_batch_indices": slots}
            if takes_out:
                options["out"] = torch.empty_like(x)
            calls.append(((pool, x, dt, A, random(1, G, N), random(1, G, N), D), options))
        return calls


_POSITIONAL = ("state", "x", "dt", "A", "B", "C", "D")
_NAMED = {"D": None, "z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "out": None}
_IRRELEVANT = ("pad_slot_id", "enable_pdl", "launch_with_pdl")


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """Arguments of a one-token `selective_state_update` by name; None for one that uses anything else."""
    if len(args) > len(_POSITIONAL):
        return None
    call = {**_NAMED, **dict(zip(_POSITIONAL, args, strict=False))}
    for name, value in kwargs.items():
        if name in _NAMED or name in _POSITIONAL:
            call[name] = value
        elif name not in _IRRELEVANT and value not in (None, False):
            return None
    return call if all(name in call for name in _POSITIONAL) else None
