"""Speculative decoding: replay state against snapshots of the state, and against plain decoding, on one host.

    python benchmarks/e2e_spec_decode_throughput.py --model Qwen/Qwen3.5-4B --batch-size 256

A verify step has one token and --draft-len drafts a row. With random weights nothing that is drafted would stand, so
acceptance is forced: each draft stands with --acceptance if all before it did, the same draws for every variant. Such
drafts come for free, as prompt lookup gives them; a draft model would add the same time to both ways of speculating.
With --dataset, a checkpoint's own weights and a drafter, acceptance is natural and the whole serving path is timed
(e2e_natural.py). Variants hold different state (snapshots are many times a sequence's state), so they run one after the
other in turns, each freeing its memory first.

With --ranks, every rank is a process with a GPU of its own and a part of the model, and rank 0 writes the lines; bytes
are those of one rank.

"snapshots" is the plain kernel that stores the state after every token of a window; the next step would read the one
that stands in place, so no copy is timed. What copying it back would cost is in `commit_copy_us`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from e2e_decode_speedup import logits_bound, low_precision, split_fields, timing_fields
from e2e_model import Model
from e2e_natural import measure_natural
from e2e_ranks import rank_model, rank_networks, run_ranks
from e2e_results import E2eResults, add_common_options, device_of, measured_ceiling, model_fields, model_of, roofline
from e2e_run import Run, Split, free_memory, percentile, split_time

from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState
from replayssm.plugins.traffic import traffic_per_token
from replayssm.runtime.parallel_processes import Place, join_group

BENCHMARK = "e2e_spec_decode_throughput"
SPECULATION = "replay-speculation"
VARIANTS = ("plain", "replay", "snapshots", SPECULATION)
"""Plain and replay decode one token a step; the others verify windows."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, batch_sizes=[512], steps=192, warmup=32)
    parser.add_argument("--draft-len", type=int, default=4, help="drafts of a verify step; default 4")
    parser.add_argument("--acceptance", type=float, default=0.75, help="probability that a draft stands; default 0.75")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--dataset", type=Path, help="requests as JSON lines, for natural acceptance")
    parser.add_argument("--drafts", "--spec-method", choices=["ngram", "mtp"], default="ngram", help="with --dataset")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="STATE:READOUT:ROUNDING",
        help="further replay speculation, such as float16:nvfp4:stochastic; may be given several times",
    )
    parser.add_argument(
        "--also-replay",
        action="append",
        default=[],
        metavar="STATE:READOUT:ROUNDING",
        help="the same for replay that decodes one token a step",
    )
    parser.add_argument("--ranks", type=int, default=1, help="GPUs to divide the model over; default 1")
    options = parser.parse_args(arguments)
    options.variants += [f"replay-{text.replace(':', '-')}" for text in options.also_replay]
    options.variants += [f"{SPECULATION}-{text.replace(':', '-')}" for text in options.also]
    if not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance must lie between 0 and 1, got {options.acceptance}")
    if options.ranks > 1 and options.dataset is not None:
        parser.error("--dataset runs on one GPU: leave out --ranks")
    if not 1 <= options.draft_len < options.buffer_len:
        parser.error(f"--draft-len must lie between 1 and --buffer-len - 1, got {options.draft_len}")
    return options


def settings_of(variant: str, options: argparse.Namespace, max_seq_len: int) -> ReplaySettings:
    plain = ReplaySettings(
        buffer_len=0,
        max_window=1,
        max_seq_len=max_seq_len,
        state_dtype=options.state_dtype,
        state_rounding=options.state_rounding,
    )
    window = 1 + options.draft_len if verifies(variant) else 1
    if variant in ("plain", "snapshots"):
        return dataclasses.replace(plain, max_window=window)
    replay = dataclasses.replace(
        plain, buffer_len=options.buffer_len, max_window=window, readout_dtype=options.readout_dtype
    ).with_u_format()
    if variant in VARIANTS:
        return replay
    return low_precision(replay, variant.removeprefix(SPECULATION).removeprefix("replay").strip("-").replace("-", ":"))


def verifies(variant: str) -> bool:
    return variant.startswith(("snapshots", SPECULATION))


def accepted_tokens(steps: int, batch: int, options: argparse.Namespace) -> torch.Tensor:
    """Tokens that stand, int32 [steps, batch]: one, and each draft with the stated probability after the one before."""
    generator = torch.Generator().manual_seed(options.seed)
    stands = torch.rand(steps, batch, options.draft_len, generator=generator) < options.acceptance
    return 1 + stands.to(torch.int32).cumprod(dim=2).sum(dim=2).to(torch.int32)


@dataclasses.dataclass
class Measured:
    """What the turns of one variant gave. tokens: mean tokens of a row and step."""

    settings: ReplaySettings
    tokens: float
    times: list[float] = dataclasses.field(default_factory=list)
    split: Split | None = None
    clock: dict = dataclasses.field(default_factory=dict)
    state_bytes: int = 0
    memory_bytes: int = 0
    commit_copy_us: float | None = None
    first_logits: torch.Tensor | None = None


