"""One safetensors file: header checks, lazy memory-mapped reading, and writing tensor by tensor.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data. Reading
it here rather than through the safetensors package gives errors that name what is wrong, and control over which pages
stay in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm.builders.elements import PIECE_ELEMENTS
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.state import dtype_name, torch_dtype

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}
"""Safetensors' dtype names and torch's. Other dtypes are refused when a tensor of them is met."""

_DTYPE_NAMES = {value: key for key, value in DTYPES.items()}
_ELEMENT_BYTES = {name: ELEMENT_BITS.get(name, 64) // 8 for name in DTYPES.values()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_COPY_AGAIN = "the file is damaged or incomplete: copy or download it again"


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `start` and `nbytes` are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """A checked header and lazy access to the data.

    entries: name -> Entry. size: bytes of the file. header: its raw bytes.
    Raises ValueError naming the file, the tensor and the expectation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.header = _read_header(path)
        self.entries = _parse_entries(path, self.header, self.size)
        self._map: mmap.mmap | None = None

    def view(self, entry: Entry) -> torch.Tensor:
        """The tensor's bytes in the file, without a copy. Read only by contract: writes are private and may vanish."""
        dtype = torch_dtype(entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if self._map is None:
            with open(self.path, "rb") as file:
                # A private mapping, because torch warns about buffers that it cannot write.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if entry.start % _ELEMENT_BYTES[entry.dtype]:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
            return raw.clone().view(dtype).view(entry.shape)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def release(self) -> None:
        """Drop the pages read so far from this process. Views stay valid: they read the file again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path) -> tuple[int, bytes]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise ValueError(f"{path}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            if size < 8:
                raise ValueError(f"{path}: {size} bytes, expected a safetensors file; {_COPY_AGAIN}")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(
                    f"{path}: no safetensors file, or a truncated one: it announces a header of {length} bytes, "
                    f"but has {size - 8} after the length; {_COPY_AGAIN}"
                )
            return size, file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return values


def _parse_entries(path: Path, header: bytes, size: int) -> dict[str, Entry]:
    try:
        values = json.loads(header, object_pairs_hook=_unique)
    except KeyError as error:
        raise ValueError(f"{path}: the header lists {error.args[0]!r} twice, expected every tensor once") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: the header is not valid JSON; {_COPY_AGAIN}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: the header is no JSON object; {_COPY_AGAIN}")
    values.pop("__metadata__", None)
    base = 8 + len(header)
    entries = {name: _parse_entry(path, name, value, base) for name, value in values.items()}
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != position:
            raise ValueError(
                f"{path}: tensor {name!r} starts at byte {entry.start}, expected {position}: tensors must neither "
                f"overlap nor leave gaps; {_COPY_AGAIN}"
            )
        position += entry.nbytes
    if position != size:
        word = "truncated" if size < position else "longer than its header says"
        raise ValueError(f"{path}: {word}: {size} bytes, expected {position}; {_COPY_AGAIN}")
    return entries


def _parse_entry(path: Path, name: str, value: Any, base: int) -> Entry:
    try:
        code, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        integers = all(isinstance(item, int) and item >= 0 for item in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        integers = False
    if not integers:
        raise ValueError(f"{path}: the header entry of {name!r} is malformed; {_COPY_AGAIN}")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{path}: tensor {name!r} has dtype {code}, expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[code]
    nbytes = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if end - start != nbytes:
        raise ValueError(
            f"{path}: tensor {name!r} has {end - start} bytes of data, expected {nbytes} for {code} {list(shape)}; "
            f"{_COPY_AGAIN}"
        )
    return Entry(dtype, shape, base + start, nbytes)


class SafetensorsWriter:
    """Writes a file whose tensors are known in advance but arrive one by one, in any order.

    tensors: name -> (torch's dtype name, shape). Use as a context manager; leaving it without an exception checks that
    every tensor has been written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._entries: dict[str, Entry] = {}
        position = 0
        # Larger elements first keeps every tensor aligned.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -_ELEMENT_BYTES[item[1][0]]):
            nbytes = math.prod(shape) * _ELEMENT_BYTES[dtype]
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + nbytes],
            }
            self._entries[name] = Entry(dtype, tuple(shape), position, nbytes)
            position += nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._prefix = struct.pack("<Q", len(encoded)) + encoded
        self._pending = set(self._entries)
        self.size = len(self._prefix) + position

    def __enter__(self) -> SafetensorsWriter:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _write_all(self._file, memoryview(self._prefix), 0)
        os.truncate(self._file, self.size)
        return self

    def write(self, name: str, tensor: torch.Tensor, convert: bool = False) -> None:
        """Write one tensor. Its shape must be the announced one, its dtype too unless `convert` allows rounding."""
        entry = self._entries[name]
        found = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if found[1] != entry.shape or (found[0] != entry.dtype and not convert):
            raise ValueError(f"{self.path}: tensor {name!r} is {found}, announced as {(entry.dtype, entry.shape)}")
        self._pending.remove(name)
        position = len(self._prefix) + entry.start
        if not entry.nbytes:
            return
        for piece in tensor.detach().reshape(-1).split(PIECE_ELEMENTS):
            raw = piece.to(torch_dtype(entry.dtype)).contiguous().cpu().view(torch.uint8).numpy()
            _write_all(self._file, memoryview(raw), position)
            position += raw.nbytes

    def write_pieces(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write one tensor from consecutive parts of its elements, in its dtype; one part is in memory at a time."""
        entry = self._entries[name]
        self._pending.remove(name)
        position = len(self._prefix) + entry.start
        end = position + entry.nbytes
        for piece in pieces:
            raw = piece.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            if piece.dtype != torch_dtype(entry.dtype) or position + raw.nbytes > end:
                break
            _write_all(self._file, memoryview(raw), position)
            position += raw.nbytes
        if position != end:
            raise ValueError(f"{self.path}: the parts of tensor {name!r} are not {entry.dtype} {list(entry.shape)}")

    def __exit__(self, kind: type | None, *_: object) -> None:
        os.close(self._file)
        if kind is None and self._pending:
            raise ValueError(f"{self.path}: tensor {min(self._pending)!r} was announced but never written")


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def plan_shards(sizes: Iterable[tuple[str, int]], max_shard_bytes: int, stem: str = "model") -> dict[str, list[str]]:
    """File name -> tensor names, in order, so that a file exceeds `max_shard_bytes` only for a single tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes:
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
