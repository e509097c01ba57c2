"""Train one of the two checkpoints; resumable at any step, bit-equal to an uninterrupted run.

    python -m examples.tokenizer work/tokenizer
    python -m examples.data work/shards --tokenizer work/tokenizer/tokenizer.json --count 313
    python -m examples.train qwen3.5-tiny --work work --stop-after-s 480    # again to go on

Rows are packed documents (examples/data.py); the seed of the weights and the order of the data are fixed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples import data, networks, optim
from examples.export import export
from examples.model import Rows
from examples.networks import HybridLM


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, apart from the code."""

    layout: str
    steps: int = 5000
    rows: int = 32
    warmup: int = 200
    lr: float = 3e-3
    seed: int = 1
    shard_count: int = 480
    shard_rows: int = data.SHARD_ROWS


class RowSource:
    """Rows of step s: the same for every run, wherever it starts."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        self.number, self.shard = -1, np.empty(0)

    def __call__(self, step: int) -> Tensor:
        """int64 [rows, ROW_TOKENS + 2] on the CPU."""
        r = self.recipe
        per_shard = r.shard_rows // r.rows
        number = step // per_shard % r.shard_count
        if number != self.number:
            self.number, self.shard = number, data.load_shard(self.folder, number)
        start = step % per_shard * r.rows
        return torch.from_numpy(self.shard[start : start + r.rows].astype(np.int64))


class Trainer:
    """Model, optimizers, step count; saves and loads itself."""

    def __init__(self, recipe: Recipe, device: str, compiled: bool = False, model: HybridLM | None = None) -> None:
        self.recipe, self.device, self.compiled = recipe, device, compiled
        torch.manual_seed(recipe.seed)
        self.model = model or networks.LAYOUTS[recipe.layout]()
        self.model.reset(recipe.seed)
        self.model.to(device)
        self.optimizers = optim.make_optimizers(self.model, recipe.lr)
        self.step = 0
        self.segment: Tensor | None = None
        if compiled:
            torch.set_float32_matmul_precision("high")
            for block in self.model.blocks:
                block.compile(dynamic=False)
            self.model.mtp.compile(dynamic=False)
            networks.token_loss = torch.compile(networks.token_loss, dynamic=False)

    def rows(self, ids: Tensor) -> Rows:
        """Segments and, on a GPU, the block mask of packed ids [rows, T+2].

        The segment buffer is reused, so that the mask function stays one object and nothing recompiles.
        """
        segment = networks.segments(ids[:, :-2])
        if not self.compiled:
            return Rows(segment)
        from torch.nn.attention.flex_attention import create_block_mask

        if self.segment is None:
            self.segment = buffer = segment.clone()

            def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (buffer[b, q] == buffer[b, k])

            self.same_document = same_document
        self.segment.copy_(segment)
        size = segment.shape[1]
        mask = create_block_mask(self.same_document, segment.shape[0], None, size, size, device=self.device)
        return Rows(self.segment, mask, torch.bfloat16)

    def train_step(self, ids: Tensor) -> Tensor:
        """One update; returns the loss parts, still on the device."""
        ids = ids.to(self.device, non_blocking=True)
        optim.set_rate(self.optimizers, self.step, self.recipe.steps, self.recipe.warmup)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss, parts = networks.training_loss(self.model, ids, self.rows(ids))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.cat((parts, norm[None]))

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def log_line(trainer: Trainer, parts: Tensor, tokens_per_s: float, began: float) -> dict:
    values = [round(v, 5) for v in parts.tolist()]
    return {
        "step": trainer.step,
        "loss": values[0],
        "mtp_loss": values[1:-1],
        "grad_norm": values[-1],
        "tokens_per_s": round(tokens_per_s),
        "wall_s": round(time.monotonic() - began, 1),
    }


def run(trainer: Trainer, work: Path, stop_after_s: float, save_every: int) -> None:
    """Train until the recipe's last step or the time limit; checkpoint and export."""
    recipe = trainer.recipe
    resume, log = work / f"{recipe.layout}.pt", work / f"{recipe.layout}.jsonl"
    if resume.exists():
        trainer.load(resume)
    source = RowSource(work / "shards", recipe)
    began = mark = time.monotonic()
    marked = trainer.step
    while trainer.step < recipe.steps and time.monotonic() - began < stop_after_s:
        parts = trainer.train_step(source(trainer.step))
        if trainer.step % 50 == 0 or trainer.step in (1, recipe.steps):
            parts = parts.cpu()
            now = time.monotonic()
            rate = (trainer.step - marked) * recipe.rows * data.ROW_TOKENS / (now - mark)
            line = log_line(trainer, parts, rate, began)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(recipe.layout, json.dumps(line), flush=True)
            mark, marked = now, trainer.step
        if trainer.step % save_every == 0:
            trainer.save(resume)
            export(trainer.model, work / "tokenizer", work / recipe.layout)
    trainer.save(resume)
    export(trainer.model, work / "tokenizer", work / recipe.layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", choices=list(networks.LAYOUTS))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--rows", type=int, default=Recipe.rows)
    parser.add_argument("--shard-count", type=int, default=Recipe.shard_count)
    parser.add_argument("--shard-rows", type=int, default=Recipe.shard_rows)
    parser.add_argument("--stop-after-s", type=float, default=1e9)
    parser.add_argument("--save-every", type=int, default=1000)
    args = parser.parse_args()
    recipe = Recipe(
        args.layout,
        args.steps,
        args.rows,
        shard_count=args.shard_count,
        shard_rows=args.shard_rows,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(recipe, device, compiled=device == "cuda")
    run(trainer, args.work, args.stop_after_s, args.save_every)


if __name__ == "__main__":
    main()
