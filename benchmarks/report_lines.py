"""Result lines, and what the sections of the report make of them alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from replayssm.builders.config import published

RESULTS = Path(__file__).parent / "results"
NAMES = {"nano4b": "Nemotron-3-Nano-4B", "super120b": "Nemotron-3-Super-120B", "qwen4b": "Qwen3.5-4B"}
NAMES["qwen122b"] = "Qwen3.5-122B-A10B"
WINDOW, BUFFER_LEN = 5, 16
KERNEL_BENCHMARKS = ("mamba2_window", "gdn_window")

Line = dict


def read_lines(folder: Path) -> list[Line]:
    """All result lines, older ones of the same condition left out."""
    kept: dict[tuple, Line] = {}
    keys = ("benchmark", "op", "geometry", "model", "batch", "window", "state_dtype", "state_rounding", "readout_dtype")
    keys += ("L", "fill", "variant", "layers", "tier", "gpu", "engine", "draft_len", "context", "format")
    keys += ("fp8_products",)
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            # Older lines do not say what only newer ones may differ in.
            newer = (bool(line.get("fp8_experts")), cut_vocabulary(line), line.get("ranks", 1))
            key = (*(str(line.get(name)) for name in keys), *newer)
            if key not in kept or kept[key].get("date", "") <= line.get("date", ""):
                kept[key] = line
    return list(kept.values())


def cut_vocabulary(line: Line) -> int | None:
    """Tokens that a truncated model has left of its vocabulary; None for all of them."""
    kept = line.get("vocabulary")
    if not kept or shape_of(line) not in NAMES or kept == published(shape_of(line)).vocab_size:
        return None
    return kept


def select(lines: Iterable[Line], **wanted) -> list[Line]:
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def usual(lines: Iterable[Line]) -> list[Line]:
    """Lines of the usual ring, or of none; other lengths are measured here and there."""
    return [line for line in lines if line.get("L", BUFFER_LEN) in (0, BUFFER_LEN)]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = [[str(cell) for cell in row] for row in rows]
    if not rows:
        return "*Not measured.*\n"
    text = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def shape_of(line: Line) -> str:
    """The short name of a line's model, whatever format its weights have."""
    name = line["geometry"].partition("-")[0]
    return name if name in NAMES else line["geometry"]


def model_of(line: Line) -> str:
    """The model's name, the format of its weights, and how far it was truncated."""
    name = NAMES.get(shape_of(line), line["geometry"])
    if shape_of(line) != line["geometry"]:
        name += f", {line['geometry'].partition('-')[2].upper()} weights"
    if line.get("fp8_products"):
        name += " and activations" if line["geometry"].endswith("-fp8") else ", FP8 layers with FP8 activations"
    if line.get("fp8_experts"):
        name += ", experts in FP8"
    if line.get("ranks", 1) > 1 and line["benchmark"] != "e2e_tensor_parallel":
        name += f", {line['ranks']} GPUs"
    if line["layers"] == line["layers_total"]:
        return name
    tokens = f", {cut_vocabulary(line):,} tokens" if cut_vocabulary(line) else ""
    return f"{name} ({line['layers']} of {line['layers_total']} layers{tokens})"


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x"


def share_of(rate: float, ceiling: float) -> str:
    """In percent; a ceiling that the kernel itself exceeds was measured too low and says nothing."""
    return f"{100 * rate / ceiling:.0f} %" if rate <= ceiling else "above 100 %"


def best_of(lines: list[Line]) -> str:
    """Time and name of the fastest; empty without lines."""
    best = min(lines, key=itemgetter("median_us"), default=None)
    return f"{best['median_us']:.0f} ({best['variant']})" if best else ""


def native_peers(lines: list[Line], ours: Line) -> list[Line]:
    """Verification of drafts by other projects in the run that measured one of our lines, the fastest first."""
    same = {name: ours[name] for name in ("benchmark", "geometry", "batch", "window", "gpu", "commit", "date")}
    return sorted(select(lines, op="peer", correct=True, **same), key=itemgetter("median_us"))


def condition(line: Line) -> dict:
    """What a decode line shares with the plain one of its run."""
    names = ("benchmark", "geometry", "batch", "window", "layers", "context", "commit", "fp8_products")
    names += ("fp8_experts", "vocabulary")
    return {name: line.get(name) for name in names}


def decode_lines(lines: list[Line]) -> list[Line]:
    found = select(lines, benchmark="e2e_decode_speedup")
    return sorted(found, key=itemgetter("geometry", "batch", "variant"))


def longest_contexts(lines: Iterable[Line]) -> list[Line]:
    """One line for each model, batch and variant: that of the longest run."""
    kept: dict[tuple, Line] = {}
    for line in lines:
        key = (model_of(line), line["batch"], line["variant"])
        if key not in kept or kept[key]["context"][1] < line["context"][1]:
            kept[key] = line
    return list(kept.values())
