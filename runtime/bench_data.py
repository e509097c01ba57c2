"""Data sets of benchmarks, in the JSON lines format of trtllm-bench.

One object a line: `{"task_id": int, "input_ids": [int, ...], "output_tokens": int}`, or `prompt` (text) in place of
`input_ids`. `logits` is an older name of `input_ids`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm.runtime.json_lines import read_json_lines

_UNSUPPORTED = ("lora_request", "turns", "media_paths")


@dataclass(frozen=True)
class Sample:
    """A request of a data set: token ids in, and how many tokens to generate."""

    task_id: int
    input_ids: list[int]
    output_tokens: int

    def to_line(self) -> str:
        value = {"task_id": self.task_id, "input_ids": self.input_ids, "output_tokens": self.output_tokens}
        return json.dumps(value, separators=(",", ":"))


def read_dataset(path: Path, tokenizer: Any = None, limit: int = 0) -> list[Sample]:
    """The first `limit` samples of a file, all for 0. Prompts in text need `tokenizer`.

    Raises ValueError, naming the line, for anything that is not such a file.
    """
    example = Sample(0, [5, 6], 16).to_line()
    samples = read_json_lines(path, lambda value: _parse(value, tokenizer), limit, example)
    if not samples:
        raise ValueError(f"{path} holds no requests: make a data set with `replayssm bench prepare-dataset`")
    return samples


def _parse(value: dict[str, Any], tokenizer: Any) -> Sample:
    for name in _UNSUPPORTED:
        if value.get(name) is not None:
            raise ValueError(f"{name} is not supported")
    for name in ("task_id", "output_tokens"):
        if not isinstance(value.get(name), int):
            raise ValueError(f"expected an integer {name}, got {value.get(name)!r}")
    if value["output_tokens"] < 1:
        raise ValueError(f"output_tokens must be at least 1, got {value['output_tokens']}")
    ids = value.get("input_ids") or value.get("logits")
    if ids is None:
        if not isinstance(value.get("prompt"), str) or tokenizer is None:
            raise ValueError("expected input_ids, or a prompt and a tokenizer")
        ids = tokenizer(value["prompt"])["input_ids"]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError("input_ids must be a list of at least one integer")
    return Sample(value["task_id"], list(ids), value["output_tokens"])


def random_samples(
    inputs: Iterable[float], outputs: Iterable[float], vocab_size: int, avoid: Sequence[int], seed: int
) -> Iterator[Sample]:
    """Samples of random tokens, none of them in `avoid`, with these lengths rounded up and at least 1."""
    choose, avoided = random.Random(seed), frozenset(avoid)
    for task_id, (length, output) in enumerate(zip(inputs, outputs, strict=True)):
        ids = []
        while len(ids) < max(1, math.ceil(length)):
            token = choose.randrange(vocab_size)
            if token not in avoided:
                ids.append(token)
        yield Sample(task_id, ids, max(1, math.ceil(output)))
