"""Serving with prompt-lookup drafts: replay state against `--buffer-len 0`, through the server's own scheduler.

    python benchmarks/serve_ngram.py --model nano4b --batch-size 256

What runs is `replayssm bench throughput` below its command line: continuous batching with prompt chunks beside decoding
rows, drafts from the text so far, captured steps that choose their tokens, snapshots that are copied back where the
state cannot roll back by itself. --batch-size requests are in flight at any time; each that ends makes room for a new
one. Figures are of --num-steps steps in a row, --warmup-steps after all slots decode, with all that lies between them:
every graph has been captured before. The shares say where that time went: the device at captured steps of decoding rows
and of prompts, and the host at anything but waiting for it, most of it while the device is busy.

Random weights write text that never repeats, and prompt lookup has nothing to propose. So a published name gets an
embedding and an output head with which the model walks through cycles of --period tokens, a different one for every
request, as far as its layers let it: the embedding is --copy-strength strong beside what the layers add, and a weak one
loses its way more often. Nothing is forced: drafts are what prompt lookup finds in such a text, and they stand where
the model's own greedy choice is the same token. --copy-strength 0 leaves the weights random. A line is correct if the
texts agree with those of the first variant for half of their length on average: greedy texts part where two tokens are
equally likely to within bf16, and do not meet again, while a fault would part them at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from e2e_model import Model, load_model
from e2e_natural import SAME_TOKENS
from e2e_results import E2eResults, add_common_options, device_of, model_fields
from e2e_run import Split, free_memory, percentile, profiled_split
from e2e_spec_decode_throughput import VARIANTS, settings_of

from replayssm.runtime.cuda_graphs import StepGraph, row_buckets, window_classes
from replayssm.runtime.prompt_graphs import PromptGraph
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.serving import settle_heap
from replayssm.runtime.session import PREFILL_CHUNK, Session
from replayssm.runtime.speculation import NgramDrafter

BENCHMARK = "serve_ngram"
NAMES = {"plain": "plain", "replay": "replay", "snapshots": "snapshots-ngram", "replay-speculation": "replay-ngram"}
HEAD_LOGIT = 10.0
"""Of a token whose row of the head points exactly along the hidden state; other logits are near 0."""


class RepeatingWeights(Mapping):
    """Weights of a random model, but for an output head that continues cycles of tokens.

    order: all tokens; `period` neighbours of it are a cycle, and a shorter rest keeps its own. Row order[i + 1] of the
    head is the direction of row order[i] of the embedding, whose elements have the standard deviation `strength`.
    """

    def __init__(self, model: Model, order: torch.Tensor, period: int, strength: float, device: torch.device) -> None:
        network = model.networks["main"]
        head = next(node for node in network.nodes if network.outputs["logits"] in node.outputs)
        embedding = next(node for node in network.nodes if node.op == "embedding")
        self._weights, self._head, self._embedding = model.weights, head.inputs[1], embedding.inputs[1]
        if self._head == self._embedding:
            raise ValueError(
                f"{model.name} shares embedding and head, which leaves no head to choose: --copy-strength 0"
            )
        self._order, self._period, self._strength, self._device = order, period, strength, device

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in (self._head, self._embedding):
            return self._weights[name]
        rows = self._weights[self._embedding]
        if name == self._embedding:
            return rows * (self._strength / rows[:1024].float().std())
        scale = HEAD_LOGIT / math.sqrt(rows.shape[1]) / rows[:1024].float().norm(dim=1).mean()
        head = torch.empty_like(rows)
        head[successors(self._order, self._period).to(rows.device)] = rows * scale
        return head

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def successors(order: torch.Tensor, period: int) -> torch.Tensor:
    """int64 [V]: the token behind each token in its cycle."""
    behind = torch.empty_like(order)
    for start in range(0, len(order), period):
        cycle = order[start : start + period]
        behind[cycle] = cycle.roll(-1)
    return behind


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, batch_sizes=[256], steps=600, warmup=40)
    parser.add_argument("--draft-len", type=int, default=4, help="drafts of a verify step; default 4")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of every prompt")
    parser.add_argument("--output-len", type=int, default=192, help="mean tokens of an answer, half to one and a half")
    parser.add_argument("--period", type=int, default=24, help="tokens of a cycle")
    parser.add_argument("--copy-strength", type=float, default=0.8, help="see above; 0: random")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args(arguments)
    if not 1 <= options.draft_len < options.buffer_len:
        parser.error(f"--draft-len must lie between 1 and --buffer-len - 1, got {options.draft_len}")
    return options


@dataclasses.dataclass
class Step:
    """One step of the scheduler, in seconds. wait_s: of it, blocked on the device. Counts are of what it settled."""

    wall_s: float
    wait_s: float
    tokens: int
    prompt_tokens: int


@dataclasses.dataclass
class Measured:
    """What the turns of one variant gave; counts are of the measured steps, texts of all requests by their number.

    elapsed_s: from the first measured step to the last, new requests included. device_s: of it, by the kind of captured
    step that the device was at. captured: steps that were captured meanwhile, which the time then includes.
    """

    elapsed_s: float = 0.0
    device_s: dict[str, float] = dataclasses.field(default_factory=dict)
    captured: int = 0
    steps: list[Step] = dataclasses.field(default_factory=list)
    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    texts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    split: Split | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.steps) / self.elapsed_s

    def shares(self) -> dict[str, float]:
        """Of the elapsed time: the device at captured steps of each kind, and the host not waiting for it."""
        seconds = {f"device_{kind}": seconds for kind, seconds in self.device_s.items()}
        seconds["host"] = self.elapsed_s - sum(step.wait_s for step in self.steps)
        return {f"{name}_share": round(value / self.elapsed_s, 4) for name, value in seconds.items()}

    def median_ms(self, field: str, mixed: bool) -> float | None:
        values = [getattr(step, field) for step in self.steps if (step.prompt_tokens > 0) == mixed]
        return round(1e3 * percentile(values, 0.5), 3) if values else None


def requests_of(session: Session, order: list[int], options: argparse.Namespace, seed: int) -> Iterator[Request]:
    """Endless: prompts that repeat a cycle, answers of uniformly distributed lengths.

    Those that fill the slots at first have the rest of an answer that began before, so that some end from the start.
    """
    choose, number = random.Random(seed), 0
    while True:
        start = choose.randrange(len(order) // options.period) * options.period
        cycle = order[start : start + options.period]
        first = choose.randrange(options.period)
        prompt = [cycle[(first + i) % options.period] for i in range(options.prompt_len)]
        length = choose.randint(options.output_len // 2, options.output_len * 3 // 2)
        number += 1
        if number <= session.slots:
            length = max(options.output_len // 8, choose.randint(1, length))
        params = SamplingParams(temperature=options.temperature, seed=number)
        yield Request.create(session, prompt, length, params, end_tokens=())


class DeviceClock:
    """Times captured steps on the device while it is active: `seconds` by kind, "decode" (and verify) or "prompt"."""

    LAUNCHES = (("decode", StepGraph), ("prompt", PromptGraph))

    def __init__(self, device: torch.device) -> None:
        self._device, self._spans, self._launches = device, [], {}

    def __enter__(self) -> DeviceClock:
        for kind, graph in self.LAUNCHES if self._device.type == "cuda" else ():
            self._launches[graph] = graph.launch
            graph.launch = self._timed(kind, graph.launch)
        return self

    def __exit__(self, *error) -> None:
        for graph, launch in self._launches.items():
            graph.launch = launch

    def _timed(self, kind: str, launch: Callable) -> Callable:
        def timed(graph):
            span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            span[0].record()
            result = launch(graph)
            span[1].record()
            self._spans.append((kind, *span))
            return result

        return timed

    def seconds(self) -> dict[str, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        for kind, begin, end in self._spans:
            totals[kind] = totals.get(kind, 0.0) + begin.elapsed_time(end) / 1e3
        return totals


def one_step(scheduler: Scheduler) -> Step:
    session, stats = scheduler.session, scheduler.stats
    wait, tokens, prompts, begin = session.wait_s, stats.generated_tokens, stats.prompt_tokens, time.perf_counter()
    scheduler.step()
    return Step(
        time.perf_counter() - begin,
        session.wait_s - wait,
        stats.generated_tokens - tokens,
        stats.prompt_tokens - prompts,
    )


def fill(scheduler: Scheduler, requests: Iterator[Request], made: list[Request]) -> None:
    """As many requests as there are slots."""
    for _ in range(scheduler.session.slots - len(scheduler.running) - len(scheduler.waiting)):
        made.append(scheduler.submit(next(requests)))


def is_filling(scheduler: Scheduler) -> bool:
    return bool(scheduler.waiting) or any(request.plan for request in scheduler.running)


def capture_steps(session: Session, temperature: float) -> None:
    """Every graph that a step of this benchmark may need, so that none is captured while it measures."""
    kind = SamplingParams(temperature=temperature).kind
    for rows in reversed(row_buckets(session.slots)):
        for window in reversed(window_classes(session.settings.max_window)):
            session.step_graph(rows, window, kind)
    session.capture_prompts()


def time_steps(scheduler: Scheduler, steps: int, refill: Callable[[], None], known: Measured) -> None:
    """Add `steps` steps, each followed by `refill`, to what is known."""
    session, before = scheduler.session, dataclasses.replace(scheduler.stats)
    captured = session.captured_steps
    with DeviceClock(session.device) as clock:
        begin = time.perf_counter()
        for _ in range(steps):
            known.steps.append(one_step(scheduler))
            refill()
        known.elapsed_s += time.perf_counter() - begin
    for kind, seconds in clock.seconds().items():
        known.device_s[kind] = known.device_s.get(kind, 0.0) + seconds
    known.captured += session.captured_steps - captured
    known.calls += scheduler.stats.decode_calls - before.decode_calls
    known.drafted += scheduler.stats.drafted_tokens - before.drafted_tokens
    known.accepted += scheduler.stats.accepted_tokens - before.accepted_tokens


def run_turn(variant: str, model: Model, order: list[int], batch: int, options: argparse.Namespace, known: Measured):
    """A session of the variant, filled, stepped --num-steps times and freed; the first turn also splits the time."""
    settings = settings_of(variant, options, options.prompt_len + options.output_len * 3 // 2 + 1)
    session = Session(model.engine(settings, batch), batch, device_of(options), graphs=True)
    capture_steps(session, options.temperature)
    scheduler = Scheduler(session, NgramDrafter() if settings.max_window > 1 else None)
    requests, made = requests_of(session, order, options, options.seed), []
    fill(scheduler, requests, made)
    while is_filling(scheduler):
        scheduler.step()
    for _ in range(options.warmup_steps):
        fill(scheduler, requests, made)
        scheduler.step()
    fill(scheduler, requests, made)
    refill = partial(fill, scheduler, requests, made)
    time_steps(scheduler, max(1, options.num_steps // options.repeats), refill, known)
    if known.split is None and not options.no_profile:
        while is_filling(scheduler):
            scheduler.step()
        known.split = profiled_split(scheduler.step, 6, session.device)
    for request in made:
        if request.error is not None:
            raise RuntimeError(request.error)
        known.texts[request.number] = max(known.texts.get(request.number, []), request.generated, key=len)
    scheduler.close()
    del scheduler, session, refill
    free_memory(device_of(options))


def measure(model: Model, order: list[int], batch: int, options: argparse.Namespace, results: E2eResults) -> None:
    measured = {variant: Measured() for variant in options.variants}
    turns = list(options.variants)
    for _ in range(options.repeats):
        for variant in turns:
            run_turn(variant, model, order, batch, options, measured[variant])
        turns.reverse()
    rates = {variant: one.tokens_per_s for variant, one in measured.items()}
    for variant, one in measured.items():
        print(f"{variant}: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in one.shares().items()))
        settings = settings_of(variant, options, options.prompt_len + options.output_len * 3 // 2 + 1)
        speculates, share = settings.max_window > 1, common_share(one.texts, next(iter(measured.values())).texts)
        results.add(
            op="serve",
            **model_fields(model, settings, batch, options),
            fill="continuous",
            variant=NAMES[variant],
            value=round(rates[variant], 1),
            unit="tokens/s",
            tokens_per_s=round(rates[variant], 1),
            speedup=round(rates[variant] / rates.get("plain", rates[variant]), 4),
            speedup_over_snapshots=round(rates[variant] / rates["snapshots"], 4) if "snapshots" in rates else None,
            drafts="ngram" if speculates else None,
            draft_len=options.draft_len if speculates else 0,
            acceptance_length=round(1 + one.accepted / one.calls, 4),
            acceptance_forced=None,
            drafts_per_call=round(one.drafted / one.calls, 4),
            copy_strength=options.copy_strength,
            period=options.period,
            prompt_len=options.prompt_len,
            output_len=options.output_len,
            prefill_chunk=PREFILL_CHUNK,
            temperature=options.temperature,
            steps=len(one.steps),
            rows_per_step=round(one.calls / len(one.steps), 1),
            elapsed_s=round(one.elapsed_s, 4),
            captured_meanwhile=one.captured,
            **one.shares(),
            mixed_steps=sum(step.prompt_tokens > 0 for step in one.steps),
            **{
                f"{kind}_{field}_ms": one.median_ms(f"{field}_s", kind == "mixed")
                for kind in ("captured", "mixed")
                for field in ("wall", "wait")
            },
            **gap_fields(one.split),
            same_tokens=round(share, 4),
            correct=share >= SAME_TOKENS,
        )


def common_share(ours: dict[int, list[int]], first: dict[int, list[int]]) -> float:
    """Mean share of a text before its first token that differs from the first variant's for the same request."""
    shares = []
    for number in ours.keys() & first.keys():
        pairs = list(zip(ours[number], first[number], strict=False))
        if pairs:
            shares.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(pairs))
    return sum(shares) / len(shares)


def gap_fields(split: Split | None) -> dict:
    if split is None:
        return {}
    return {
        "split_us": {name: round(value, 1) for name, value in split.classes.items()},
        "gap_us": round(split.gap_us, 1),
        "largest_gap_us": round(split.largest_gap_us, 2),
        "idle_us": round(split.idle_us, 1),
        "wide_gaps_us": split.wide_gaps,
    }


def main(arguments: list[str] | None = None) -> Path:
    options = parse(arguments)
    device = device_of(options)
    model = load_model(options.model, device, random_weights=options.random_weights, layers=options.layers)
    order = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(options.seed))
    if model.random and options.copy_strength:
        weights = RepeatingWeights(model, order, options.period, options.copy_strength, device)
        model = dataclasses.replace(model, weights=weights)
    results = E2eResults(BENCHMARK, options)
    settle_heap()
    for batch in options.batch_size:
        measure(model, order.tolist(), batch, options, results)
    return results.path


if __name__ == "__main__":
    main()
