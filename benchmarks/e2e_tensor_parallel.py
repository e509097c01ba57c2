"""Whole decode steps of one model on one GPU and divided over several, in one run.

    python benchmarks/e2e_tensor_parallel.py --model nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16
    python benchmarks/e2e_tensor_parallel.py --model Qwen/Qwen3.5-4B --ranks 2 --batch-size 1 --batch-size 256

Every rank is a process with a GPU of its own, and rank 0's also holds the whole model. All variants are captured
steps with replay state, fed the same tokens first: their logits are compared, and the ranks' hidden states with each
other, which must have equal bits. Then they are timed in turns, with all other GPUs idle while one runs alone.
`--device cpu` runs the same code over gloo, without figures that mean anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch
import torch.distributed as dist
from e2e_decode_speedup import (
    COMPARED_STEPS,
    ROUNDED_BOUND,
    distance_without_context,
    logits_bound,
    split_fields,
    timing_fields,
)
from e2e_model import Model, load_model
from e2e_ranks import rank_model, run_ranks
from e2e_results import E2eResults, add_common_options, measured_ceiling, model_fields, roofline
from e2e_run import Run, free_memory, percentile, split_time

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.parallel_processes import Place, join_group

BENCHMARK = "e2e_tensor_parallel"
WAIT_S = 300
"""For the other ranks at a meeting on the host."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, batch_sizes=[256], steps=320, warmup=32)
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to divide the model over; default 2")
    parser.add_argument("--compare-sums", action="store_true", help="also time the divided model with all sums by NCCL")
    return parser.parse_args(arguments)


