"""The engine manifest: `config.json` of an engine directory.

`builders` writes it last and `runtime` reads it first; nothing else is shared between the two. It names every other
file of the directory with its size and SHA-256, and carries a SHA-256 of its own content, so that a truncated, edited
or half-copied engine is refused before anything is loaded. The module needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from replayssm.plugins.integers import MAX_SIZE, is_integer
from replayssm.plugins.settings import ReplaySettings

FORMAT = "replayssm-engine"
SCHEMA_VERSION = 1
MANIFEST_NAME = "config.json"
VERIFY_LEVELS = ("size", "full")
ALWAYS_HASHED_BYTES = 8 << 20
"""Largest file, weights aside, whose SHA-256 is compared at every load: some milliseconds for all of them."""

_HASH_BLOCK = 1 << 20


class EngineDirectoryError(ValueError):
    """An engine directory that cannot be used; the message names the file, the reason and the way out."""


@dataclass(frozen=True)
class Limits:
    """What the engine was built for.

    max_batch_size: sequences, and so slots, at the same time.
    max_seq_len: tokens of one sequence, prompt and output together.
    max_draft_len: draft tokens of one verify window; the window is one longer.
    """

    max_batch_size: int = 8
    max_seq_len: int = 4096
    max_draft_len: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("max_batch_size", 1), ("max_seq_len", 2), ("max_draft_len", 0)):
            value = getattr(self, name)
            if not is_integer(value, minimum):
                raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        if self.max_draft_len >= self.max_seq_len:
            raise ValueError(f"max_draft_len ({self.max_draft_len}) must be below max_seq_len ({self.max_seq_len})")

    @property
    def max_window(self) -> int:
        return 1 + self.max_draft_len


@dataclass(frozen=True)
class FileEntry:
    """A file of the engine directory: POSIX path relative to it, bytes, hexadecimal SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class EngineManifest:
    """Content of the manifest.

    model: name, family, architecture, sizes and eos_token_ids of the model.
    quantization: bytes of the weights, in all ("weight_bytes") and by stored dtype ("weight_bytes_by_dtype").
    replay: how recurrent state is kept.
    target: what runs the networks: "torch", "tensorrt" or "tensorrt-rtx".
    versions: packages that wrote the engine.
    kernels: kernel name -> hash of what it was compiled from; empty where the engine carries none.
    checkpoint: name and identity of the checkpoint it was built from.
    networks: file that holds the networks, by name.
    files: every file of the directory except the manifest.
    """

    model: dict[str, Any]
    quantization: dict[str, Any]
    replay: ReplaySettings
    limits: Limits
    target: str
    versions: dict[str, str]
    checkpoint: dict[str, Any]
    networks: str
    files: tuple[FileEntry, ...]
    kernels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        names = [entry.name for entry in self.files]
        if len(set(names)) != len(names):
            raise EngineDirectoryError("the manifest lists a file twice")
        if self.networks not in names:
            raise EngineDirectoryError(f"the manifest's networks file {self.networks!r} is not in its file list")
        if (self.replay.max_window, self.replay.max_seq_len) != (self.limits.max_window, self.limits.max_seq_len):
            raise EngineDirectoryError(
                f"the manifest contradicts itself: replay has max_window {self.replay.max_window} and max_seq_len "
                f"{self.replay.max_seq_len}, limits give {self.limits.max_window} and {self.limits.max_seq_len}"
            )

    @property
    def weight_files(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.files if entry.name.endswith(".safetensors"))

    def to_json(self) -> dict[str, Any]:
        body = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}
        body["files"] = [asdict(entry) for entry in self.files]
        body["sha256"] = _body_sha256(body)
        return body

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EngineManifest:
        """Inverse of `to_json`; raises EngineDirectoryError for anything this version did not write."""
        _check_schema(value)
        body = {key: item for key, item in value.items() if key not in ("format", "schema_version", "sha256")}
        try:
            body["replay"] = ReplaySettings(**body["replay"])
            body["limits"] = Limits(**body["limits"])
            body["files"] = tuple(FileEntry(**entry) for entry in body["files"])
            return cls(**body)
        except EngineDirectoryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineDirectoryError(f"the manifest has a missing or invalid field: {error}") from error


