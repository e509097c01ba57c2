"""Fixtures of all test folders: one computing thread, and tiny random checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Results of CPU matmuls may depend on the number of threads, and the machine is shared."""
    import torch

    torch.set_num_threads(1)


TOKENIZER_TEXT = "The state of a sequence is read for every token and rewritten when its ring is full. 0123456789\n"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(name, max_shard_bytes=..., dtype=...)` -> a checkpoint directory, made once a session.

    Names: "nano", "super", "qwen", "qwen_moe", "qwen_vl" (random_checkpoint.TINY_CONFIGS); each has a draft head and a
    byte-level tokenizer. Treat the directory as read only, or copy it first.
    """
    from replayssm.builders.random_checkpoint import TINY_CONFIGS, write_byte_tokenizer, write_random_checkpoint

    made: dict[tuple, Path] = {}

    def make(name: str, max_shard_bytes: int = 2**31, dtype: str = "bfloat16") -> Path:
        key = (name, max_shard_bytes, dtype)
        if key not in made:
            directory = tmp_path_factory.mktemp("checkpoints") / name
            write_random_checkpoint(TINY_CONFIGS[name], directory, dtype=dtype, max_shard_bytes=max_shard_bytes)
            write_byte_tokenizer(directory, TOKENIZER_TEXT, 300)
            made[key] = directory
        return made[key]

    return make