class Rank:
    """One process: its place among the ranks, and its parts of the two variants."""

    def __init__(self, place: Place, meeting, options: argparse.Namespace) -> None:
        self.place, self.options, self._meeting = place, options, meeting
        self.device = place.torch_device
        join_group(place)
        # A communicator is made by its first collective, which no capture must hold.
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.whole = self._load() if place.rank == 0 else None
        model = self.whole or self._load()
        part = rank_model(model, place)
        ranks = f"{place.ranks} gpus" if place.ranks > 1 else "1 gpu, divided"
        self.models = {"1 gpu": self.whole, ranks: part}
        if options.compare_sums:
            self.models[f"{ranks}, NCCL sums"] = dataclasses.replace(part, one_shot_bytes=0)
        self.part = part

    def _load(self) -> Model:
        options = self.options
        return load_model(options.model, self.device, random_weights=options.random_weights, layers=options.layers)

    def meet(self) -> None:
        """Wait on the host until all ranks are here, their devices idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._meeting.wait(WAIT_S)

    def measure(self, batch: int, results: E2eResults | None) -> None:
        options, cycle = self.options, self.options.buffer_len
        steps, warmup = (-(-count // cycle) * cycle for count in (options.num_steps, options.warmup_steps))
        piece = max(cycle, steps // options.repeats // cycle * cycle)
        profiled = 0 if options.no_profile else min(cycle, 8)
        longest = options.prompt_len + cycle + COMPARED_STEPS + warmup + piece * options.repeats + profiled + cycle
        settings = ReplaySettings(
            buffer_len=cycle,
            max_window=1,
            max_seq_len=longest,
            state_dtype=options.state_dtype,
            state_rounding=options.state_rounding,
            readout_dtype=options.readout_dtype,
        ).with_u_format()
        runs, used = {}, {}
        for name, model in self.models.items():
            self.meet()
            if model is not None:
                runs[name], used[name] = self._run(model, settings, batch)
        divided = [name for name in self.models if name != "1 gpu"]
        found = self._compare(runs, divided)
        times = self._time(runs, warmup, piece)
        for run in runs.values():
            run.check()
        splits, memory = {}, {}
        for name in divided:
            splits[name] = split_time(runs[name], profiled) if profiled else None
            memory[name] = max(self._of_all_ranks(used[name]))
        if results is not None:
            lost = distance_without_context(runs["1 gpu"], self.whole.vocab_size)
            ceiling = measured_ceiling(self.device)
            one_us = percentile(times["1 gpu"], 0.5)
            for name, run in runs.items():
                distance, equal = found.get(name, (0.0, True))
                ratios = [one / own for one, own in zip(times["1 gpu"], times[name], strict=True)]
                results.add(
                    op="decode_step",
                    **model_fields(self.whole, settings, batch, options),
                    fill="desync",
                    variant=name,
                    ranks=self.place.ranks if name in divided else 1,
                    **timing_fields(times[name], batch),
                    speedup=round(one_us / percentile(times[name], 0.5), 4),
                    speedup_p10=round(percentile(ratios, 0.1), 4),
                    speedup_p90=round(percentile(ratios, 0.9), 4),
                    **split_fields(splits.get(name), percentile(times[name], 0.5)),
                    **roofline(dataclasses.replace(self.whole, networks=run.session.engine.networks), batch, ceiling),
                    context=[options.prompt_len, longest],
                    state_bytes=run.session.state_bytes,
                    gpu_memory_bytes=memory.get(name, used[name]),
                    logits_distance=round(distance, 5),
                    logits_distance_without_context=round(lost, 3),
                    ranks_bit_equal=equal,
                    correct=distance < self._bound(settings) and equal,
                )
        for run in runs.values():
            run.close()
        runs.clear()
        free_memory(self.device)
        self.meet()

    def _run(self, model: Model, settings: ReplaySettings, batch: int) -> tuple[Run, int]:
        """A run whose rows are at different places of their flush cycles, and the bytes that it took."""
        generator = torch.Generator().manual_seed(self.options.seed)
        prompts = torch.randint(model.vocab_size, (batch, self.options.prompt_len), generator=generator).tolist()
        # Weights may be there from another batch size.
        weights = {tensor.data_ptr(): tensor.nbytes for kept in model.resident.values() for tensor in kept.values()}
        before = self._reserved()
        run = Run(model, settings, prompts, self.device)
        run.desynchronise(model.vocab_size, settings.buffer_len)
        free_memory(self.device)
        return run, self._reserved() - before + sum(weights.values())

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _compare(self, runs: dict[str, Run], divided: list[str]) -> dict[str, tuple[float, bool]]:
        """By variant: (relative distance of its logits from the whole model's, on rank 0; whether all ranks have equal
        bits of hidden states, and have chosen the likeliest token of all)."""
        generator = torch.Generator().manual_seed(2)
        found = dict.fromkeys(divided, (0.0, True))
        for _ in range(COMPARED_STEPS):
            tokens = torch.randint(self.part.vocab_size, (runs[divided[0]].batch,), generator=generator)
            expected = runs["1 gpu"].force(tokens) if "1 gpu" in runs else None
            for name in divided:
                self.meet()
                run, (worst, equal) = runs[name], found[name]
                logits = run.force(tokens)
                part = run.session.engine.vocabulary_part
                logits = logits if part is None else part.gather(logits)
                chosen = torch.tensor(run.graph.wait()[0].tokens, device=self.device)
                first = run.graph.hidden_states.clone()
                dist.broadcast(first, 0)
                same = torch.equal(first, run.graph.hidden_states) and torch.equal(chosen, logits.argmax(1))
                equal &= all(self._of_all_ranks(int(same)))
                if expected is not None:
                    worst = max(worst, float((logits - expected).norm() / expected.norm()))
                found[name] = worst, equal
        return found

    def _time(self, runs: dict[str, Run], warmup: int, piece: int) -> dict[str, list[float]]:
        """Seconds per step of the variants in turns; other ranks wait while one GPU runs alone."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(1 + self.options.repeats):
            for name in self.models:
                self.meet()
                if name in runs:
                    seconds = runs[name].time(warmup if turn == 0 else piece, self.options.buffer_len)
                    times[name] += seconds if turn > 0 else []
        self.meet()
        return times

    def _bound(self, settings: ReplaySettings) -> float:
        """With random weights the scores of many experts are close, and rounding swaps some of them."""
        routed = any(node.op == "moe" for node in self.whole.networks["main"].nodes)
        return ROUNDED_BOUND if routed else logits_bound(settings)

    def _of_all_ranks(self, value: int) -> list[int]:
        values = torch.zeros(self.place.ranks, dtype=torch.int64, device=self.device)
        values[self.place.rank] = value
        dist.all_reduce(values)
        return values.tolist()


def measure_all(place: Place, meeting, options: argparse.Namespace) -> None:
    rank = Rank(place, meeting, options)
    results = E2eResults(BENCHMARK, options) if place.rank == 0 else None
    for batch in options.batch_size:
        rank.measure(batch, results)


def main(arguments: list[str] | None = None) -> int:
    return run_ranks(measure_all, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
