"""Exact-match accuracy of an engine on the held-out problems of examples/tasks.py.

    python benchmarks/accuracy.py --engine ENGINE [--tier easy ...] [--limit 200] [--draft mtp] [--json]

Decoding is greedy for every engine, whatever its state format or drafts, so that a difference between two
engines is the engines'. The interval is Wilson's, 95 %. The acceptance length is the mean number of tokens
per verify (or decode) call, over all problems of the tier.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.commit import current_commit  # noqa: E402
from examples import tasks  # noqa: E402
from examples.evaluate import MAX_NEW_TOKENS, wilson  # noqa: E402

DEFAULT_MAX_NEW_TOKENS = 768


def load_session(folder: Path, slots: int | None, device: str) -> Any:
    """A session over the engine in `folder`."""
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.session import Session

    return Session(Engine.load(folder), slots=slots, device=device)


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def run_tier(session: Any, tier: str, count: int, draft: str, draft_len: int | None, advance: Any) -> dict[str, Any]:
    """Answer the first `count` held-out problems; `advance(n)` hears of n more being done."""
    from replayssm.runtime.generation import generate
    from replayssm.runtime.serving import make_drafter
    from replayssm.runtime.text import encode_chat

    tokenizer = session.engine.tokenizer
    limit = MAX_NEW_TOKENS.get(tier, DEFAULT_MAX_NEW_TOKENS)
    problems = tasks.held_out(tier, count)
    drafter = make_drafter(draft, session)
    right = tokens = calls = 0.0
    unfinished = 0
    began = time.perf_counter()
    # Groups only pace the progress bar; within one, slots are refilled as sequences end.
    for group in batches(problems, 4 * session.slots):
        prompts = [encode_chat(tokenizer, [{"role": "user", "content": p.question}]) for p in group]
        results = generate(session, prompts, limit, None, drafter, draft_len, tokenizer=tokenizer)
        for problem, result in zip(group, results, strict=True):
            right += tasks.is_correct(result.text, problem.answer)
            tokens += len(result.token_ids)
            unfinished += result.finish_reason != "stop"
            if result.acceptance_length:
                calls += (len(result.token_ids) - 1) / result.acceptance_length
        advance(len(group))
    low, high = wilson(int(right), count)
    return {
        "tier": tier,
        "count": count,
        "correct_answers": int(right),
        "value": right / count,
        "unit": "fraction exact",
        "interval_95": [round(low, 4), round(high, 4)],
        "mean_tokens": round(tokens / count, 2),
        "unfinished": unfinished,
        "acceptance_length": round((tokens - count) / calls, 4) if calls else None,
        "wall_s": round(time.perf_counter() - began, 2),
    }


def describe(session: Any, device: str) -> dict[str, Any]:
    """The fields every result line has."""
    import torch

    manifest, replay = session.engine.manifest, session.engine.manifest.replay
    commit = current_commit()
    return {
        "benchmark": "accuracy",
        "op": "generate",
        "variant": "ours" if replay.buffer_len else "plain",
        "model": manifest.model["name"],
        "engine": session.engine.directory.name,
        "target": manifest.target,
        "state_dtype": replay.state_dtype,
        "state_rounding": replay.state_rounding,
        "readout_dtype": replay.readout_dtype,
        "u_source": replay.u_source,
        "L": replay.buffer_len,
        "batch": session.slots,
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def show(results: list[dict[str, Any]], console: Any) -> None:
    """Results as a table."""
    from rich.table import Table

    table = Table("tier", "right", "of", "accuracy", "95 %", "tokens", "tokens per call", "cut off")
    for r in results:
        low, high = r["interval_95"]
        table.add_row(
            r["tier"],
            str(r["correct_answers"]),
            str(r["count"]),
            f"{r['value']:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{r['mean_tokens']:.0f}",
            "" if r["acceptance_length"] is None else f"{r['acceptance_length']:.2f}",
            str(r["unfinished"]),
        )
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, required=True, help="engine directory")
    parser.add_argument(
        "--tier",
        dest="tiers",
        nargs="+",
        choices=list(tasks.GENERATORS),
        default=list(tasks.TIERS),
    )
    parser.add_argument("--limit", type=int, default=1000, help="problems per tier")
    parser.add_argument("--draft", choices=("none", "ngram", "mtp"), default="none")
    parser.add_argument("--draft-len", type=int, help="default: the engine's max_draft_len")
    parser.add_argument("--slots", type=int, help="default: the engine's max_batch_size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    args = parser.parse_args(arguments)
    if args.limit < 1:
        parser.error("--limit must be at least 1")
    if args.draft_len is not None and args.draft == "none":
        parser.error("--draft-len needs --draft ngram or --draft mtp")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=args.json)
    session = load_session(args.engine, args.slots, args.device)
    common = describe(session, args.device) | {"draft": args.draft, "draft_len": args.draft_len}
    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for tier in args.tiers:
            task = bar.add_task(tier, total=args.limit)
            result = run_tier(
                session,
                tier,
                args.limit,
                args.draft,
                args.draft_len,
                lambda n, task=task: bar.advance(task, n),
            )
            results.append(common | result)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    if args.json:
        print(json.dumps({**common, "tiers": results}))
    else:
        show(results, console)


if __name__ == "__main__":
    main()
