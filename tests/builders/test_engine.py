"""Engine directories: content, atomicity under SIGKILL, memory, refusals."""

from __future__ import annotations

import importlib.metadata
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.engine import COPIED_FILES, BuildOptions, build_engine
from replayssm.builders.models import build_networks
from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.targets import torch as torch_target
from replayssm.plugins.manifest import read_manifest, verify_files
from replayssm.plugins.network import Network

LAYOUTS = ("nano", "super", "qwen", "qwen_moe", "qwen_vl")
SMALL = BuildOptions(max_batch_size=2, max_seq_len=64, max_draft_len=2, buffer_len=8)


def read_weights(directory, manifest):
    weights = {}
    for name in manifest.weight_files:
        weights |= load_file(directory / name)
    return weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_content(tiny_checkpoint, tmp_path, layout):
    checkpoint = tiny_checkpoint(layout)
    manifest = build_engine(checkpoint, tmp_path / "engine", SMALL)
    assert read_manifest(tmp_path / "engine") == manifest
    verify_files(tmp_path / "engine", manifest, "full")
    listed = {entry.name for entry in manifest.files}
    found = {str(p.relative_to(tmp_path / "engine")) for p in (tmp_path / "engine").rglob("*") if p.is_file()}
    assert found == listed | {"config.json"}
    assert listed >= {name for name in COPIED_FILES if (checkpoint / name).is_file()}

    opened = Checkpoint.open(checkpoint)
    traced = build_networks(opened.config, opened.module_format, manifest.replay.activation_dtype)
    stored = json.loads((tmp_path / "engine" / manifest.networks).read_text())
    assert Network.from_json(stored["main"]) == traced.main
    assert Network.from_json(stored["mtp"]) == traced.mtp
    weights = read_weights(tmp_path / "engine", manifest)
    assert weights.keys() == traced.weight_plan.keys()
    for name, recipe in traced.weight_plan.items():
        expected = recipe.load(opened.tensor)
        assert weights[name].dtype == expected.dtype
        assert torch.equal(weights[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_manifest_describes_model_and_limits(tiny_checkpoint, tmp_path):
    manifest = build_engine(tiny_checkpoint("nano"), tmp_path / "engine", SMALL)
    assert manifest.model["family"] == "nemotron_h"
    assert manifest.model["name"] == tiny_checkpoint("nano").name
    assert manifest.checkpoint["identity"] == Checkpoint.open(tiny_checkpoint("nano")).identity
    assert (manifest.limits.max_batch_size, manifest.limits.max_seq_len, manifest.limits.max_draft_len) == (2, 64, 2)
    assert (manifest.replay.buffer_len, manifest.replay.max_window) == (8, 3)
    assert manifest.replay.activation_dtype == "bfloat16"
    assert manifest.versions["torch"] == importlib.metadata.version("torch")


def test_same_input_gives_the_same_bytes(tiny_checkpoint, tmp_path):
    manifests = [build_engine(tiny_checkpoint("super"), tmp_path / name, SMALL) for name in "ab"]
    assert manifests[0] == manifests[1]


def test_shards(tmp_path):
    """Shards respect the limit, hold every weight once, and keep each tensor aligned to its element."""
    shapes = {"a": ("bfloat16", (3, 5)), "b": ("uint8", (7,)), "c": ("float32", ()), "d": ("float8_e4m3fn", (2, 9)),
              "e": ("bfloat16", (40,)), "f": ("float64", (1,)), "g": ("float32", (0, 4))}  # fmt: skip
    tensors = {name: torch.randn(shape).mul(9).to(getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()}
    plan = {name: WeightRecipe((name,), dtype, shape) for name, (dtype, shape) in shapes.items()}
    seen = []
    torch_target.write(
        tmp_path, {"main": Network("main")}, plan, tensors.__getitem__, lambda *item: seen.append(item), shard_bytes=60
    )
    shards = sorted((tmp_path / "weights").iterdir())
    assert len(shards) == 3
    assert sum(nbytes for nbytes, _ in seen) == sum(recipe.nbytes for recipe in plan.values())
    loaded = {}
    for shard in shards:
        content = shard.read_bytes()
        size = int.from_bytes(content[:8], "little")
        assert size % 8 == 0
        header = json.loads(content[8 : 8 + size])
        del header["__metadata__"]
        for name, item in header.items():
            assert item["data_offsets"][0] % tensors[name].element_size() == 0
        part = load_file(shard)
        assert not part.keys() & loaded.keys()
        loaded |= part
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].double(), tensor.double())


@pytest.mark.parametrize("tensor", [torch.zeros(5), torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_a_source_that_does_not_fill_its_weight(tmp_path, tensor):
    class Recipe(WeightRecipe):
        def pieces(self, read):
            yield tensor

    with pytest.raises(ValueError, match="the parts of tensor 'a' are not float32"):
        torch_target.write(tmp_path, {}, {"a": Recipe(("a",), "float32", (4,))}, None)


def test_existing_output(tiny_checkpoint, tmp_path):
    output = tmp_path / "engine"
    build_engine(tiny_checkpoint("nano"), output, SMALL)
    with pytest.raises(ValueError, match="--overwrite"):
        build_engine(tiny_checkpoint("qwen"), output, SMALL)
    assert read_manifest(output).model["family"] == "nemotron_h"
    build_engine(tiny_checkpoint("qwen"), output, SMALL, overwrite=True)
    assert read_manifest(output).model["family"] == "qwen3_5"
    with pytest.raises(ValueError, match="never overwritten"):
        build_engine(tiny_checkpoint("nano"), tiny_checkpoint("qwen"), SMALL, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_files_of_others_in_an_engine_are_kept(tiny_checkpoint, tmp_path):
    output = tmp_path / "engine"
    build_engine(tiny_checkpoint("nano"), output, SMALL)
    for name in ("thesis.txt", "weights/notes.txt"):
        (output / name).write_text("years of work")
        with pytest.raises(ValueError, match=f"holds '{name}', which replayssm did not write"):
            build_engine(tiny_checkpoint("nano"), output, SMALL, overwrite=True)
        assert (output / name).read_text() == "years of work"
        (output / name).unlink()
    # Damaged, but still recognizable as an engine: a build may replace it.
    (output / "networks.json").unlink()
    manifest = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    build_engine(tiny_checkpoint("nano"), output, SMALL, overwrite=True)
    verify_files(output, read_manifest(output), "full")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "onnx"}, "target must be one of torch"),
        ({"max_seq_len": 10**7}, "max_position_embeddings"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer >= 1"),
        ({"dtype": "int8"}, "dtype must be auto or one of"),
        ({"state_dtype": "int8"}, "state_dtype must be one of"),
        ({"buffer_len": 0, "readout_dtype": "nvfp4"}, "buffer_len 0"),
        ({"readout_dtype": "nvfp4"}, "an nvfp4 readout needs state columns in multiples of 32"),
    ],
)
def test_refused_options(tiny_checkpoint, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build_engine(tiny_checkpoint("nano"), tmp_path / "engine", BuildOptions(**options))
    assert list(tmp_path.iterdir()) == []


def test_settings_that_a_layer_refuses(tiny_checkpoint, tmp_path):
    with pytest.raises(ValueError, match="choose u_format 'exact'"):
        build_engine(
            tiny_checkpoint("qwen"), tmp_path / "engine", BuildOptions(serial_exact=True, u_format="bfloat16x2")
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "u_format"),
    [
        ({}, "bfloat16x2"),
        ({"dtype": "float32"}, "exact"),
        ({"serial_exact": True}, "exact"),
        ({"u_format": "bfloat16"}, "bfloat16"),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4"}, "bfloat16"),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4", "u_format": "bfloat16x2"}, "bfloat16x2"),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4", "u_source": "checkpoint"}, "bfloat16x2"),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4", "dtype": "float32"}, "exact"),
        ({"state_dtype": "float16", "readout_dtype": "float8"}, "bfloat16x2"),
    ],
)
def test_u_is_kept_as_exactly_as_the_activations_deserve(tiny_checkpoint, tmp_path, options, u_format):
    options = {"dtype": "bfloat16", **options}
    assert (
        build_engine(tiny_checkpoint("qwen"), tmp_path / "engine", BuildOptions(**options)).replay.u_format == u_format
    )


