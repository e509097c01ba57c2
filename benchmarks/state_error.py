"""Error of the state and of outputs against fp64 over thousands of decoded tokens, for every state format.

    python benchmarks/state_error.py [--tokens 4096] [--output FILE] [--plot docs/state_error.svg]

Sources of inputs: the two example models on a long text, layer by layer as their own forward pass gives them, and
whole key groups of the four published models with random inputs whose decays are spread as the usual initialisation of
both families spreads them (A from 1 to 16, dt from 0.001 to 0.1, log-uniform: memories of 1 to 1,000 tokens).
Every format decodes the same inputs (`examples.replay`, L = 16); errors are relative 2-norms.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.commit import current_commit  # noqa: E402
from examples import model as layers  # noqa: E402
from examples import networks, tasks  # noqa: E402
from examples.export import load  # noqa: E402
from examples.replay import BUFFER_LEN, GdnCore, Mamba2Core, ReplayCore, normalized  # noqa: E402
from examples.state_formats import StateFormat, Store  # noqa: E402
from examples.tokenizer import prompt_ids  # noqa: E402
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry, RecurrentGeometry  # noqa: E402
from replayssm.plugins.reference.rounding import rounding_bits  # noqa: E402

FORMATS = (
    StateFormat("float32"),
    StateFormat("float16"),
    StateFormat("float16", True),
    StateFormat("float8"),
    StateFormat("float8", True),
    StateFormat("nvfp4"),
    StateFormat("float16", True, "float8"),
    StateFormat("float16", True, "nvfp4"),
    StateFormat("float8", True, "nvfp4"),
    StateFormat("float16", True, "nvfp4", "checkpoint"),
    StateFormat("float8", True, "nvfp4", "checkpoint"),
)

FP32_ERROR = 1e-4
"""Relative output error that a float32 state may have after thousands of tokens: some 1e-6 in either model."""

# Published sizes, cut to the heads of a few key groups: heads share nothing else.
GEOMETRIES: dict[str, RecurrentGeometry] = {
    "nano4b": Mamba2Geometry(nheads=12, headdim=80, dstate=128, ngroups=1),
    "super120b": Mamba2Geometry(nheads=16, headdim=64, dstate=128, ngroups=1),
    "qwen4b": GdnGeometry(num_k_heads=4, num_v_heads=8, head_k_dim=128, head_v_dim=128),
    "qwen122b": GdnGeometry(num_k_heads=2, num_v_heads=8, head_k_dim=128, head_v_dim=128),
}


@dataclass
class Source:
    """Inputs of `rows` layers or sequences at once, fp32 [rows, tokens, ...]. Mamba2: x, dt (after softplus), B, C and
    A [rows, heads]; GDN: q (scaled), k, v, g, beta."""

    name: str
    kind: str
    geometry: RecurrentGeometry
    inputs: tuple[Tensor, ...]
    A: Tensor | None = None

    def at(self, token: int) -> tuple[Tensor, ...]:
        return tuple(tensor[:, token] for tensor in self.inputs)


def synthetic(name: str, tokens: int) -> Source:
    """Random inputs for a published geometry."""
    geometry = GEOMETRIES[name]
    generator = torch.Generator().manual_seed(20261130)
    heads = geometry.state_shape[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    def log_uniform(low: float, high: float) -> Tensor:
        low, high = (torch.tensor(bound).log() for bound in (low, high))
        return torch.exp(low + (high - low) * torch.rand(heads, generator=generator))

    A, mean_dt = -log_uniform(1, 16), log_uniform(1e-3, 0.1)
    dt = mean_dt * torch.exp(0.5 * normal(heads))
    if isinstance(geometry, Mamba2Geometry):
        B, C = (torch.nn.functional.silu(normal(geometry.ngroups, geometry.dstate)) for _ in range(2))
        return Source(name, "synthetic", geometry, (normal(heads, geometry.headdim), dt, B, C), A[None])
    keys = (geometry.num_k_heads, geometry.head_k_dim)
    q, k = (normalized(torch.nn.functional.silu(normal(*keys)), torch.bfloat16) for _ in range(2))
    v = normal(heads, geometry.head_v_dim)
    inputs = (q * keys[1] ** -0.5, k, v, dt * A, torch.sigmoid(normal(heads)))
    return Source(name, "synthetic", geometry, inputs)


@torch.no_grad()
def recorded(layout: str, tokens: int) -> Source:
    """Inputs of an example model's recurrent layers, stacked as rows, while it reads problems with their answers."""
    from tokenizers import Tokenizer

    folder = ROOT / "examples" / layout
    tokenizer, model = Tokenizer.from_file(str(folder / "tokenizer.json")), load(folder, layout, torch.bfloat16)
    ids: list[int] = []
    for problem in tasks.held_out("track", tokens // 200 + 1):
        ids += prompt_ids(tokenizer, problem.question) + tokenizer.encode(problem.working, add_special_tokens=False).ids
    calls: list[tuple[Tensor, ...]] = []
    name = "mamba2_chunked" if layout == "nemotron-h-tiny" else "gdn_chunked"
    scan: Callable[..., Tensor] = getattr(layers.scans, name)

    def record(*arguments, **options) -> Tensor:
        calls.append(arguments)
        return scan(*arguments, **options)

    setattr(layers.scans, name, record)
    try:
        model(torch.tensor([ids[:tokens]]))
    finally:
        setattr(layers.scans, name, scan)
    stacked = [torch.cat([call[index].float() for call in calls]) for index in range(5)]
    c = model.c
    if layout == "nemotron-h-tiny":
        x, dt, _, B, C = stacked[0], stacked[1], None, *stacked[3:5]
        geometry = Mamba2Geometry(c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups)
        return Source(layout, "recorded", geometry, (x, dt, B, C), torch.stack([call[2].float() for call in calls]))
    q, k, v, g, beta = stacked
    q, k = (normalized(tensor, torch.bfloat16) for tensor in (q, k))
    geometry = GdnGeometry(
        c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    return Source(layout, "recorded", geometry, (q * q.shape[-1] ** -0.5, k, v, g, beta))


def exact(source: Source, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(output, state) after every token in fp64: [rows, heads, P], [rows, heads, P, N]."""
    heads, rows, columns = source.geometry.state_shape
    repeat = source.geometry.heads_per_group
    S = torch.zeros(source.inputs[0].shape[0], heads, rows, columns, dtype=torch.float64)
    for token in range(tokens):
        parts = [part.double() for part in source.at(token)]
        if source.A is not None:
            x, dt, B, C = parts
            B, C = (part.repeat_interleave(repeat, 1) for part in (B, C))
            S = S * torch.exp(dt * source.A.double())[..., None, None] + (x * dt[..., None])[..., None] * B[:, :, None]
            yield (S @ C[..., None])[..., 0], S
        else:
            q, k, v, g, beta = parts
            q, k = (part.repeat_interleave(repeat, 1) for part in (q, k))
            S = S * torch.exp(g)[..., None, None]
            u = beta[..., None] * (v - (S @ k[..., None])[..., 0])
            S = S + u[..., None] * k[:, :, None]
            yield (S @ q[..., None])[..., 0], S


def step(core: ReplayCore, source: Source, token: int) -> Tensor:
    parts = source.at(token)
    if source.A is None:
        return core.step(*parts)
    x, dt, B, C = parts
    return core.step(x, dt, source.A, B, C, torch.zeros(source.geometry.nheads))


def make_core(source: Source, fill: Tensor) -> ReplayCore:
    heads, rows, columns = source.geometry.state_shape
    shape = (heads, heads // source.geometry.heads_per_group, rows, columns)
    kind = Mamba2Core if source.A is not None else GdnCore
    return kind(source.inputs[0].shape[0], shape, fill, lambda function: function)


def relative(error: Tensor, of: Tensor) -> float:
    return float(error.double().norm() / of.double().norm())


@torch.no_grad()
def curves(
    source: Source, formats: Sequence[StateFormat], tokens: int, every: int
) -> dict[StateFormat, dict[str, Any]]:
    """Errors at every `every` tokens: of the checkpoint just stored, and of the last `every` outputs together."""
    fill = torch.zeros(1, dtype=torch.long)
    cores = {form: make_core(source, fill) for form in formats}
    stores = {form: Store(form) for form in formats}
    found = {form: {"tokens": [], "state": [], "output": []} for form in formats}
    sums = dict.fromkeys(formats, 0.0)
    scale = 0.0
    for form, core in cores.items():
        core.start(core.checkpoint.clone(), stores[form], torch.zeros(source.geometry.state_shape, dtype=torch.int32))
        if isinstance(core, GdnCore):
            core.u_from_checkpoint = form.u_source == "checkpoint"
            core.u_in_one_number = form.u_format == "bfloat16"
    for token, (y, S) in enumerate(exact(source, tokens)):
        scale += float(y.square().sum())
        for form, core in cores.items():
            sums[form] += float((step(core, source, token) - y).square().sum())
        fill += 1
        done = token + 1
        if done % BUFFER_LEN == 0:
            bits = rounding_bits(source.geometry.state_shape, 0, 0, done)
            for form, core in cores.items():
                core.flush(stores[form], bits)
            fill.zero_()
        if done % every == 0:
            for form, core in cores.items():
                curve = found[form]
                curve["tokens"].append(done)
                curve["state"].append(relative(core.checkpoint - S, S))
                curve["output"].append((sums[form] / scale) ** 0.5)
                sums[form] = 0.0
            scale = 0.0
    return found


def lines(source: Source, formats: Sequence[StateFormat], tokens: int, every: int) -> Iterator[dict[str, Any]]:
    commit = current_commit("--short")
    found = curves(source, formats, tokens, every)
    exact = [curve["output"][-1] for form, curve in found.items() if form.name == "float32"]
    for form, curve in found.items():
        last = max(1, len(curve["tokens"]) // 4)
        yield {
            "benchmark": "state_error",
            "op": source.geometry.kind,
            "variant": "ours, simulated",
            "geometry": source.name,
            "inputs": source.kind,
            "format": form.name,
            "state_dtype": form.state,
            "state_rounding": "stochastic" if form.stochastic else "nearest",
            "readout_dtype": form.readout,
            "u_source": form.u_source,
            **({"u_format": form.u_format} if source.A is None else {}),
            "L": BUFFER_LEN,
            "tokens": curve["tokens"],
            "state_error": [float(f"{value:.4g}") for value in curve["state"]],
            "output_error": [float(f"{value:.4g}") for value in curve["output"]],
            "value": float(f"{sum(curve['output'][-last:]) / last:.4g}"),
            "unit": "relative output error, mean of the last quarter",
            "gpu": "cpu",
            "commit": commit or "unknown",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            # What carries on in fp32 must stay at fp32's roundings; without it nothing says so.
            "correct": bool(exact) and exact[0] < FP32_ERROR,
        }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*networks.LAYOUTS, *GEOMETRIES]
    parser.add_argument("--sources", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--every", type=int, default=128, help="tokens between two points, a multiple of 16")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args(arguments)
    if args.every % BUFFER_LEN or args.tokens % args.every:
        parser.error(f"--every must be a multiple of {BUFFER_LEN} and divide --tokens")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    for name in args.sources:
        source = recorded(name, args.tokens) if name in networks.LAYOUTS else synthetic(name, args.tokens)
        formats = [form for form in FORMATS if form.u_source == "readout" or source.A is None]
        for line in lines(source, formats, args.tokens, args.every):
            print(
                f"{name:16s} {line['format']:46s} state {line['state_error'][-1]:.2e} output {line['value']:.2e}",
                flush=True,
            )
            if args.output:
                with args.output.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
