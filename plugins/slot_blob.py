"""One sequence's state as bytes: for preemption, prefix reuse and moving a sequence to another pool (design rule 9).

A blob is a safetensors file of version 4. Its metadata has one key, "replayssm", whose value is a JSON object

    version       3
    sha256        of the whole blob with the 64 digits of this field as zeros; checked before anything else is believed
    seq_len       committed tokens
    layers        state name -> {"geometry", "settings", "checkpoint_position" (recurrent layers that keep one)}

and its tensors, named "<state name>/<part>", are

    checkpoint*   as stored, only where checkpoint_position (for the baseline: seq_len) is above 0
    readout*      likewise, where the settings have a readout copy; nvfp4 codes in the usual order instead of the
                  kernels': byte k of a row holds columns 2 k (low nibble) and 2 k + 1
    ring_*        the live rows, positions checkpoint_position .. seq_len - 1 in order, [n, ...]
    conv_ring     the inputs at positions max(0, seq_len - conv_kernel + 1) .. seq_len - 1, [n, channels]
    k_cache, v_cache    positions 0 .. seq_len - 1, [n, heads, head_dim]

Rows outside these may hold anything in a slot and are never written, so equal sequences give equal bytes. A sequence
loaded into any slot of any pool with the same geometry and settings goes on bit-identically; only max_seq_len may
differ. Snapshots of the baseline are not kept: save between commit and the next window.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry, geometry_to_json
from replayssm.plugins.integers import is_integer
from replayssm.plugins.nvfp4 import pack_nibbles, pack_words, unpack_nibbles, unpack_words
from replayssm.plugins.state import LayerState, set_checkpoint_position

METADATA_KEY = "replayssm"
VERSION = 4

_NO_DIGEST = b"0" * 64
# The field as it stands in the safetensors header, which holds the JSON text as an escaped string.
_DIGEST_FIELD = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\", \\"version\\"')


def save_slot(states: Mapping[str, LayerState], slot: int, seq_len: int) -> bytes:
    """The sequence in `slot`, with `seq_len` committed tokens, over all stateful layers (state name -> state).

    Raises ValueError if a layer cannot be at seq_len: its checkpoint lies behind it, its ring does not reach it, or it
    is past max_seq_len.
    """
    layers, tensors = {}, {}
    for name, state in states.items():
        _require_slot(name, state, slot)
        position = _checkpoint_position(state, slot, seq_len)
        layers[name] = {**_description(state), "checkpoint_position": position}
        for part, (index, _) in _live_rows(name, state, seq_len, position).items():
            stored = state[part][slot]
            live = stored if index is None else stored[index.to(stored.device)]
            if _is_words(state, part):
                live = pack_nibbles(unpack_words(live))
            tensors[f"{name}/{part}"] = live.cpu().contiguous()
    metadata = {"version": VERSION, "sha256": _NO_DIGEST.decode(), "seq_len": seq_len, "layers": layers}
    blob = save(tensors, {METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    start, digest = _digest(blob)
    return b"".join((blob[:start], digest, blob[start + len(digest) :]))


def load_slot(blob: bytes, states: Mapping[str, LayerState], slot: int) -> int:
    """Put a sequence into `slot` and return its seq_len. The slot is untouched if the blob does not fit.

    Raises ValueError for another version, other layers, other geometry or settings, a damaged blob, or a pool whose
    max_seq_len is below the sequence's length.
    """
    seq_len, layers, tensors = _read(blob)
    if set(layers) != set(states):
        raise ValueError(f"the blob holds layers {sorted(layers)}, the pool has {sorted(states)}")
    writes = []
    for name, state in states.items():
        _require_slot(name, state, slot)
        _require_same(name, layers[name], state)
        position = layers[name]["checkpoint_position"]
        if ("checkpoint_position" in state.tensors) != (position is not None):
            raise ValueError(f"damaged blob: {name} cannot have its checkpoint at {position}")
        for part, (index, shape) in _live_rows(name, state, seq_len, position).items():
            values, target = tensors.pop(f"{name}/{part}", None), state[part]
            if values is None or tuple(values.shape) != shape or values.dtype != target.dtype:
                raise ValueError(f"damaged blob: {name}/{part} must be {list(shape)} of {target.dtype}")
            if _is_words(state, part):
                values = pack_words(unpack_nibbles(values))
            writes.append((target[slot], index, values))
    if tensors:
        raise ValueError(f"damaged blob: unknown tensors {sorted(tensors)}")
    for target, index, values in writes:
        if index is None:
            target.copy_(values)
        else:
            target[index.to(target.device)] = values.to(target.device)
    for name, state in states.items():
        if layers[name]["checkpoint_position"] is not None:
            set_checkpoint_position(state, [slot], [layers[name]["checkpoint_position"]])
    return seq_len


def stagger_tail(prompt_token_ids: Sequence[int], max_window: int) -> int:
    """r of design rule 10: prefill stops r tokens early and those run as one ordinary window.

    1 <= r <= min(max_window, prompt length), spread evenly and a function of the prompt alone, so that sequences which
    are admitted together flush at different steps while outputs never depend on the batch.
    """
    if not len(prompt_token_ids) or max_window < 1:
        raise ValueError(f"expected a prompt and max_window >= 1, got {len(prompt_token_ids)} tokens and {max_window}")
    text = ",".join(str(int(token)) for token in prompt_token_ids)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return 1 + digest % min(max_window, len(prompt_token_ids))


def _is_words(state: LayerState, part: str) -> bool:
    """Whether a part holds nvfp4 codes in the kernels' order."""
    return part == "readout" and state.settings.readout_dtype == "nvfp4"


