"""Calibration data: token sequences from which the ranges of activations are measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from replayssm.plugins.integers import is_integer


def calibration_text() -> str:
    """The text that ships with this package: prose, dialogue, code, tables and mathematics in four languages."""
    return (resources.files("replayssm.builders") / "calibration.txt").read_text(encoding="utf-8")


def calibration_batches(
    checkpoint_dir: Path, source: Path | None, samples: int, length: int, vocab_size: int
) -> list[torch.Tensor]:
    """Token ids, one int64 tensor [sequences, tokens] per distinct length, at most `samples` sequences in all.

    source: a `.txt` file, which is cut into pieces of `length` tokens; a `.jsonl` file with one sample a line, an
        object with "text", "messages" (chat turns with "content") or "token_ids", cut after `length` tokens; or None
        for the text that ships with this package. Text needs the checkpoint's `tokenizer.json`.
    Raises ValueError for files of another kind or without usable samples.
    """
    if source is None:
        sequences = _pieces(_encode(checkpoint_dir, [calibration_text()])[0], length)
    elif source.suffix == ".jsonl":
        sequences = _jsonl(checkpoint_dir, source, samples, length)
    elif source.suffix == ".txt":
        sequences = _pieces(_encode(checkpoint_dir, [_read(source)])[0], length)
    else:
        raise ValueError(f"{source}: expected calibration data in a .txt or .jsonl file")
    sequences = [sequence for sequence in sequences[:samples] if sequence]
    if not sequences:
        raise ValueError(f"{source or 'the built-in text'}: no calibration tokens in it")
    highest = max(max(sequence) for sequence in sequences)
    if highest >= vocab_size or min(min(sequence) for sequence in sequences) < 0:
        raise ValueError(
            f"{source or checkpoint_dir / 'tokenizer.json'}: gives token ids up to {highest}, "
            f"expected 0 to {vocab_size - 1}: tokenizer and checkpoint do not belong together"
        )
    by_length: dict[int, list[list[int]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    return [torch.tensor(group, dtype=torch.int64) for group in by_length.values()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None


def _pieces(tokens: Sequence[int], length: int) -> list[list[int]]:
    """Consecutive pieces of `length`; a shorter rest counts only if it is all there is."""
    whole = [list(tokens[start : start + length]) for start in range(0, len(tokens) - length + 1, length)]
    return whole or [list(tokens)]


def _encode(checkpoint_dir: Path, texts: list[str]) -> list[list[int]]:
    path = checkpoint_dir / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file, but calibration text needs the tokenizer; copy it there, or give "
            '--calibration a .jsonl file with {"token_ids": [...]} lines'
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer file ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def _jsonl(checkpoint_dir: Path, source: Path, samples: int, length: int) -> list[list[int]]:
    sequences: list[list[int]] = []
    # JSON lines end in \n only: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(_read(source).split("\n"), 1):
        if not line.strip():
            continue
        if len(sequences) == samples:
            break
        where = f"{source}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from None
        sequences.append(_sample(checkpoint_dir, value, where)[:length])
    return sequences


def _sample(checkpoint_dir: Path, value: Any, where: str) -> list[int]:
    if isinstance(value, dict):
        ids, text, messages = value.get("token_ids"), value.get("text"), value.get("messages")
        if isinstance(ids, list) and all(is_integer(item) for item in ids):
            return ids
        if isinstance(messages, list) and all(isinstance(item, dict) for item in messages):
            text = "\n".join(str(item.get("content", "")) for item in messages)
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                lone = f"\\u{ord(text[error.start]):04x}"
                raise ValueError(f"{where}: the text holds {lone} without the other half of its pair") from None
            return _encode(checkpoint_dir, [text])[0]
    raise ValueError(f'{where}: expected an object with "text", "messages" or "token_ids" (a list of integers)')
