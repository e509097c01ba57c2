"""Where replay is refused or hands back, and that TensorRT-LLM's results are the same then as ever."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

EXACT = 2e-6
"""As in test_trtllm_decode.py."""


def warnings_of(trtllm) -> list[str]:
    return [line for line in trtllm.lines("warning") if "ReplaySSM" in line]


def assert_untouched(trtllm, served, reason: str) -> None:
    """Bit-equal to a model without our module, said once, and every decode call went to upstream's operator."""
    assert served.run_some() == 0
    lines = warnings_of(trtllm)
    assert len(lines) == 1, lines
    assert lines[0].startswith("[ReplaySSM] not active, TensorRT-LLM is unchanged: ")
    assert reason in lines[0]
    assert served.kernel_calls >= 20 * len(served.config.layers)
    for executor in (served.ours, served.theirs):
        for layer in served.config.layers:
            assert torch.equal(executor.manager.get_ssm_states(layer), served.theirs.manager.get_ssm_states(layer))


@pytest.mark.parametrize("version", ["1.1.0", "1.5.0", "2.0.0rc1", "nightly"])
def test_unknown_version_registers_nothing(trtllm, version):
    trtllm.root.__version__ = version
    assert trtllm.load().REGISTERED == []
    assert trtllm.builtin == trtllm.models.MODEL_CLASS_MAPPING
    (line,) = warnings_of(trtllm)
    assert f"TensorRT-LLM {version} is not one of the versions 1.2 to 1.4" in line
    assert "TRTLLM_REPLAYSSM_TRUST=version" in line


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.3.0rc25", "1.4.0rc1"])
def test_known_versions(trtllm, version):
    trtllm.root.__version__ = version
    assert len(trtllm.load().REGISTERED) == 5
    assert not warnings_of(trtllm)


