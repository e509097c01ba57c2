"""Whole decode steps: replay state against the plain per-token state update, on one host.

    python benchmarks/e2e_decode_speedup.py --model nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16
    python benchmarks/e2e_decode_speedup.py --model Qwen/Qwen3.5-4B --batch-size 1 --batch-size 256

--model takes an engine directory, a Hugging Face checkpoint directory, or the name of a published model, whose shape
then gets random weights. Both variants run in one process and in turns, through the same captured steps: only the
state kernels differ. Before anything is timed, both are fed the same tokens and their logits compared.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from e2e_model import Model
from e2e_results import E2eResults, add_common_options, device_of, measured_ceiling, model_fields, model_of, roofline
from e2e_run import Run, Split, free_memory, interleaved, percentile, split_time

from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.traffic import traffic_per_token

BENCHMARK = "e2e_decode_speedup"
LOGITS_BOUND = 0.1
"""Relative distance of two variants' logits, in the Euclidean norm. bf16 activations keep 2^-9 relative; dozens of
layers of random weights carry differences on and add to them, to some 1e-2. What the distance is where the context is
lost altogether, near 1, stands beside it as `logits_distance_without_context`."""
ROUNDED_BOUND = 0.5
"""The same where the state itself is rounded to 16, 8 or 4 bits: random weights carry that on and add to it, but half
of what a lost context gives would be a fault. Their accuracy is a matter of trained models (benchmarks/accuracy.py)."""
FP8_BOUND = 0.7
"""The same where products round their inputs to the three bits of FP8, which turns the least differences into 2^-4:
half of the 1.4 that a lost context gives."""
COMPARED_STEPS = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, batch_sizes=[256], steps=1000, warmup=128)
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--sessions", type=int, default=1, help="run the steps in this many fresh sessions, one by one")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="STATE:READOUT:ROUNDING",
        help="further replay variants, such as float16:nvfp4:stochastic; may be given several times",
    )
    return parser.parse_args(arguments)


def variants(options: argparse.Namespace, max_seq_len: int) -> dict[str, ReplaySettings]:
    """Settings by name; the first is what the others are compared with."""
    plain = ReplaySettings(
        buffer_len=0,
        max_window=1,
        max_seq_len=max_seq_len,
        state_dtype=options.state_dtype,
        state_rounding=options.state_rounding,
    )
    replay = dataclasses.replace(
        plain, buffer_len=options.buffer_len, readout_dtype=options.readout_dtype
    ).with_u_format()
    found = {"plain": plain, "replay": replay}
    for text in options.also:
        found[f"replay-{text.replace(':', '-')}"] = low_precision(replay, text)
    return found


def low_precision(replay: ReplaySettings, text: str) -> ReplaySettings:
    """`replay` with the formats of an --also."""
    try:
        state, readout, rounding = text.split(":")
    except ValueError:
        raise ValueError(
            f"--also takes STATE:READOUT:ROUNDING, such as float16:nvfp4:stochastic, got {text!r}"
        ) from None
    formats = {"state_dtype": state, "readout_dtype": readout, "state_rounding": rounding}
    return dataclasses.replace(replay, **formats).with_u_format()


def logits_bound(settings: ReplaySettings, model: Model | None = None) -> float:
    if model is not None and model.fp8_elements:
        return FP8_BOUND
    return LOGITS_BOUND if (settings.state_dtype, settings.readout_dtype) == ("float32", "same") else ROUNDED_BOUND


def compare(runs: dict[str, Run], vocab_size: int) -> dict[str, float]:
    """Relative distance of every run's logits from the first one's, over the same tokens."""
    generator = torch.Generator().manual_seed(2)
    worst = dict.fromkeys(runs, 0.0)
    for _ in range(COMPARED_STEPS):
        batch = next(iter(runs.values())).batch
        tokens = torch.randint(vocab_size, (batch,), generator=generator)
        expected = None
        for name, run in runs.items():
            logits = run.force(tokens)
            if expected is None:
                expected = logits
            worst[name] = max(worst[name], float((logits - expected).norm() / expected.norm()))
    return worst


def distance_without_context(run: Run, vocab_size: int) -> float:
    """How far logits move if the same tokens begin a sequence. Ruins the run's state."""
    tokens = torch.randint(vocab_size, (run.batch,), generator=torch.Generator().manual_seed(3))
    expected = run.force(tokens)
    run.graph.device_inputs["seq_lens"].zero_()
    return float((run.force(tokens) - expected).norm() / expected.norm())


