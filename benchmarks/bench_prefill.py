"""Prefill of one layer: our chunked kernels, the same rows walked token by token, and the peers' chunked kernels.

    python benchmarks/bench_prefill.py [--geometries nano4b,qwen4b] [--batches 1,8] [--tokens 4096]
                                     [--formats float32,float16:stochastic:nvfp4] [--tune]

Rows of `tokens` tokens from an empty sequence, whose final state is kept. Bytes are the inputs, the outputs and the
state, each moved once; the ceiling is that of reading and writing. Inputs and outputs rotate through more memory than
any cache holds. Outputs are compared with the fp64 recurrence, on some heads, before anything is timed: a peer that
multiplies in bf16 is right within 1e-2, ours within the rounding of its outputs. --formats: of the state; peers,
which keep it in fp32, are measured beside a format of fp32. --tune: measure every launch geometry.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, cached_property, partial

import peers
import torch
from harness import COLD_BYTES, Results, ceilings, time_graph
from window_layers import GEOMETRIES

from replayssm.plugins import launch
from replayssm.plugins.arguments import gdn_arguments, mamba2_arguments
from replayssm.plugins.contract import Geometry, Mamba2Geometry, checkpoint_parts, readout_parts
from replayssm.plugins.geometry import KernelConfig, row_candidates, window_config
from replayssm.plugins.prefill_geometry import prefill_config
from replayssm.plugins.reference import recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state, torch_dtype

OUR_ERROR, PEER_ERROR = 2.5e-3, 1e-2
"""Relative to the fp64 recurrence: half a bf16 ulp of each output is 2^-9 of it at most; peers also round operands."""


class Prompt:
    """Equal rows of a batch, several sets of inputs, and their launches."""

    def __init__(self, geometry: Geometry, settings: ReplaySettings, batch: int, tokens: int) -> None:
        self.geometry, self.settings, self.batch, self.tokens = geometry, settings, batch, tokens
        act, g = torch_dtype(settings.activation_dtype), geometry
        heads = g.state_shape[0]
        self.is_mamba2 = isinstance(g, Mamba2Geometry)
        if self.is_mamba2:
            shapes = [(g.nheads, g.headdim), (g.nheads,), (g.ngroups, g.dstate), (g.ngroups, g.dstate)]
        else:
            keys = (g.num_k_heads, g.head_k_dim)
            shapes = [keys, keys, (g.num_v_heads, g.head_v_dim), (g.num_v_heads,), (g.num_v_heads,)]
        self.state = allocate_state(geometry, settings, batch, "cuda")
        total = batch * tokens
        outputs = total * heads * g.state_shape[1]
        size = 2 * (outputs + total * sum(torch.Size(shape).numel() for shape in shapes))
        parts = (*checkpoint_parts(geometry, settings), *readout_parts(geometry, settings.readout_dtype))
        self.nbytes = size + batch * sum(part.nbytes for part in parts)
        self.sets = max(1, min(8, -(-COLD_BYTES // size)))
        self.inputs = [[torch.randn(total, *s, device="cuda").to(act) for s in shapes] for _ in range(self.sets)]
        self.outputs = [torch.empty(total, *g.state_shape[:2], device="cuda", dtype=act) for _ in self.inputs]
        A_log, D, bias = torch.rand(heads), torch.randn(heads), torch.rand(heads) - 4
        self.constants = [c.cuda() for c in ((A_log, D, bias) if self.is_mamba2 else (A_log, bias))]
        rows = (torch.zeros(batch), torch.arange(batch) * tokens, torch.full((batch,), tokens), torch.arange(batch))
        self.index = tuple(row.to("cuda", torch.int32) for row in rows)

    def launches(self, config: KernelConfig) -> list[Callable[[], None]]:
        """One launch of a kernel per set."""
        build, device = mamba2_arguments if self.is_mamba2 else gdn_arguments, self.outputs[0].device
        values = [
            build(*inputs, *self.constants, self.state, self.index, 0, out)
            for inputs, out in zip(self.inputs, self.outputs, strict=True)
        ]
        return [partial(launch.launch, config, one, device, self.batch) for one in values]

    def error(self, out: torch.Tensor) -> float:
        """Of the last row's outputs of two heads, relative to the recurrence in fp64."""
        own, heads, expected = self._expected
        value = out.view(-1, *self.geometry.state_shape[:2])[own, heads].double()
        return float((value - expected).norm() / expected.norm())

    @cached_property
    def _expected(self) -> tuple[slice, slice, torch.Tensor]:
        """(tokens, heads, their outputs)."""
        group = self.geometry.state_shape[0] // self.geometry.heads_per_group - 1
        per_group = min(2, self.geometry.heads_per_group)
        first = group * self.geometry.heads_per_group
        heads, groups = slice(first, first + per_group), slice(group, group + 1)
        own = slice((self.batch - 1) * self.tokens, self.batch * self.tokens)
        shared = (2, 3) if self.is_mamba2 else (0, 1)
        inputs = [part[own, groups if i in shared else heads] for i, part in enumerate(self.inputs[0])]
        constants = [constant[heads] for constant in self.constants]
        if self.is_mamba2:
            expected, _ = recurrence.mamba2_recurrence(*inputs, *constants)
        else:
            expected, _ = recurrence.gdn_recurrence(*inputs, *constants, None, inputs[0].dtype)
        return own, heads, expected