def test_trusted_version(trtllm, monkeypatch):
    trtllm.root.__version__ = "1.9.0"
    monkeypatch.setenv("TRTLLM_REPLAYSSM_TRUST", "version")
    assert len(trtllm.load().REGISTERED) == 5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TRTLLM_REPLAYSSM", "0", "TRTLLM_REPLAYSSM=0"),
        ("TRTLLM_REPLAYSSM", "yes", "TRTLLM_REPLAYSSM must be 0 or 1, got 'yes'"),
        ("TRTLLM_REPLAYSSM_BUFFER_LEN", "99", "must be an integer between 1 and 32, got '99'"),
        ("TRTLLM_REPLAYSSM_BUFFER_LEN", "1e1", "must be an integer between 1 and 32, got '1e1'"),
        ("TRTLLM_REPLAYSSM_TRUST", "all", "choice of version, arguments, manager, got all"),
    ],
)
def test_environment(trtllm, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    assert trtllm.load().REGISTERED == []
    assert trtllm.builtin == trtllm.models.MODEL_CLASS_MAPPING
    (line,) = warnings_of(trtllm)
    assert message in line


def test_version_without_a_registry(trtllm):
    del trtllm.models.register_auto_model
    assert trtllm.load().REGISTERED == []
    assert "has no model registry where it is expected" in warnings_of(trtllm)[0]


def test_version_with_one_of_the_models(trtllm):
    for name in [name for name in trtllm.builtin if name.startswith("Qwen")]:
        del trtllm.models.MODEL_CLASS_MAPPING[name]
    for name in ("modeling_qwen3_next", "modeling_qwen3_5"):
        sys.modules[f"tensorrt_llm._torch.models.{name}"] = None  # import raises ImportError
    assert trtllm.load().REGISTERED == ["NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"]
    assert any("Qwen3NextForCausalLM is left out" in line for line in trtllm.lines("info"))


def test_model_that_does_not_register(trtllm, monkeypatch):
    register = trtllm.models.register_auto_model

    def choosy(name):
        if name == "Qwen3NextForCausalLM":
            raise KeyError("taken")
        return register(name)

    monkeypatch.setattr(trtllm.models, "register_auto_model", choosy)
    registered = trtllm.load().REGISTERED
    assert len(registered) == 4
    assert trtllm.models.MODEL_CLASS_MAPPING["Qwen3NextForCausalLM"] is trtllm.builtin["Qwen3NextForCausalLM"]
    assert "Qwen3NextForCausalLM is left out: it does not register (KeyError: 'taken')" in warnings_of(trtllm)[0]


def test_missing_compiler(trtllm, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    assert trtllm.load().REGISTERED == []
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in warnings_of(trtllm)[0]


UNSAFE = {
    "speculation": ({"speculative_config": object()}, "speculative decoding is configured"),
    "eviction": (
        {"scheduler_config": SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")},
        "use GUARANTEED_NO_EVICT",
    ),
    "transceiver": ({"cache_transceiver_config": SimpleNamespace(backend="NIXL")}, "sends states to other workers"),
    "connector": ({"kv_connector_config": object()}, "a connector may read states"),
    "manager V2": (
        {"kv_cache_config": SimpleNamespace(use_kv_cache_manager_v2=True)},
        "suspends requests and moves their states; set it to false",
    ),
    "torch.compile": ({"torch_compile_config": object()}, "set it to null"),
    "beams": ({"max_beam_width": 4}, "set max_beam_width to 1"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe_arguments(trtllm, pair, case):
    changes, reason = UNSAFE[case]
    assert_untouched(trtllm, pair(args=trtllm.llm_args.TorchLlmArgs(**changes)), reason)


def test_eviction_as_the_enum_of_tensorrt_llm(trtllm, pair):
    policy = trtllm.llm_args.CapacitySchedulerPolicy.MAX_UTILIZATION
    args = trtllm.llm_args.TorchLlmArgs(scheduler_config=SimpleNamespace(capacity_scheduler_policy=policy))
    assert_untouched(trtllm, pair(args=args), "use GUARANTEED_NO_EVICT")


def test_transceiver_without_a_backend_is_none(trtllm, pair):
    args = trtllm.llm_args.TorchLlmArgs(cache_transceiver_config=SimpleNamespace(backend=None))
    served = pair(args=args)
    assert served.run_some() < EXACT
    assert not warnings_of(trtllm)


MODEL_CONFIGS = {
    "speculation": ({"spec_config": object()}, "speculative decoding is configured"),
    "context parallelism": ({"mapping": SimpleNamespace(cp_size=2)}, "--context_parallel_size 1"),
    "stochastic rounding": (
        {"quant_config": SimpleNamespace(mamba_ssm_stochastic_rounding=True)},
        "rounded stochastically",
    ),
}


@pytest.mark.parametrize("case", MODEL_CONFIGS)
def test_unsafe_model_configs(trtllm, pair, case):
    changes, reason = MODEL_CONFIGS[case]
    assert_untouched(trtllm, pair(**changes), reason)


def build_without_loader(trtllm, config):
    """As some other code might: nobody up the stack holds arguments."""
    return trtllm.models.MODEL_CLASS_MAPPING["NemotronHForCausalLM"](config)


@pytest.mark.parametrize("trusted", [False, True])
def test_invisible_arguments(trtllm, monkeypatch, trusted):
    if trusted:
        monkeypatch.setenv("TRTLLM_REPLAYSSM_TRUST", "arguments")
    trtllm.load()
    model = build_without_loader(trtllm, trtllm.config.ModelConfig())
    assert model.post_init_ran
    replaced = "forward" in vars(model.model[0])
    assert replaced == trusted
    assert len(warnings_of(trtllm)) == (0 if trusted else 1)


def test_mixer_without_a_known_operator(trtllm, pair, monkeypatch):
    module = sys.modules["tensorrt_llm._torch.modules.mamba.mamba2_mixer"]
    monkeypatch.setattr(module, "renamed", module.selective_state_update, raising=False)
    monkeypatch.delattr(module, "selective_state_update")
    monkeypatch.setattr(module.Mamba2Mixer, "__init__", with_operator(module, "operator"))
    served = pair(spelling="operator")
    assert_untouched(trtllm, served, "has no decode operator 'selective_state_update'")


def with_operator(module, name):
    """Mamba2Mixer's __init__ that keeps the operator in the attribute `name` and nowhere else."""
    original, operator = module.Mamba2Mixer.__init__, vars(module).get("selective_state_update") or module.renamed

    def construct(self, *, layer_idx, config):
        module.selective_state_update = operator
        original(self, layer_idx=layer_idx, config=config)
        if "renamed" in vars(module):
            del module.selective_state_update

    return construct


class WithoutSignature:
    """An operator that `inspect` cannot read, as builtins and operators of extensions may be."""

    def __init__(self, operator):
        self.operator = operator

    @property
    def __signature__(self):
        return "unknown"

    def __call__(self, *args, **kwargs):
        return self.operator(*args, **kwargs)


def test_model_that_cannot_be_read(trtllm, pair, monkeypatch):
    """Whatever goes wrong while the mixers are looked at must not keep the model from being built."""
    module = sys.modules["tensorrt_llm._torch.modules.mamba.gdn_mixer"]
    name = "fused_sigmoid_gating_delta_rule_update"
    monkeypatch.setattr(module, name, WithoutSignature(getattr(module, name)))
    assert_untouched(trtllm, pair("gdn"), "spelled in an unknown way (TypeError: ")


MIXERS = {
    "a missing size": (lambda mixer: delattr(mixer, "d_state"), "lacks d_state: its spelling is unknown"),
    "dt without softplus": (lambda mixer: setattr(mixer, "delta_softplus", False), "does not apply softplus to dt"),
    "no layer number": (lambda mixer: delattr(mixer, "layer_idx"), "Mamba2Mixer has no layer_idx"),
    "another forward": (
        lambda mixer: setattr(mixer, "forward", lambda hidden_states, metadata: None),
        "its forward lacks attn_metadata, mamba_metadata",
    ),
}


@pytest.mark.parametrize("case", MIXERS)
def test_mixer_of_an_unknown_spelling(trtllm, pair, monkeypatch, case):
    monkeypatch.setenv("TRTLLM_REPLAYSSM_TRUST", "arguments")
    change, reason = MIXERS[case]
    model = pair().theirs.model
    change(model.model[1])
    assert sys.modules["replayssm_trtllm.install"].install(model) is None
    (line,) = warnings_of(trtllm)
    assert reason in line
    assert "forward" not in vars(model.model[0]), "a mixer was replaced"


def test_managers_that_move_states(trtllm, pair):
    assert_untouched(trtllm, pair(manager="MambaHybridCacheManagerV2"), "use_kv_cache_manager_v2: false")


def test_unknown_manager(trtllm, pair):
    assert_untouched(trtllm, pair(manager="NewKindOfManager"), "NewKindOfManager is unknown to this module")


def test_trusted_manager(trtllm, pair, monkeypatch):
    monkeypatch.setenv("TRTLLM_REPLAYSSM_TRUST", "manager")
    assert pair(manager="NewKindOfManager").run_some() < EXACT
    assert not warnings_of(trtllm)


@pytest.mark.parametrize("told_by", ["kv_cache_config", "interval"])
def test_block_reuse_in_the_pool_of_pages(trtllm, pair, told_by):
    served = pair(manager="CppMambaHybridCacheManager")
    for executor in (served.ours, served.theirs):
        if told_by == "kv_cache_config":
            executor.manager.kv_cache_config.enable_block_reuse = True
        else:
            del executor.manager.kv_cache_config
            executor.manager.linear_attention_metadata.states_snapshot_interval = 256
    assert_untouched(trtllm, served, "enable_block_reuse: false")


def test_interval_of_snapshots_without_block_reuse(trtllm, pair):
    """Some 1.3 managers set it from the configuration even where enable_block_reuse is false and none is taken."""
    served = pair(manager="CppMambaHybridCacheManager")
    for executor in (served.ours, served.theirs):
        executor.manager.linear_attention_metadata.states_snapshot_interval = 256
    assert served.run_some() < EXACT
    assert not warnings_of(trtllm)


def test_speculation_that_only_the_manager_knows(trtllm, pair):
    served = pair()
    for executor in (served.ours, served.theirs):
        executor.manager.speculative = True
    assert_untouched(trtllm, served, "speculative decoding is configured")


def test_transposed_states(trtllm, pair):
    """Kernels that keep [k, v] where ours keeps [v, k], with equal sizes, so that no shape tells."""
    trtllm.gdn_kernel.TRANSPOSED = True
    served = pair("gdn", rows=16, columns=16)
    assert_untouched(trtllm, served, "may keep states transposed")


def test_another_formula(trtllm, pair, monkeypatch):
    """The trial compares results, so it finds what no name or shape tells."""
    update = trtllm.ssu.update

    def changed(state, x, dt, A, *rest, **kwargs):
        return update(state, x, dt, 2 * A, *rest, **kwargs)

    monkeypatch.setattr(trtllm.ssu, "update", changed)
    assert_untouched(trtllm, pair(), "computes something else here than in this module")


def test_dummy_weights_with_a_growing_state(trtllm, pair):
    served = pair()
    with torch.no_grad():
        for executor in (served.ours, served.theirs):
            for mixer in executor.model.model:
                mixer.A.fill_(1e-3)
    assert_untouched(trtllm, served, "the weights are dummies")


def test_operator_that_fails_its_trial(trtllm, pair, monkeypatch):
    served = pair()
    operator = served.ours.model.model[0]
    real = trtllm.ssu.selective_state_update

    def failing(state, *args, **kwargs):
        if state.shape[0] == 2:
            raise RuntimeError("no such kernel")
        return real(state, *args, **kwargs)

    layer = operator._stp_ssu_func.__self__
    layer.original = failing
    assert_untouched(trtllm, served, "trial of layer 0's decode operator failed: no such kernel")


def test_rings_that_cannot_be_allocated(trtllm, pair, monkeypatch):
    """Memory may run out between the estimate and the allocation: nothing has begun by then."""
    served = pair()
    layer = served.ours.model.model[1]._stp_ssu_func.__self__
    attach = layer.attach

    def failing(pool, *args):
        if pool.shape[0] != 2:  # the trial's
            raise torch.OutOfMemoryError("CUDA out of memory")
        attach(pool, *args)

    monkeypatch.setattr(layer, "attach", failing)
    assert_untouched(trtllm, served, "OutOfMemoryError: CUDA out of memory")


@pytest.fixture
def on_cuda(trtllm, pair, monkeypatch):
    """The checks of a GPU, asked on a machine that may have none: (their owner, RefusedError)."""
    served = pair()
    module = sys.modules["replayssm_trtllm.model"]
    monkeypatch.setattr(module, "device_arch", lambda device: 90)
    layer = served.ours.model.model[0]._stp_ssu_func.__self__
    settings = sys.modules["replayssm_trtllm.settings"]
    return module.ReplayModel([layer], settings.Settings()), layer, settings.RefusedError


def test_rings_that_do_not_fit(on_cuda, monkeypatch):
    replay, _, refused = on_cuda
    for name, value in (("memory_reserved", 900), ("memory_allocated", 400), ("mem_get_info", (500, 5000))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    # 500 bytes are free and 500 more are torch's own; rings may take 90 % of both.
    replay._require_memory(900, 4, torch.device("cuda"))
    with pytest.raises(refused, match=r"the rings of 4 slots need .*free_gpu_memory_fraction or max_batch_size"):
        replay._require_memory(901, 4, torch.device("cuda"))


def test_sizes_without_a_kernel(on_cuda):
    replay, layer, refused = on_cuda
    settings = replay._replay_settings(layer, torch.zeros(1, 4, 8, 16))
    with pytest.raises(refused, match=r"no kernel for this model on this GPU: .*activations are float32"):
        replay._require_kernels({layer: None}, settings, torch.device("cuda"))
    layer.mixer.conv1d.bfloat16()
    settings = replay._replay_settings(layer, torch.zeros(1, 4, 8, 16))
    replay._require_kernels({layer: None}, settings, torch.device("cuda"))


def test_pool_that_the_kernels_cannot_address(trtllm, pair):
    served = pair()
    for executor in (served.ours, served.theirs):
        states = executor.manager.ssm_states
        executor.manager.ssm_states = states.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_untouched(trtllm, served, "must be dense")


POOLS = {
    "of two sizes": (lambda states, layer: states[: 5 + layer], "layers have pools of [5, 6] slots"),
    "of another shape": (lambda states, layer: states.unflatten(-1, (4, 4)), "the state pool is [7, 4, 8, 4, 4]"),
    "of another dtype": (lambda states, layer: states.double(), "states of torch.float64 with activations"),
    "of no layer": (lambda states, layer: {}[layer], "no pool for any layer of this rank"),
}


@pytest.mark.parametrize("case", POOLS)
def test_pools_of_an_unknown_form(trtllm, pair, case):
    change, reason = POOLS[case]
    served = pair()
    states, module = served.ours.manager.get_ssm_states, sys.modules["replayssm_trtllm.model"]
    module.state_pool = lambda manager, layer: change(states(layer), layer)
    assert_untouched(trtllm, served, reason)


def test_metadata_of_an_unknown_form(trtllm, pair):
    """What is wrong before replay began is a reason not to begin."""
    served = pair()
    metadata = sys.modules["replayssm_trtllm.batch"].Batch
    real, metadata.read = metadata.read, lambda *args: 1 / 0
    try:
        assert_untouched(trtllm, served, "ZeroDivisionError: division by zero")
    finally:
        metadata.read = real
