"""Training data: problems drawn from the train split, packed into rows, written as numbered shards.

A shard is a numpy file of uint16 [rows, ROW_TOKENS + 2] and depends on its number and the code alone.
Documents are packed best-fit; a document starts with <|begin|>, and the network resets its state and
attention there. Two columns more than the network reads hold the targets of the last positions.
"""

from __future__ import annotations

import argparse
import bisect
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples import tasks
from examples.tokenizer import END, PAD, prompt_ids

ROW_TOKENS = 2304  # 18 chunks of 128 and 36 of 64; the longest document has about 2,150 tokens
SHARD_ROWS = 512

# Documents of each tier out of 15; `recall` is one in 15 and still a fifth of the tokens.
MIXTURE = {"easy": 3, "medium": 3, "hard": 2, "long": 2, "track": 2, "recall": 1, "gsm": 2}


def document(tokenizer: Tokenizer, problem: tasks.Problem) -> list[int]:
    """<|begin|><|user|>question<|assistant|>working<|end|> as ids."""
    working = tokenizer.encode(problem.working, add_special_tokens=False).ids
    return [*prompt_ids(tokenizer, problem.question), *working, END]


def pack(documents: list[list[int]], rows: int, width: int) -> np.ndarray:
    """Best-fit decreasing into `rows` rows of `width`; what fits nowhere is left out."""
    room = [(width, i) for i in range(rows)]
    filled: list[list[int]] = [[] for _ in range(rows)]
    for doc in sorted(documents, key=len, reverse=True):
        at = bisect.bisect_left(room, (len(doc), -1))
        if at < len(room):
            left, row = room.pop(at)
            filled[row].extend(doc)
            bisect.insort(room, (left - len(doc), row))
    out = np.full((rows, width), PAD, dtype=np.uint16)
    for i, row in enumerate(filled):
        out[i, : len(row)] = row
    return out


def make_shard(tokenizer: Tokenizer, number: int, rows: int = SHARD_ROWS) -> np.ndarray:
    """Shard `number`: seeds number * 2^20 and up of every tier, rows in random order."""
    rng = random.Random(f"shard/{number}")
    width = ROW_TOKENS + 2
    names, weights = list(MIXTURE), list(MIXTURE.values())
    documents: list[list[int]] = []
    tokens, seed = 0, number << 20
    while tokens < rows * width:
        tier = rng.choices(names, weights)[0]
        documents.append(document(tokenizer, tasks.generate(tier, "train", seed)))
        tokens += len(documents[-1])
        seed += 1
    packed = pack(documents, rows, width)
    rng_rows = np.random.default_rng(number)
    return packed[rng_rows.permutation(rows)]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npy"


def write_shard(tokenizer_file: str, folder: str, number: int, rows: int) -> int:
    """Write one shard unless it is there; the rename makes it appear whole."""
    path = shard_path(Path(folder), number)
    if not path.exists():
        shard = make_shard(Tokenizer.from_file(tokenizer_file), number, rows)
        partial = path.with_suffix(f".{os.getpid()}.part")
        with partial.open("wb") as file:
            np.save(file, shard)
        partial.rename(path)
    return number


def load_shard(folder: Path, number: int, patience_s: float = 120.0) -> np.ndarray:
    """Shard `number`, waiting for the writer if need be."""
    path = shard_path(folder, number)
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not appear: run `python -m examples.data` first")
        time.sleep(0.05)
    return np.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--rows", type=int, default=SHARD_ROWS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    jobs = [(args.tokenizer, str(args.folder), n, args.rows) for n in range(args.first, args.first + args.count)]
    with multiprocessing.Pool(args.workers) as pool:
        pool.starmap(write_shard, jobs, chunksize=1)


if __name__ == "__main__":
    main()