@cache
def copy_ceiling() -> float:
    """GB/s of reading and writing."""
    return ceilings(COLD_BYTES, torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda"))["rmw"]


def our_configs(geometry: Geometry, settings: ReplaySettings, arch: int) -> dict[str, KernelConfig]:
    """Every number of state rows that a block may own, by name."""
    candidates = row_candidates(geometry.state_shape[1], geometry.row_tiles)
    return {f"rows {rows}": prefill_config(geometry, settings, arch, cta_rows=rows) for rows in candidates}


def measure(results: Results, name: str, batch: int, tokens: int, settings: ReplaySettings, tune: bool) -> None:
    """All variants of one geometry and batch size."""
    prompt = Prompt(GEOMETRIES[name], settings, batch, tokens)
    arch = launch.device_arch(torch.device("cuda", 0))
    configs = {"ours": prefill_config(prompt.geometry, settings, arch, prompts=batch)}
    if tune:
        configs |= our_configs(prompt.geometry, settings, arch)
    if batch == 1:
        configs["token by token"] = window_config(prompt.geometry, settings, arch)
    variants = {key: (prompt.launches(config), prompt.outputs[0], OUR_ERROR) for key, config in configs.items()}
    if (settings.state_dtype, settings.readout_dtype) == ("float32", "same"):
        others = (peers.mamba2_prefill_peers if prompt.is_mamba2 else peers.gdn_prefill_peers)(prompt)
        variants |= {key: (calls, None, PEER_ERROR) for key, calls in others.items()}
    for key, (calls, out, limit) in variants.items():
        try:
            if out is not None:
                out.fill_(torch.nan)
            returned = calls[0]()
            error = prompt.error(returned if out is None else out)
            slow = key == "token by token"
            timing = time_graph(calls[:1] if slow else calls, min_ms=1 if slow else 10, min_replays=3 if slow else 7)
        except Exception as problem:  # a peer that does not run here must not hide the others
            print(f"{name} {key}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if out is not None:
                raise
            continue
        if not error < limit:
            raise AssertionError(f"{name} {key}: relative error {error:.1e} exceeds {limit:.1e}")
        results.add(
            timing, prompt.nbytes, copy_ceiling(),
            op=f"{prompt.geometry.kind}_prefill", geometry=name, batch=batch, window=tokens,
            state_dtype=settings.state_dtype, state_rounding=settings.state_rounding,
            readout_dtype=settings.readout_dtype, L=settings.buffer_len, fill="prefill",
            variant=key, correct=True, error=round(error, 6),
        )  # fmt: skip
    assert int(prompt.state.error_flag) == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default="nano4b,super120b,qwen4b,qwen122b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", default="float32", help="state_dtype, or state_dtype:state_rounding:readout_dtype")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    results = Results("prefill")
    for name in arguments.geometries.split(","):
        for batch in map(int, arguments.batches.split(",")):
            for chosen in arguments.formats.split(","):
                state, rounding, readout = (*chosen.split(":"), "nearest", "same")[:3]
                formats = {"state_dtype": state, "state_rounding": rounding, "readout_dtype": readout}
                settings = ReplaySettings(max_window=5, max_seq_len=1 << 20, **formats)
                measure(results, name, batch, arguments.tokens, settings, arguments.tune)
                torch.cuda.empty_cache()