def run_turn(
    variant: str, model: Model, batch: int, options: argparse.Namespace, steps: int, known: Measured | None
) -> Measured:
    """Build the variant, step it `steps` times and free it; the first turn also splits the time."""
    device, cycle = device_of(options), options.buffer_len
    warmup = -(-options.warmup_steps // cycle) * cycle
    profiled = 8 if known is None and not options.no_profile else 0
    accepted = accepted_tokens(warmup + steps + profiled, batch, options)
    longest = int(accepted.sum(dim=0).max()) if verifies(variant) else warmup + steps + profiled
    max_seq_len = options.prompt_len + cycle + longest + 1 + options.draft_len
    settings = settings_of(variant, options, max_seq_len)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(model.vocab_size, (batch, options.prompt_len), generator=generator).tolist()
    run = Run(model, settings, prompts, device, accepted if verifies(variant) else None)
    mean = float(accepted[warmup : warmup + steps].float().mean()) if verifies(variant) else 1.0
    known = known or Measured(settings, mean)
    first = run.force(torch.arange(batch * settings.max_window) % model.vocab_size)
    if known.first_logits is None:
        # The first token of every window, which all variants were given alike but for its id.
        known.first_logits = (
            first.view(batch, settings.max_window, -1)[:, 0].float().cpu() if verifies(variant) else None
        )
    run.desynchronise(model.vocab_size, cycle)
    run.time(warmup, cycle)
    known.times += run.time(steps, cycle)
    known.clock = run.clock_fields()
    run.check()
    if profiled:
        known.split = split_time(run, profiled)
    known.state_bytes = run.session.state_bytes
    if device.type == "cuda":
        known.memory_bytes = torch.cuda.max_memory_allocated(device)
        if variant == "snapshots":
            known.commit_copy_us = commit_copy_us(list(run.session.states.values()))
    run.close()
    return known


def commit_copy_us(states: list[LayerState]) -> float:
    """Microseconds to copy one snapshot of every slot over its checkpoint, in all layers."""
    kept = [state for state in states if "snapshots" in state.tensors]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        if timed:
            begin.record()
        for state in kept:
            state["checkpoint"].copy_(state["snapshots"][:, 0])
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def measure(model: Model, batch: int, options: argparse.Namespace, results: E2eResults | None) -> None:
    """results: None on ranks that do not write any."""
    device, cycle = device_of(options), options.buffer_len
    steps = max(cycle, options.num_steps // options.repeats // cycle * cycle)
    measured: dict[str, Measured] = {}
    order = list(options.variants)
    for _ in range(options.repeats):
        for variant in order:
            free_memory(device)
            measured[variant] = run_turn(variant, model, batch, options, steps, measured.get(variant))
        order.reverse()
    if results is None:
        return
    ceiling = measured_ceiling(device)
    part = dataclasses.replace(model, networks=rank_networks(model))
    rates = {name: batch * one.tokens / percentile(one.times, 0.5) for name, one in measured.items()}
    distances = agreement(measured)
    for name, one in measured.items():
        traffic = traffic_per_token(part.geometries, one.settings, one.settings.max_window - 1, one.tokens)
        moved = traffic.replay_speculation if verifies(name) else traffic.replay
        moved = {"plain": traffic.plain, "snapshots": traffic.snapshot_speculation}.get(name, moved)
        results.add(
            op="decode_step" if one.settings.max_window == 1 else "verify_step",
            **model_fields(model, one.settings, batch, options),
            fill="desync",
            variant=name,
            ranks=options.ranks,
            **timing_fields(one.times, batch * one.tokens),
            **one.clock,
            acceptance_length=round(one.tokens, 4),
            acceptance_forced=options.acceptance,
            drafts="given",
            speedup=round(rates[name] / rates.get("plain", rates[name]), 4),
            speedup_over_snapshots=round(rates[name] / rates["snapshots"], 4) if "snapshots" in rates else None,
            **split_fields(one.split, percentile(one.times, 0.5)),
            commit_copy_us=one.commit_copy_us and round(one.commit_copy_us, 1),
            traffic_bytes_per_token=round(moved),
            predicted_recurrent_us=ceiling and round(1e6 * batch * one.tokens * moved / ceiling, 1),
            **roofline(part, batch * one.settings.max_window, ceiling),
            state_bytes=one.state_bytes,
            gpu_memory_bytes=one.memory_bytes,
            logits_distance=distances.get(name),
            correct=distances.get(name, 0.0) < logits_bound(one.settings, model),
        )


def agreement(measured: dict[str, Measured]) -> dict[str, float]:
    """Relative distance of each way of speculating from the first, at the first verify step behind the prompts."""
    logits = {name: one.first_logits for name, one in measured.items() if one.first_logits is not None}
    if len(logits) < 2:
        return {}
    first = next(iter(logits.values()))
    return {name: round(float((own - first).norm() / first.norm()), 5) for name, own in logits.items()}


def measure_rank(place: Place, _, options: argparse.Namespace) -> None:
    """What a rank does: `measure` of its part."""
    join_group(place)
    options.device = str(place.torch_device)
    # A communicator is made by its first collective, which no capture must hold.
    dist.all_reduce(torch.zeros(1, device=place.torch_device))
    whole = model_of(options, tiles=False)
    model = rank_model(whole, place, tiles=True)
    results = E2eResults(BENCHMARK, options) if place.rank == 0 else None
    for batch in options.batch_size:
        measure(model, batch, options, results)


def main(arguments: list[str] | None = None) -> Path | int:
    """The file of lines, or an exit code where there are several ranks."""
    options = parse(arguments)
    if options.ranks > 1:
        return run_ranks(measure_rank, options)
    natural = options.dataset is not None
    model = model_of(options, mtp=natural and options.drafts == "mtp")
    results = E2eResults(BENCHMARK, options)
    for batch in options.batch_size:
        if natural:
            measure_natural(model, batch, settings_of, options, results)
        else:
            measure(model, batch, options, results)
    return results.close()


if __name__ == "__main__":
    done = main()
    sys.exit(done if isinstance(done, int) else 0)
