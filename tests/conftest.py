"""Fixtures of all test folders: one computing thread, tiny random checkpoints, and engines of plans."""

import os
import sys
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


sys.path.append(str(Path(__file__).parent / "stand_in"))

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


@pytest.fixture
def plan_engine(tiny_checkpoint, tmp_path, monkeypatch):
    """`plan_engine(layout, target="tensorrt", version=, **build_options)` -> (Engine, stand-in module)."""
    from replayssm.builders.engine import BuildOptions, build_engine
    from replayssm.runtime.engine import Engine

    modules = {}

    def make(layout, target="tensorrt", version="11.4.0", **options):
        if target not in modules:
            modules[target] = use_stand_in(monkeypatch, target, version)
        options = {"max_batch_size": 4, "max_seq_len": 400, "max_draft_len": 3, "buffer_len": 8, **options}
        output = tmp_path / f"{layout}-{target}-{len(list(tmp_path.iterdir()))}"
        build_engine(tiny_checkpoint(layout), output, BuildOptions(target, dtype="float16", **options))
        return Engine.load(output), modules[target]

    return make


@pytest.fixture
def plan_module(monkeypatch):
    """A stand-in for the module `tensorrt`."""
    return use_stand_in(monkeypatch, "tensorrt")


def use_stand_in(monkeypatch, target, version="11.4.0"):
    """A stand-in for TensorRT that `target` finds, on a machine that plans are built and run on."""
    from tensorrt_stand_in import make_module

    from replayssm.builders.targets import tensorrt
    from replayssm.runtime import plans

    module = make_module(target.replace("-", "_"), version)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, f"{module.__name__}.plugin", module.plugin)
    monkeypatch.setattr(tensorrt, "_build_arch", lambda: 90)
    monkeypatch.setattr(plans, "PLAN_DEVICE", "cpu")
    return module
