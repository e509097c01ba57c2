"""A deployment of the stand-in TensorRT-LLM, twice: with our module and without, fed the same requests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

STANDIN = Path(__file__).parent / "standin"
INTEGRATIONS = Path(__file__).resolve().parents[2] / "integrations"
ARCHITECTURE = {"mamba2": "NemotronHForCausalLM", "gdn": "Qwen3NextForCausalLM"}


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt_llm", "replayssm_trtllm")]:
        del sys.modules[name]


@pytest.fixture
def trtllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in, freshly imported, and `load()`, which imports our package as TensorRT-LLM would."""
    monkeypatch.syspath_prepend(str(STANDIN))
    # The importer extends sys.path itself; monkeypatch puts the list back.
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TRTLLM_REPLAYSSM", "TRTLLM_REPLAYSSM_BUFFER_LEN", "TRTLLM_REPLAYSSM_TRUST"):
        monkeypatch.delenv(name, raising=False)
    _forget_modules()
    torch_part = "tensorrt_llm._torch."
    names = {
        "root": "tensorrt_llm",
        "llm_args": "tensorrt_llm.llmapi.llm_args",
        "importer": "tensorrt_llm.tools.importlib_utils",
        "log": "tensorrt_llm.logger",
        "models": torch_part + "models.modeling_utils",
        "nemotron": torch_part + "models.modeling_nemotron_h",
        "qwen": torch_part + "models.modeling_qwen3_5",
        "config": torch_part + "model_config",
        "managers": torch_part + "pyexecutor.mamba_cache_manager",
        "loader": torch_part + "pyexecutor.model_loader",
        "executor": torch_part + "pyexecutor.py_executor",
        "ssu": torch_part + "modules.mamba.selective_state_update",
        "gdn_kernel": torch_part + "modules.fla.fused_sigmoid_gating_recurrent",
        "chunk": torch_part + "modules.fla.chunk",
    }
    modules = SimpleNamespace(**{name: importlib.import_module(path) for name, path in names.items()})
    modules.builtin = dict(modules.models.MODEL_CLASS_MAPPING)
    modules.load = lambda: modules.importer.import_custom_module_from_dir(INTEGRATIONS / "replayssm_trtllm")
    modules.lines = lambda level: [text for found, text in modules.log.logger.lines if found == level]
    yield modules
    _forget_modules()


class Pair:
    """`ours` and `theirs`: executors of the same model, with and without our module.

    step(...) runs one step in both and returns both outputs; upstream's decode kernels are counted while ours runs.
    """

    def __init__(self, trtllm, config, manager, pool_dtype, slots, args, with_kv_lens) -> None:
        self.trtllm, self.config = trtllm, config
        architecture = ARCHITECTURE[config.kind]
        torch.manual_seed(0)
        theirs = trtllm.builtin[architecture](config)
        ours = trtllm.loader.ModelLoader(args).load(architecture, config)
        ours.load_state_dict(theirs.state_dict())
        make = getattr(trtllm.managers, manager)
        self.ours, self.theirs = (
            trtllm.executor.PyExecutor(model, make(config, slots, pool_dtype), config, with_kv_lens)
            for model in (ours, theirs)
        )
        self.kernel_calls = 0

    def step(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        counters = (self.trtllm.ssu.CALLS, self.trtllm.gdn_kernel.CALLS)
        before = sum(map(len, counters))
        ours = self.ours.step(*args, **kwargs)
        self.kernel_calls += sum(map(len, counters)) - before
        return ours, self.theirs.step(*args, **kwargs)

    def finish(self, request: int) -> None:
        for executor in (self.ours, self.theirs):
            executor.finish(request)

    @staticmethod
    def difference(outputs: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Largest difference over any row, relative to the row's norm; ours must be finite."""
        ours, theirs = (part.double() for part in outputs)
        assert torch.isfinite(ours).all()
        return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())

    def run_some(self, steps: int = 20) -> float:
        """Two requests' prompts and some steps; the largest difference."""
        return max(self.difference(self.step([(1, 3), (2, 5)])), self.run_more(steps))

    def run_more(self, steps: int = 20) -> float:
        return max(self.difference(self.step((), [1, 2])) for _ in range(steps))

    def stale(self, request: int = 1) -> bool:
        """Whether our pool is behind upstream's."""
        ours, theirs = self.pools(0, request)
        return bool((ours - theirs).norm() > 0.01 * theirs.norm())

    def pools(self, layer: int, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's state in both pools, fp64."""
        return tuple(
            executor.manager.get_ssm_states(layer)[executor.manager.slot_of[request]].double()
            for executor in (self.ours, self.theirs)
        )


@pytest.fixture
def pair(trtllm) -> Callable[..., Pair]:
    """`pair(kind=..., spelling=..., manager=..., pool_dtype=..., ...)` imports our module and makes a Pair."""

    def make(
        kind: str = "mamba2",
        spelling: str = "_stp_ssu_func",
        manager: str = "MixedMambaHybridCacheManager",
        pool_dtype: torch.dtype = torch.float32,
        slots: int = 6,
        args: SimpleNamespace | None = None,
        with_kv_lens: bool = True,
        **sizes,
    ) -> Pair:
        trtllm.load()
        config = trtllm.config.ModelConfig(kind=kind, spelling=spelling, **{"dtype": torch.float32, **sizes})
        args = args or trtllm.llm_args.TorchLlmArgs()
        return Pair(trtllm, config, manager, pool_dtype, slots, args, with_kv_lens)

    return make
