"""Exact-match accuracy of every state format on the example models.

    python benchmarks/format_accuracy.py --layout nemotron-h-tiny [--limit 1024] [--output FILE]

All problems of a group of tiers are decoded at once, greedily, with L = 16: on a GPU through engines and their kernels,
and with --simulate, or without a GPU, by `examples.replay_decode`, which also knows a 4-bit state that no engine
offers. Differences are against float32 on the same problems; their interval is the normal one of paired proportions,
95 %. `benchmarks/accuracy.py` serves an engine's problems instead, one format at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from e2e_model import Model, load_model  # noqa: E402
from report_formats import ONE_U  # noqa: E402

from examples import networks, tasks  # noqa: E402
from examples.evaluate import wilson  # noqa: E402
from examples.export import load  # noqa: E402
from examples.replay import BUFFER_LEN  # noqa: E402
from examples.replay_decode import ReplayDecoder  # noqa: E402
from examples.state_formats import StateFormat  # noqa: E402
from examples.tokenizer import END, prompt_ids  # noqa: E402
from replayssm.plugins.settings import STATE_DTYPES, ReplaySettings  # noqa: E402
from replayssm.runtime.session import Row, Session  # noqa: E402

FORMATS = (
    StateFormat("float32"),
    StateFormat("float16", True, "nvfp4"),
    StateFormat("float8", True, "nvfp4"),
    StateFormat("nvfp4"),
    StateFormat("float8", True),
    StateFormat("float8"),
    StateFormat("float16", True, "float8"),
    StateFormat("float16"),
    StateFormat("float16", True),
    StateFormat("float16", True, "nvfp4", "checkpoint"),
    StateFormat("float8", True, "nvfp4", "checkpoint"),
    StateFormat("float32", False, "nvfp4"),
    StateFormat("bfloat16"),
    StateFormat("bfloat16", True),
    # eight bits in the layer that `calibrate --by-layer` finds
    StateFormat("float16", True, "nvfp4", "readout", ((0, "float8"),)),
    StateFormat("float8", True, "nvfp4", "readout", ((0, "same"),)),
)

PREFILL_TOKENS = 8192  # of a step that reads prompts
# Tiers that are decoded together, and the most tokens an answer may have (an answer of the tiers is never longer).
GROUPS = ((("long", "tangle"), 704), (("easy", "track", "gsm"), 368), (("recall",), 208))


def paired(ours: Sequence[bool], theirs: Sequence[bool], z: float = 1.96) -> tuple[float, float, float]:
    """(difference of two proportions over the same problems, its 95 % interval)."""
    count = len(ours)
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    difference = (gained - lost) / count
    half = z * math.sqrt(max(gained + lost - (gained - lost) ** 2 / count, 0.0)) / count
    return difference, difference - half, difference + half


def load_problems(path: Path | None, tiers: Sequence[str], limit: int) -> dict[str, list[tasks.Problem]]:
    """Held-out problems of each tier; from a file that `--write-problems` made where generators are not installed."""
    if path is None:
        return {tier: tasks.held_out(tier, limit) for tier in tiers}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {tier: [tasks.Problem(**fields) for fields in stored[tier][:limit]] for tier in tiers}


def compiled(function: Callable) -> Callable:
    import torch._dynamo
    import torch._inductor.config

    # Otherwise a compiled float32 -> float16 -> float32 rounds nothing.
    torch._inductor.config.emulate_precision_casts = True

    torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
    return torch.compile(function, dynamic=False)


def replay_settings(form: StateFormat, max_seq_len: int = 4096, seed: int = 0) -> ReplaySettings:
    """Of an engine of this format, which keeps u of Gated DeltaNet as engines do unless told otherwise."""
    return ReplaySettings(
        buffer_len=BUFFER_LEN,
        max_window=1,
        max_seq_len=max_seq_len,
        state_dtype=form.state,
        state_rounding="stochastic" if form.stochastic else "nearest",
        readout_dtype=form.readout,
        u_source=form.u_source,
        readout_layers=form.readout_layers,
        rounding_seed=seed,
    ).with_u_format()


class EngineDecoder:
    """As `examples.replay_decode.ReplayDecoder`, with an engine of each format and its operators on `device`."""

    def __init__(
        self, model: Model, prompts: list[list[int]], new_tokens: int, seed: int, device: torch.device
    ) -> None:
        self.model, self.prompts, self.new_tokens, self.seed, self.device = model, prompts, new_tokens, seed, device

    def prefill(self) -> None:
        """Nothing: every format stores what it makes of the prompts."""

    def decode(self, form: StateFormat) -> list[list[int]]:
        """Answers (new tokens) to all prompts, each with its <|end|> if it came in time."""
        settings = replay_settings(form, max(map(len, self.prompts)) + self.new_tokens, self.seed)
        session = Session(self.model.engine(settings, len(self.prompts)), device=self.device)
        slots = [session.allocate() for _ in self.prompts]
        together = max(1, PREFILL_TOKENS // max(map(len, self.prompts)))
        for start in range(0, len(slots), together):
            part = slice(start, start + together)
            pairs = zip(slots[part], self.prompts[part], strict=True)
            session.step([Row(slot, prompt[:-1], "none") for slot, prompt in pairs])
        steps, has_ended = [], numpy.zeros(len(slots), bool)
        for chosen in session.decode_ahead(slots, [prompt[-1] for prompt in self.prompts], self.new_tokens):
            steps.append(numpy.array(chosen))
            has_ended |= steps[-1] == END
            if has_ended.all():
                break
        tokens = numpy.stack(steps, axis=1)
        lengths = numpy.where(has_ended, (tokens == END).argmax(axis=1) + 1, tokens.shape[1])
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def describe(layout: str, form: StateFormat, args: argparse.Namespace) -> dict[str, Any]:
    keeps_u = not args.simulate and layout != "nemotron-h-tiny"
    u_format = {"u_format": replay_settings(form).u_format} if keeps_u else {}
    return {
        "benchmark": "format_accuracy",
        "op": "generate",
        "variant": "ours, simulated" if args.simulate else "ours",
        "model": layout,
        "format": form.name + (ONE_U if u_format.get("u_format") == "bfloat16" else ""),
        "state_dtype": form.state,
        "state_rounding": "stochastic" if form.stochastic else "nearest",
        "readout_dtype": form.readout,
        "u_source": form.u_source,
        "readout_layers": dict(form.readout_layers),
        **u_format,
        "L": BUFFER_LEN,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": args.commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


Answers = Iterator[tuple[StateFormat, list[list[int]], float]]


def make_decoder(model: networks.HybridLM | Model, prompts: list[list[int]], new_tokens: int, args: argparse.Namespace):
    if not args.simulate:
        return EngineDecoder(model, prompts, new_tokens, args.seed, args.device)
    wrap = None if args.eager or args.device.type == "cpu" else compiled
    return ReplayDecoder(model, prompts, new_tokens, args.seed, wrap)


def answer(
    model: networks.HybridLM | Model,
    problems: list[tasks.Problem],
    new_tokens: int,
    tokenizer: Any,
    args: argparse.Namespace,
) -> Answers:
    """(format, answers to all problems, seconds), float32 first; formats for which time runs out are left out."""
    prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    answers: dict[StateFormat, list[list[int]]] = {form: [] for form in args.formats}
    seconds = dict.fromkeys(args.formats, 0.0)
    size = args.rows or len(prompts)
    for start in range(0, len(prompts), size):
        decoder = make_decoder(model, prompts[start : start + size], new_tokens, args)
        decoder.prefill()
        for form, outputs in answers.items():
            if time.monotonic() > args.deadline:
                return
            began = time.monotonic()
            outputs += decoder.decode(form)
            seconds[form] += time.monotonic() - began
            if len(outputs) == len(prompts):
                yield form, outputs, seconds[form]
        print(f"{start + len(prompts[start : start + size])} of {len(prompts)}", file=sys.stderr, flush=True)


def group_lines(
    answers: Answers, problems: list[tasks.Problem], tokenizer: Any, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One line per format and tier."""
    tiers: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        tiers.setdefault(problem.tier, []).append(index)
    exact: list[list[int]] = []
    base: dict[str, list[bool]] = {}
    for form, outputs, seconds in answers:
        exact = exact or outputs
        for tier, own in tiers.items():
            texts = tokenizer.decode_batch([outputs[index] for index in own])
            right = [tasks.is_correct(text, problems[index].answer) for text, index in zip(texts, own, strict=True)]
            difference, low, high = paired(right, base.setdefault(tier, right))
            yield {
                **describe(args.layout, form, args),
                "tier": tier,
                "count": len(own),
                "correct_answers": sum(right),
                "value": sum(right) / len(own),
                "unit": "fraction exact",
                "interval_95": [round(bound, 4) for bound in wilson(sum(right), len(own))],
                "difference": round(difference, 5),
                "difference_interval_95": [round(low, 5), round(high, 5)],
                "same_tokens": round(sum(outputs[index] == exact[index] for index in own) / len(own), 4),
                "mean_tokens": round(sum(len(outputs[index]) for index in own) / len(own), 2),
                "decode_s": round(seconds, 2),
            }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=list(networks.LAYOUTS))
    parser.add_argument("--limit", type=int, default=1024, help="problems per tier")
    parser.add_argument("--groups", type=int, nargs="+", default=list(range(len(GROUPS))))
    parser.add_argument("--tiers", nargs="+", help="only these of the groups")
    parser.add_argument("--rows", type=int, help="problems at a time; default: all of a group")
    parser.add_argument("--formats", type=int, nargs="+", help="indices into FORMATS; 0 must be the first")
    parser.add_argument("--examples", type=Path, help="folder of the example checkpoints, where it is not this one's")
    parser.add_argument("--problems", type=Path, help="read the problems from this file")
    parser.add_argument("--write-problems", type=Path, help="only write them")
    parser.add_argument("--stop-after-s", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0, help="of stochastic rounding")
    parser.add_argument("--simulate", action="store_true", help="PyTorch instead of engines; implied without a GPU")
    parser.add_argument("--eager", action="store_true", help="with --simulate: do not compile")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args(arguments)
    args.deadline = time.monotonic() + args.stop_after_s
    args.formats = FORMATS if args.formats is None else [FORMATS[index] for index in args.formats]
    if args.formats[0] != FORMATS[0]:
        parser.error("differences are against float32, so 0 must be the first of --formats")
    if args.layout is None and args.write_problems is None:
        parser.error("--layout is needed")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tiers = args.tiers or [tier for index in args.groups for tier in GROUPS[index][0]]
    problems = load_problems(args.problems, tiers, args.limit)
    if args.write_problems:
        stored = {tier: [vars(problem) for problem in own] for tier, own in problems.items()}
        args.write_problems.write_text(json.dumps(stored), encoding="utf-8")
        return
    from tokenizers import Tokenizer

    args.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    args.simulate |= args.device.type == "cpu"
    folder = (args.examples or ROOT / "examples") / args.layout
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if args.simulate:
        model = load(folder, args.layout, torch.bfloat16).to(args.device)
    else:
        model = load_model(str(folder), args.device)
        args.formats = [form for form in args.formats if form.state in STATE_DTYPES]
    if args.layout == "nemotron-h-tiny":
        args.formats = [form for form in args.formats if form.u_source == "readout" and not form.readout_layers]
    for index in args.groups:
        own, new_tokens = GROUPS[index]
        group = [problem for tier in own if tier in tiers for problem in problems[tier]]
        answers = answer(model, group, new_tokens, tokenizer, args)
        for line in group_lines(answers, group, tokenizer, args):
            print(
                f"{line['tier']:7s} {line['format']:46s} {line['value']:.4f} {line['difference']:+.4f} "
                f"{line['difference_interval_95']} same {line['same_tokens']:.3f} {line['decode_s']} s",
                flush=True,
            )
            if args.output:
                with args.output.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