def test_output_around_the_checkpoint(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint("nano"), tmp_path / "models" / "nano")
    for output in (tmp_path / "models" / "nano", tmp_path / "models"):
        with pytest.raises(ValueError, match="holds the checkpoint"):
            build_engine(tmp_path / "models" / "nano", output, SMALL, overwrite=True)


def test_full_disk_is_noticed_first(tiny_checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ValueError, match="GB are free"):
        build_engine(tiny_checkpoint("nano"), tmp_path / "engine", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_leaves_nothing(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint("nano"), tmp_path / "nano")
    shard = next((tmp_path / "nano").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=shard.name):
        build_engine(tmp_path / "nano", tmp_path / "engine", SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nano"]


@pytest.mark.parametrize("name", ["lm_head.weight", "backbone.layers.0.mixer.A_log", "backbone.norm_f.weight"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_weights_that_are_not_finite(tiny_checkpoint, tmp_path, name, bad):
    shutil.copytree(tiny_checkpoint("nano"), tmp_path / "nano")
    path = tmp_path / "nano" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name].view(-1)[5] = bad
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"tensor '{name.removeprefix('backbone.')}' holds NaN or infinity"):
        build_engine(tmp_path / "nano", tmp_path / "engine", SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nano"]


BUILDER = textwrap.dedent(
    """
    import os, signal, sys, time
    import torch
    from replayssm.builders.engine import BuildOptions, build_engine
    torch.set_num_threads(1)
    for line in sys.stdin:
        max_seq_len, seconds = line.split()
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            build_engine(sys.argv[1], sys.argv[2], BuildOptions(max_seq_len=int(max_seq_len)), overwrite=True)
            os._exit(0)
        if float(seconds) > 0:
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, time.perf_counter() - started, flush=True)
    """
)
"""Builds in a child process for every line "max_seq_len seconds" it reads, and kills it after that time if it is not 0.
Starting Python and torch anew for each would take seconds."""


def test_killed_builds(tiny_checkpoint, tmp_path):
    """SIGKILL at random moments: the output is absent or a whole engine, and the next build works."""
    output = tmp_path / "engine"
    choose = random.Random(1)
    command = [sys.executable, "-c", BUILDER, str(tiny_checkpoint("super")), str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:

        def build(max_seq_len, seconds=0.0):
            builder.stdin.write(f"{max_seq_len} {seconds}\n")
            builder.stdin.flush()
            status, duration = builder.stdout.readline().split()
            return int(status), float(duration)

        assert build(16)[0] == 0
        status, build_time = build(17)
        assert status == 0
        whole, stale, killed = 17, 0, 0
        for attempt in range(18, 40):
            status, _ = build(attempt, choose.uniform(0.01, 1.2) * build_time)
            killed += status == -signal.SIGKILL
            manifest = read_manifest(output)
            verify_files(output, manifest, "full")
            assert manifest.limits.max_seq_len in (whole, attempt)
            whole = manifest.limits.max_seq_len
            stale += any(path.name.startswith(".engine.replayssm-building") for path in tmp_path.iterdir())
        assert killed > 5
        assert stale, "no kill hit a build while it wrote"
        assert build(64)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert read_manifest(output).limits.max_seq_len == 64


def test_memory_stays_below_the_checkpoint(tmp_path):
    """A weight plan of 20 x 32 MB is written by a process whose peak grows by less than three of them: the source, its
    converted copy and slack for the allocator."""
    code = textwrap.dedent(
        """
        import re, sys
        from pathlib import Path
        import torch
        from replayssm.builders.parameters import WeightRecipe
        from replayssm.builders.targets.torch import write
        from replayssm.plugins.network import Network
        def peak():  # of this process; ru_maxrss has its parent's too
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
        size = 16 * 2**20
        plan = {f"w{i}": WeightRecipe((f"w{i}",), "bfloat16", (size,)) for i in range(20)}
        write(Path(sys.argv[1]), {"main": Network("main")}, {"w": WeightRecipe(("w",), "bfloat16", (1,))},
              lambda name: torch.zeros(1))
        (Path(sys.argv[1]) / "weights" / "weights.safetensors").unlink()
        (Path(sys.argv[1]) / "weights").rmdir()
        before = peak()
        write(Path(sys.argv[1]), {"main": Network("main")}, plan, lambda name: torch.zeros(size, dtype=torch.bfloat16))
        print(peak() - before)
        """
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 3 * 32
