"""Accuracy per tier and MTP acceptance of a checkpoint, with the plain decoder of examples/decode.py."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from examples import decode, networks, tasks
from examples.export import load
from examples.networks import HybridLM
from examples.tokenizer import END, prompt_ids

MAX_NEW_TOKENS = {"marathon": 1600}  # 768 for the others


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion."""
    if count == 0:
        return 0.0, 1.0
    rate = successes / count
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    half /= 1 + z * z / count
    return max(0.0, middle - half), min(1.0, middle + half)


def acceptance(model: HybridLM, outputs: list[list[int]], prompts: list[int], rows: int = 8) -> tuple[int, int]:
    """(tokens, verify steps) summed over greedy outputs that ended."""
    device = next(model.parameters()).device
    done = [(o, p) for o, p in zip(outputs, prompts, strict=True) if o[-1] == END]
    done.sort(key=lambda pair: len(pair[0]))
    tokens = steps = 0
    for start in range(0, len(done), rows):
        part = done[start : start + rows]
        width = max(len(o) for o, _ in part) + 2
        ids = torch.zeros(len(part), width, dtype=torch.long)
        for i, (o, _) in enumerate(part):
            ids[i, : len(o)] = torch.tensor(o)
        hits = decode.draft_hits(model, ids.to(device)).tolist()
        for row, (o, p) in zip(hits, part, strict=True):
            t, s = decode.count_verifies(row, p, len(o))
            tokens, steps = tokens + t, steps + s
    return tokens, steps


def evaluate_tier(
    model: HybridLM,
    tokenizer: Tokenizer,
    tier: str,
    count: int,
    state_format: str = "fp32",
    drafted: int = 200,
) -> dict:
    """Greedy answers to the first `count` held-out problems; acceptance over the first `drafted`."""
    device = next(model.parameters()).device.type
    problems = tasks.held_out(tier, count)
    prompts = [prompt_ids(tokenizer, p.question) for p in problems]
    longest = max(len(p) for p in prompts)
    limit = MAX_NEW_TOKENS.get(tier, 768)
    began = time.monotonic()
    decoder = decode.Decoder(model, count, longest + limit, device, state_format)
    outputs = decoder.generate(prompts, limit)
    texts = [tokenizer.decode(o[len(p) :]) for o, p in zip(outputs, prompts, strict=True)]
    right = sum(tasks.is_correct(t, p.answer) for t, p in zip(texts, problems, strict=True))
    low, high = wilson(right, count)
    result = {
        "tier": tier,
        "count": count,
        "correct_answers": right,
        "accuracy": right / count,
        "interval_95": [round(low, 4), round(high, 4)],
        "mean_tokens": sum(len(o) - len(p) for o, p in zip(outputs, prompts, strict=True)) / count,
        "decode_s": round(time.monotonic() - began, 2),
    }
    if drafted:
        tokens, steps = acceptance(model, outputs[:drafted], [len(p) for p in prompts[:drafted]])
        result["tokens_per_verify"] = round(tokens / max(1, steps), 4)
        result["draft_length"] = networks.MTP_DEPTH
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=list(networks.LAYOUTS), required=True)
    parser.add_argument("--tiers", nargs="+", default=list(tasks.GENERATORS))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--activations", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--state", nargs="+", default=["fp32"], help="fp32 bf16 fp16 fp8")
    parser.add_argument("--drafted", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.activations == "bf16" else torch.float32
    model = load(args.folder, args.layout, dtype).to(device)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    for state in args.state:
        for tier in args.tiers:
            drafted = args.drafted if state == "fp32" else 0
            result = evaluate_tier(model, tokenizer, tier, args.count, state, drafted)
            record = {
                "benchmark": "accuracy",
                "op": "generate",
                "model": args.layout,
                "variant": "plain torch recurrence",
                "activations": args.activations,
                "state_dtype": state,
                **result,
                "value": result["accuracy"],
                "unit": "fraction exact",
                "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "commit": args.commit,
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            }
            print(json.dumps(record), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
