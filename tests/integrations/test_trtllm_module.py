"""How the package reaches TensorRT-LLM: by its directory, and from the parent process into workers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.scripts.trtllm_module import module_directory

STANDIN = Path(__file__).parent / "standin"

WORKER = """
import pickle, sys
# MPI workers get the parent's sys.path, and only its TRTLLM* and TLLM* variables.
sys.path[:] = pickle.load(sys.stdin.buffer)
payload = pickle.load(sys.stdin.buffer)
from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
if payload["how"] == "classes":  # 1.2: GenerationExecutorProxy pickles the mapping, worker_main updates its own
    MODEL_CLASS_MAPPING.update(pickle.loads(payload["mapping"]))
else:  # later: the names of external modules, imported before a model is built
    import importlib
    for module in payload["modules"]:
        importlib.import_module(module)
import torch
from types import SimpleNamespace
from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from tensorrt_llm._torch.pyexecutor.mamba_cache_manager import MixedMambaHybridCacheManager
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.logger import logger
config = ModelConfig(dtype=torch.float32)
model = ModelLoader(TorchLlmArgs()).load("NemotronHForCausalLM", config)
executor = PyExecutor(model, MixedMambaHybridCacheManager(config, 4, torch.float32), config)
executor.step([(1, 3)])
executor.step((), [1])
print(type(model).__module__, type(model).__name__)
# TensorRT-LLM pins its own version of these: ours must not ask for them.
print("imported:", *(name for name in ("transformers", "safetensors", "tokenizers", "tensorrt") if name in sys.modules))
print("\\n".join(text for _, text in logger.lines))
"""


def filtered(environment: dict[str, str]) -> dict[str, str]:
    """What MPIPoolExecutor passes on (1.2 and later); PATH stands for the system's own."""
    return {name: value for name, value in environment.items() if name.startswith(("TRTLLM", "TLLM", "PATH"))}


@pytest.mark.parametrize("how", ["classes", "modules"])
def test_workers(trtllm, how):
    """A worker that never heard of --custom_module_dirs builds our class, with the settings of the parent."""
    module = trtllm.load()
    assert module.__name__ == "replayssm_trtllm"
    mapping = trtllm.models.MODEL_CLASS_MAPPING
    payload = {
        "how": how,
        "mapping": pickle.dumps(mapping),
        # export_external_model_modules of 1.4: architecture -> module of every class that is not built in.
        "modules": sorted(
            {cls.__module__ for cls in mapping.values() if not cls.__module__.startswith("tensorrt_llm")}
        ),
    }
    assert payload["modules"] == ["replayssm_trtllm.registration"]
    environment = filtered({**os.environ, "TRTLLM_REPLAYSSM_BUFFER_LEN": "7", "REPLAYSSM_SECRET": "x"})
    result = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=pickle.dumps(sys.path) + pickle.dumps(payload),
        capture_output=True,
        env=environment,
        check=False,
    )
    output = result.stdout.decode()
    assert result.returncode == 0, result.stderr.decode()
    assert output.startswith("replayssm_trtllm.registration ReplayNemotronHForCausalLM\n")
    assert "\nimported:\n" in output
    assert "active for 2 recurrent layers: the state (float32) is rewritten every 7 tokens" in output


def test_worker_that_refuses_where_its_parent_did_not(trtllm):
    """The pickled classes must not keep it from starting: it serves TensorRT-LLM's own."""
    trtllm.load()
    payload = {"how": "classes", "mapping": pickle.dumps(trtllm.models.MODEL_CLASS_MAPPING)}
    result = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=pickle.dumps(sys.path) + pickle.dumps(payload),
        capture_output=True,
        env=filtered({**os.environ, "TRTLLM_REPLAYSSM": "0"}),
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert ".modeling_nemotron_h NemotronHForCausalLM\n" in result.stdout.decode()
    assert "not active, TensorRT-LLM is unchanged: TRTLLM_REPLAYSSM=0" in result.stdout.decode()
    with pytest.raises(AttributeError, match="has no attribute 'ReplayNothing'"):
        _ = sys.modules["replayssm_trtllm.registration"].ReplayNothing


def test_classes_are_registered_under_the_same_names(trtllm):
    trtllm.load()
    mapping = trtllm.models.MODEL_CLASS_MAPPING
    assert mapping.keys() == trtllm.builtin.keys()
    for architecture, cls in mapping.items():
        assert issubclass(cls, trtllm.builtin[architecture])
        assert cls is not trtllm.builtin[architecture]
        assert pickle.loads(pickle.dumps(cls)) is cls


def test_second_import_under_another_name(trtllm, pair):
    """`replayssm.integrations.replayssm_trtllm` is the same package: neither import may wrap the other's classes."""
    served = pair()
    name = "replayssm.integrations.replayssm_trtllm"
    if importlib.util.find_spec("replayssm.integrations") is None:
        pytest.skip("the editable installation is older than the folder integrations")
    try:
        importlib.import_module(name)
        for architecture, cls in trtllm.models.MODEL_CLASS_MAPPING.items():
            assert cls.__mro__[1] is trtllm.builtin[architecture]
        served.step([(1, 3)])
        served.step((), [1])
    finally:
        for found in [found for found in sys.modules if found.startswith(name)]:
            del sys.modules[found]


def test_parent_folder_holds_nothing_else():
    """TensorRT-LLM puts it on sys.path, where any other module would shadow somebody's."""
    folder = module_directory().parent
    others = {path.name for path in folder.iterdir()} - {"replayssm_trtllm", "__init__.py", "__pycache__"}
    assert not others