def _require_slot(name: str, state: LayerState, slot: int) -> None:
    if not 0 <= slot < state.slots:
        raise ValueError(f"{name}: slot must lie in [0, {state.slots}), got {slot}")


def _description(state: LayerState) -> dict[str, dict[str, Any]]:
    """What must be equal for a blob to fit."""
    settings = asdict(state.settings)
    del settings["max_seq_len"], settings["readout_layers"]  # the latter is none of a layer's
    return {"geometry": geometry_to_json(state.geometry), "settings": settings}


def _require_same(name: str, layer: dict[str, Any], state: LayerState) -> None:
    """Raise ValueError at the first field in which a blob's layer differs from the pool's."""
    for group, own in _description(state).items():
        for key in own:
            if layer[group].get(key) != own[key]:
                raise ValueError(
                    f"{name}: the blob's {group} say {key} = {layer[group].get(key)!r}, the pool's say {own[key]!r}; "
                    f"load it into a pool with the same {group}"
                )


def _checkpoint_position(state: LayerState, slot: int, seq_len: int) -> int | None:
    """c of the slot, None for a state that keeps none. A sequence without tokens has c = 0 whatever the slot holds."""
    positions = state.tensors.get("checkpoint_position")
    if positions is None:
        return None
    return int(positions[slot].flatten()[0]) if seq_len else 0


def _live_rows(
    name: str, state: LayerState, seq_len: int, position: int | None
) -> dict[str, tuple[torch.Tensor | None, tuple[int, ...]]]:
    """part -> (rows of the slot in the order of their positions, or None for all of it; shape of the values)."""
    geometry, settings = state.geometry, state.settings
    first = seq_len if position is None else position
    longest = max(settings.buffer_len, settings.max_window)
    if not 0 <= first <= seq_len <= min(first + longest, settings.max_seq_len):
        raise ValueError(
            f"{name}: a sequence of {seq_len} tokens with its checkpoint at {first} does not fit {longest} tokens of "
            f"history and max_seq_len {settings.max_seq_len}"
        )
    if isinstance(geometry, AttentionGeometry):
        begin = 0
    elif isinstance(geometry, ConvGeometry):
        begin = max(0, seq_len - geometry.conv_kernel + 1)
    else:
        begin = first
    positions, rows = torch.arange(begin, seq_len), {}
    for part, tensor in state.tensors.items():
        shape = tuple(tensor.shape[1:])
        if part.startswith("ring_") or not isinstance(geometry, (Mamba2Geometry, GdnGeometry)):
            rows[part] = (positions % shape[0], (len(positions), *shape[1:]))
        elif part not in ("checkpoint_position", "snapshots") and first > 0:
            rows[part] = (None, shape)
    return rows


def _read(blob: bytes) -> tuple[int, dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """(seq_len, layers, tensors) of a blob."""
    try:
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        metadata = json.loads(header["__metadata__"][METADATA_KEY])
        version = metadata["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a state blob: {error}") from error
    if version != VERSION:
        raise ValueError(f"state blob has version {version!r}, this program reads version {VERSION}")
    start, digest = _digest(blob)
    if blob[start : start + len(digest)] != digest:
        raise ValueError("damaged blob: its content does not match its sha256")
    try:
        tensors = load(blob)
        seq_len, layers = metadata["seq_len"], metadata["layers"]
        for name, layer in layers.items():
            _require_layer(name, layer)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"damaged blob: {error}") from error
    if not is_integer(seq_len, 0):
        raise ValueError(f"damaged blob: seq_len is {seq_len!r}")
    return seq_len, layers, tensors


def _require_layer(name: str, layer: Any) -> None:
    """Raise ValueError or KeyError unless a layer's metadata has the documented form."""
    position = layer["checkpoint_position"]
    if position is not None and not is_integer(position, 0):
        raise ValueError(f"{name}: checkpoint_position is {position!r}")
    for group in ("geometry", "settings"):
        if not isinstance(layer[group], dict):
            raise ValueError(f"{name}: {group} is {layer[group]!r}")


def _digest(blob: bytes) -> tuple[int, bytes]:
    """(where a blob's SHA-256 stands, what it must be, as 64 hexadecimal digits)."""
    end = 8 + int.from_bytes(blob[:8], "little")
    field = _DIGEST_FIELD.search(blob, 8, min(end, len(blob)))
    if field is None:
        raise ValueError("damaged blob: it has no sha256")
    view = memoryview(blob)
    content = hashlib.sha256(view[: field.start(1)])
    content.update(_NO_DIGEST)
    content.update(view[field.end(1) :])
    return field.start(1), content.hexdigest().encode()