def measure(model: Model, batch: int, options: argparse.Namespace, results: E2eResults) -> None:
    device, cycle = device_of(options), options.buffer_len
    steps, warmup = (-(-count // cycle) * cycle for count in (options.num_steps, options.warmup_steps))
    profiled = 0 if options.no_profile else min(cycle, 8)
    max_seq_len = options.prompt_len + cycle + COMPARED_STEPS + 1 + warmup + steps + profiled + cycle
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(model.vocab_size, (batch, options.prompt_len), generator=generator).tolist()
    chosen = variants(options, max_seq_len)
    runs: dict[str, Run] = {}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    distances = dict.fromkeys(chosen, 0.0)
    for _ in range(options.sessions):  # each at the same contexts as the others
        close(runs, device)
        runs.update((name, Run(model, settings, prompts, device)) for name, settings in chosen.items())
        for run in runs.values():
            run.desynchronise(model.vocab_size, cycle)
        for name, distance in compare(runs, model.vocab_size).items():
            distances[name] = max(distances[name], distance)
        for run in runs.values():
            run.time(warmup, cycle)
        for name, seconds in interleaved(runs, steps, cycle, options.repeats).items():
            times[name] += seconds
        for run in runs.values():
            run.check()
    splits = {name: split_time(run, profiled) if profiled else None for name, run in runs.items()}
    without_context = distance_without_context(runs["plain"], model.vocab_size)
    ceiling = measured_ceiling(device)
    first = percentile(times["plain"], 0.5)
    for name, run in runs.items():
        ratios = [plain / own for plain, own in zip(times["plain"], times[name], strict=True)]
        results.add(
            op="decode_step",
            **model_fields(model, run.settings, batch, options),
            fill="desync",
            variant=name,
            **timing_fields(times[name], batch),
            cycles=len(times[name]),
            **run.clock_fields(),
            speedup=round(first / percentile(times[name], 0.5), 4),
            speedup_p10=round(percentile(ratios, 0.1), 4),
            speedup_p90=round(percentile(ratios, 0.9), 4),
            **split_fields(splits[name], percentile(times[name], 0.5)),
            **prediction(model, run.settings, batch, splits.get("plain"), ceiling),
            **roofline(model, batch, ceiling),
            context=[options.prompt_len, max_seq_len],
            state_bytes=run.session.state_bytes,
            gpu_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            logits_distance=round(distances[name], 5),
            logits_distance_without_context=round(without_context, 3),
            correct=distances[name] < logits_bound(run.settings, model),
        )
    close(runs, device)


def close(runs: dict[str, Run], device: torch.device) -> None:
    """Forget the runs and give their memory back."""
    for run in runs.values():
        run.close()
    runs.clear()
    free_memory(device)


def timing_fields(times: list[float], tokens: float) -> dict:
    """tokens: that one step yields on average."""
    median = percentile(times, 0.5)
    return {
        "median_us": round(1e6 * median, 1),
        "p10_us": round(1e6 * percentile(times, 0.1), 1),
        "p90_us": round(1e6 * percentile(times, 0.9), 1),
        "tokens_per_s": round(tokens / median, 1),
    }


def split_fields(split: Split | None, step_s: float) -> dict:
    """Microseconds of the state kernels and of the rest of a step, kernel times and what lies between them."""
    if split is None:
        return {}
    ssm = split.classes.get("ssm", 0.0)
    return {
        "ssm_us": round(ssm, 1),
        "rest_us": round(1e6 * step_s - ssm, 1),
        "split_us": {name: round(value, 1) for name, value in sorted(split.classes.items())},
        "kernels_per_step": split.kernels,
        "gap_us": round(split.gap_us, 1),
        "largest_gap_us": round(split.largest_gap_us, 2),
        "top_kernels_us": split.top,
    }


def prediction(model: Model, settings: ReplaySettings, batch: int, plain: Split | None, ceiling: float | None) -> dict:
    """The traffic model's time for the recurrent layers, and the speedup if all else took what it took beside plain."""
    traffic = traffic_per_token(model.geometries, settings, 0, 1.0)
    moved = traffic.plain if settings.is_baseline else traffic.replay
    fields = {"traffic_bytes_per_token": round(moved)}
    if ceiling is None or plain is None:
        return fields
    rest = plain.rest_us - plain.classes.get("conv", 0.0)
    times = [rest + 1e6 * batch * value / ceiling for value in (traffic.plain, moved)]
    return {
        **fields,
        "predicted_recurrent_us": round(1e6 * batch * moved / ceiling, 1),
        "predicted_speedup": round(times[0] / times[1], 4),
    }


def main(arguments: list[str] | None = None) -> Path:
    options = parse(arguments)
    model = model_of(options)
    results = E2eResults(BENCHMARK, options)
    for batch in options.batch_size:
        measure(model, batch, options, results)
    return results.close()


if __name__ == "__main__":
    main()