def _check_fields(manifest: EngineManifest) -> None:
    """Refuse values of a type that their readers do not expect, which a checksum over them cannot show."""
    for name in ("model", "quantization", "versions", "checkpoint", "kernels"):
        _require(name, getattr(manifest, name), isinstance(getattr(manifest, name), dict), "an object")
    for name in ("target", "networks"):
        _require(name, getattr(manifest, name), isinstance(getattr(manifest, name), str), "text")
    model, serial_exact = manifest.model, manifest.replay.serial_exact
    _require("model.name", model.get("name"), isinstance(model.get("name"), str), "text")
    size = model.get("vocab_size")
    _require("model.vocab_size", size, is_integer(size, 1, MAX_SIZE), f"between 1 and {MAX_SIZE}")
    tokens = model.get("eos_token_ids")
    known = isinstance(tokens, (list, tuple)) and all(is_integer(token, 0) for token in tokens)
    _require("model.eos_token_ids", tokens, known, "a list of token ids")
    _require("replay.serial_exact", serial_exact, isinstance(serial_exact, bool), "true or false")
    for entry in manifest.files:
        check_file_name(entry.name)
        _require(f"the size of {entry.name}", entry.size, is_integer(entry.size, 0), "a count of bytes")
        digest = entry.sha256
        is_digest = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
        _require(f"the sha256 of {entry.name}", digest, is_digest, "64 hexadecimal digits")


def _require(name: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise EngineDirectoryError(
            f"the manifest's {name} must be {expected}, got {repr(value)[:40]}: rebuild the engine"
        )


def _body_sha256(body: dict[str, Any]) -> str:
    content = {key: item for key, item in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_schema(value: Any) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise EngineDirectoryError(
            f'not an engine manifest (no "format": "{FORMAT}"); build an engine with `replayssm build`'
        )
    version = value.get("schema_version")
    if not is_integer(version, 1):
        raise EngineDirectoryError(f"the manifest's schema_version is {version!r}, not a positive integer")
    if version > SCHEMA_VERSION:
        raise EngineDirectoryError(
            f"the engine has schema version {version}, this replayssm reads up to {SCHEMA_VERSION}: "
            "upgrade replayssm or rebuild the engine with this version"
        )
    if value.get("sha256") != _body_sha256(value):
        raise EngineDirectoryError("the manifest's content does not match its own sha256: it was altered or damaged")


def check_file_name(name: Any) -> None:
    """Refuse a name that is not a plain relative POSIX path below the engine directory."""
    if not isinstance(name, str):
        raise EngineDirectoryError(f"the manifest lists a file name that is not text: {name!r}")
    path = PurePosixPath(name)
    unsafe = (
        path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or ":" in name or "\0" in name
    )
    if unsafe or not path.parts or name == MANIFEST_NAME:
        raise EngineDirectoryError(f"the manifest lists an unsafe file name {name!r}")


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def is_engine_directory(directory: Path) -> bool:
    """Whether `directory` holds a manifest of any schema version, damaged or not."""
    try:
        value = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


def read_manifest(directory: Path) -> EngineManifest:
    """Read the manifest of an engine directory. Raises EngineDirectoryError; the files themselves are not looked at."""
    path = Path(directory) / MANIFEST_NAME
    if not Path(directory).is_dir():
        raise EngineDirectoryError(f"{directory} is not a directory; expected an engine made by `replayssm build`")
    if not path.is_file():
        raise EngineDirectoryError(f"{directory} has no {MANIFEST_NAME}; expected an engine made by `replayssm build`")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EngineDirectoryError(f"{path} is not valid JSON ({error}): rebuild the engine") from error
    try:
        return EngineManifest.from_json(value)
    except EngineDirectoryError as error:
        raise EngineDirectoryError(f"{path}: {error}") from error


def _is_always_hashed(entry: FileEntry, manifest: EngineManifest) -> bool:
    small = entry.size <= ALWAYS_HASHED_BYTES and entry.name not in manifest.weight_files
    return small or entry.name == manifest.networks


def verify_files(directory: Path, manifest: EngineManifest, level: str = "size") -> None:
    """Check every listed file: presence, size and SHA-256, with level "size" no SHA-256 of weights and large files.

    What says how the engine runs (networks, generation settings, tokenizers of usual size) is always read.
    Raises EngineDirectoryError for the first file that differs.
    """
    if level not in VERIFY_LEVELS:
        raise ValueError(f"verify must be one of {', '.join(VERIFY_LEVELS)}, got {level!r}")
    for entry in manifest.files:
        path = Path(directory) / entry.name
        if not path.is_file():
            raise EngineDirectoryError(f"{path} is missing: rebuild or copy the engine again")
        size = path.stat().st_size
        if size != entry.size:
            raise EngineDirectoryError(
                f"{path} has {size} bytes, the manifest says {entry.size}: rebuild or copy the engine again"
            )
        if (level == "full" or _is_always_hashed(entry, manifest)) and sha256_file(path) != entry.sha256:
            raise EngineDirectoryError(
                f"{path} does not have the SHA-256 of the manifest: it was altered or damaged; rebuild the engine"
            )
