"""Which bucket of a plan a call runs in, and how one that is too large, or mixed, runs as several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.plugins.network import CALL_INPUTS

Tensor = torch.Tensor
Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

PREFILL = "prefill"
SMALLEST_PREFILL = 16
ROWS = tuple(name for name, (_, shape) in CALL_INPUTS.items() if shape == ("B",))
CALL_ROWS = (*ROWS, "logits_indices")
"""Inputs of a call that hold no token each."""


@dataclass(frozen=True)
class Bucket:
    """Sizes that a context is made for: the index of a profile, and T, R and B."""

    profile: int
    sizes: tuple[tuple[str, int], ...]

    def shape(self, shape: Sequence[int | str]) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def choose_bucket(profiles: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Bucket:
    """The bucket of the first profile that holds `sizes`. Raises ValueError if none does.

    Decode and verify buckets are whole batches of a power of two, or the largest batch: B rows, with as many tokens
    and wanted logits as B windows have. Prefill buckets have all rows, because a padding row costs nothing, and T a
    power of two. That is some thirty contexts at most, and padding below one half.
    """
    for index, profile in enumerate(profiles):
        limits = {symbol: tuple(values) for symbol, values in profile["sizes"].items()}
        if any(size > limits[symbol][2] for symbol, size in sizes.items()):
            continue
        if profile["name"] == PREFILL:
            _, most_likely, most = limits["R"]
            tokens = min(max(SMALLEST_PREFILL, _power_of_two(sizes["T"])), limits["T"][2])
            wanted = most_likely if sizes["R"] <= most_likely else most
            found = {"T": tokens, "R": wanted, "B": limits["B"][2]}
        else:
            batch = limits["B"][2]
            window = {symbol: limits[symbol][2] // batch for symbol in sizes}
            rows = max(-(-size // window[symbol]) for symbol, size in sizes.items())
            rows = min(_power_of_two(rows), batch)
            found = {symbol: rows * window[symbol] for symbol in sizes}
        return Bucket(index, tuple(found.items()))
    most = max_tokens(profiles)
    raise ValueError(
        f"{sizes['T']} tokens in {sizes['B']} rows with {sizes['R']} wanted logits do not fit the plans, which hold "
        f"{most} tokens: run shorter windows, or build the engine with a larger --max-batch-size"
    )


def max_tokens(profiles: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of the largest call."""
    return max(profile["sizes"]["T"][2] for profile in profiles)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def row_groups(inputs: Mapping[str, Tensor], most: int) -> list[list[int]]:
    """Rows in groups of at most `most` tokens, where no row has more. Waits for the device."""
    groups: list[list[int]] = []
    tokens = 0
    for row, length in enumerate(inputs["window_lens"].tolist()):
        if not groups or tokens + length > most:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += length
    return groups


def run_in_parts(
    inputs: Mapping[str, Tensor], groups: Sequence[Sequence[int]], runs: Sequence[Run], leading: Mapping[str, str]
) -> dict[str, Tensor]:
    """Run each group of rows as a call of its own, and put the outputs where they belong. Waits for the device.

    leading: "T" or "R" of each output, tokens or wanted tokens. Rows lie one after the other, as a session packs them.
    """
    device = inputs["token_ids"].device
    lengths, wanted = inputs["window_lens"].tolist(), inputs["logits_indices"].tolist()
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    outputs: dict[str, Tensor] = {}
    for group, run in zip(groups, runs, strict=True):
        tokens = [starts[row] + i for row in group for i in range(lengths[row])]
        place = {token: index for index, token in enumerate(tokens)}
        places = {"T": tokens, "R": [index for index, token in enumerate(wanted) if token in place]}
        index = {symbol: torch.tensor(values, dtype=torch.int64, device=device) for symbol, values in places.items()}
        rows = torch.tensor(group, dtype=torch.int64, device=device)
        part = {name: value[index["T"]] for name, value in inputs.items() if name not in CALL_ROWS}
        part |= {name: inputs[name][rows] for name in ROWS}
        part["window_starts"] = (part["window_lens"].cumsum(0) - part["window_lens"]).to(torch.int32)
        part["logits_indices"] = torch.tensor([place[wanted[i]] for i in places["R"]], dtype=torch.int64, device=device)
        for public, value in run(part).items():
            symbol = leading[public]
            if public not in outputs:
                outputs[public] = value.new_empty((len(wanted) if symbol == "R" else sum(lengths), *value.shape[1:]))
            outputs[public][index[symbol]] = value
    return outputs
