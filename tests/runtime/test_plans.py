"""Plans behind the session, with a stand-in for TensorRT that computes them with PyTorch. No real plan has run."""

from __future__ import annotations

import json
import random
import sys
from types import FunctionType

import pytest
import torch

from replayssm.builders.targets.tensorrt import profiles
from replayssm.plugins.manifest import EngineDirectoryError, Limits
from replayssm.plugins.tensorrt_ops import PLANS_FILE
from replayssm.runtime import plan_executors, plans
from replayssm.runtime.generation import generate
from replayssm.runtime.plan_calls import choose_bucket, max_tokens
from replayssm.runtime.plans import PlanRuntime
from replayssm.runtime.serving import slot_bytes, slots_that_fit, usable_bytes, with_max_seq_len
from replayssm.runtime.session import Row, Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter

PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(290, 20, -1)), [5] * 30, [11, 250, 3]]

CLOSE = 0.02
"""fp16 logits of size 1: 2^-11 a rounding, some dozen of which the targets place differently (sums over experts and
inside products run in another order)."""


@pytest.fixture
def pair(plan_engine, tiny_engine):
    """`pair(layout, target)` -> (engine of plans, engine of the torch target, stand-in)."""

    def make(layout, target="tensorrt", **options):
        engine, module = plan_engine(layout, target, **options)
        return engine, tiny_engine(layout, dtype="float16", max_batch_size=4), module

    return make


@pytest.mark.parametrize(
    ("layout", "target", "draft"),
    [
        ("nano", "tensorrt", None),
        ("super", "tensorrt", MtpDrafter),
        ("qwen", "tensorrt", lambda session: NgramDrafter()),
        ("qwen_moe", "tensorrt", MtpDrafter),
        ("nano", "tensorrt-rtx", MtpDrafter),
        ("super", "tensorrt-rtx", None),
        ("qwen", "tensorrt-rtx", MtpDrafter),
        ("qwen_moe", "tensorrt-rtx", lambda session: NgramDrafter()),
    ],
)
def test_a_plan_generates_what_the_torch_target_generates(pair, assert_same_tokens, layout, target, draft):
    """Five prompts over four slots: chunks, windows of drafts and single tokens in one call, slots used again."""
    engine, oracle, module = pair(layout, target)
    session = Session(engine)
    results = generate(session, PROMPTS, 10, drafter=None if draft is None else draft(session))
    for ours, plain in zip(results, generate(Session(oracle), PROMPTS, 10), strict=True):
        assert_same_tokens(oracle, ours.prompt_token_ids, ours.token_ids, plain.token_ids, CLOSE)
    contexts = [context for built in module.engines for context in built.contexts]
    assert contexts
    assert not any(context.shape_changes for context in contexts), "a context's shapes are set once (TensorRT#4849)"
    assert all(built.num_aux_streams == 0 for built in module.engines)


@pytest.mark.parametrize(
    ("layout", "alias", "prefill_plan"),
    [("nano", "declared", False), ("qwen", "bound", False), ("nano", "bound", True), ("qwen", "declared", True)],
)
def test_random_steps_match_the_torch_target(pair, layout, alias, prefill_plan):
    """Rows of every kind and number, windows taken back, no wanted logits at all: outputs of each step, then state."""
    engine, oracle, module = pair(layout, alias=alias, prefill_plan=prefill_plan)
    generator = random.Random(7)
    ours, reference = Session(engine), Session(oracle)
    slots = [session.allocate() for session in (ours, reference) for _ in range(4)][:4]
    for _ in range(14):
        rows = []
        for slot in generator.sample(slots, generator.randint(1, 4)):
            length = generator.choice([1, 1, 2, 3, 4, generator.randint(5, 40)])
            tokens = [generator.randrange(300) for _ in range(length)]
            rows.append(Row(slot, tokens, generator.choice(["last", "all", "none"])))
        got, expected = ours.step(rows), reference.step(rows)
        for name in ("logits", "hidden_states"):
            a, b = getattr(got, name), getattr(expected, name)
            assert a.shape == b.shape
            assert torch.isfinite(a).all(), "padding is NaN and stays there"
            assert not a.numel() or (a - b).abs().max() < CLOSE * max(1, b.abs().max()), name
        accepted = {row.slot: generator.randint(0, len(row.tokens)) for row in rows if len(row.tokens) <= 4}
        for session in (ours, reference):
            session.advance(accepted)
    for name, state in reference.states.items():
        for part, tensor in state.tensors.items():
            difference = (ours.states[name][part].float() - tensor.float()).abs().max()
            assert difference <= CLOSE * max(1, tensor.float().abs().max()), (name, part)
    for _, config in module.plans.values():
        assert config.max_aux_streams == 0
        assert "TF32" not in config.flags, "fp32 means fp32"
        assert config.profiling_verbosity == "DETAILED", "check reads the layers"
        assert bool(config.previews) == (alias == "declared")
    aliases = [built.get_aliased_input_tensor(name) for built in module.engines for name in built.tensors]
    assert any(aliases) == (alias == "declared")


def test_state_is_bound_in_place(plan_engine):
    """Both names of every part at torch's own address; TensorRT allocates nothing."""
    engine, module = plan_engine("nano")
    session = Session(engine)
    session.prefill(session.allocate(), PROMPTS[0])
    addresses = {tensor.data_ptr() for state in session.states.values() for tensor in state.tensors.values()}
    contexts = [context for built in module.engines for context in built.contexts]
    bound = {address for context in contexts for name, address in context.addresses.items() if name.endswith(".out")}
    main = [context for context in contexts if "logits" in context.addresses and context.runs]
    for context in main:
        for name, address in context.addresses.items():
            if name.endswith(".out"):
                assert address == context.addresses[name.removesuffix(".out")], name
        assert context.memory[1] >= context.engine.device_memory_size_v2
    assert bound <= addresses | {state.error_flag.data_ptr() for state in session.states.values()}


def test_steps_captured_as_graphs_are_the_same(pair, assert_same_tokens):
    """`cuda_graphs` drives a plan as it drives the torch target; on the CPU uncaptured."""
    engine, oracle, _ = pair("qwen")
    results = generate(Session(engine, graphs=True), PROMPTS, 10)
    for ours, plain in zip(results, generate(Session(oracle), PROMPTS, 10), strict=True):
        assert_same_tokens(oracle, ours.prompt_token_ids, ours.token_ids, plain.token_ids, CLOSE)


def test_prefill_rows_run_by_a_plan_of_their_own(plan_engine, monkeypatch):
    """Two plans a network over one state: the chunked kernels get prefill rows only, and windows never wait."""
    engine, _ = plan_engine("qwen", prefill_plan=True)
    assert set(engine.manifest.kernels) >= {"gdn_prefill", "gdn_window", "attention_window"}
    session = Session(engine)
    slots = [session.allocate() for _ in range(3)]
    window, prefill = session.executors["main"].phases
    runs = []

    def recorded(executor, bucket, values, original=plan_executors.PlanExecutor._run):
        runs.append(("prefill" if executor is prefill else "window", values["window_lens"].tolist()))
        return original(executor, bucket, values)

    monkeypatch.setattr(plan_executors.PlanExecutor, "_run", recorded)
    session.step([Row(slots[0], [1, 2, 3]), Row(slots[1], list(range(40))), Row(slots[2], [7])])
    session.decode(slots, [4, 5, 6])
    # Five tokens in two rows could be windows; the session knows that one is not.
    session.step([Row(slots[0], [1]), Row(slots[1], list(range(5)))])
    assert runs[3:] == [("prefill", [5, 0, 0, 0]), ("window", [1])]
    assert runs[:3] == [("prefill", [40, 0, 0, 0]), ("window", [3, 1, 0, 0]), ("window", [1, 1, 1, 0])]
    sizes = {plan.path.name: plan.engine.num_optimization_profiles for plan in window.runtime.plans.values()}
    assert sizes == {"main.plan": 2, "main-prefill.plan": 1, "mtp.plan": 2, "mtp-prefill.plan": 1}
    assert window.bound["layers.0.conv.conv_ring"] is prefill.bound["layers.0.conv.conv_ring"]


def test_results_outlive_the_next_call(plan_engine):
    """Drafters keep hidden states, and the next call of a bucket writes to the same buffers."""
    engine, _ = plan_engine("nano")
    session = Session(engine)
    slot = session.allocate()
    first = session.step([Row(slot, [5, 6])])
    kept = first.logits.clone(), first.hidden_states.clone()
    second = session.step([Row(slot, [7, 8])])
    assert not torch.equal(second.hidden_states, kept[1])
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.hidden_states, kept[1])


@pytest.mark.parametrize(("batch", "drafts"), [(1, 0), (4, 3), (6, 0), (256, 4), (200, 7)])
def test_buckets_hold_the_call_and_are_few(batch, drafts):
    phases = [{"name": p.name, "sizes": p.sizes} for p in profiles(Limits(batch, 4096, drafts))]
    generator, found = random.Random(batch), set()
    most = max_tokens(phases)
    for number in range(4000):
        rows = generator.randint(1, batch)
        tokens = rows if number % 3 == 0 else generator.randint(rows, min(rows * (1 + drafts), most))
        tokens = generator.randint(rows, most) if number % 3 == 1 else tokens
        sizes = {"T": tokens, "R": generator.randint(0, tokens), "B": rows}
        bucket = choose_bucket(phases, sizes)
        limits = phases[bucket.profile]["sizes"]
        for symbol, size in bucket.sizes:
            assert sizes[symbol] <= size
            assert limits[symbol][0] <= size <= limits[symbol][2]
        found.add(bucket)
    assert len(found) <= 2 * (batch.bit_length() + 1) + 2 * (most.bit_length() + 1)
    with pytest.raises(ValueError, match=f"do not fit the plans, which hold {most} tokens"):
        choose_bucket(phases, {"T": most + 1, "R": 1, "B": 1})


@pytest.mark.parametrize("prefill_plan", [False, True])
def test_more_tokens_than_a_profile_run_as_several_calls(pair, prefill_plan):
    """Long prompts side by side, as a server's step may have them."""
    engine, oracle, _ = pair("nano", prefill_plan=prefill_plan)
    ours, reference = Session(engine), Session(oracle)
    slots = [ours.allocate() for _ in range(4)]
    assert slots == [reference.allocate() for _ in range(4)]
    wanted = ["last", "all", "none", "last"]
    rows = [Row(slot, [(slot + i) % 300 for i in range(120 + 40 * slot)], wanted[slot]) for slot in slots]
    assert sum(len(row.tokens) for row in rows) > max_tokens(PlanRuntime.describe(engine.directory)["profiles"])
    got, expected = ours.step(rows), reference.step(rows)
    assert got.logits.shape == expected.logits.shape
    assert (got.logits - expected.logits).abs().max() < CLOSE * expected.logits.abs().max()
    ours.free(slots[0])
    with pytest.raises(ValueError, match="300 tokens in 1 rows with 1 wanted logits do not fit the plans"):
        ours.step([Row(ours.allocate(), [1] * 300)])


def test_a_prefill_chunk_beyond_the_plans_is_refused(plan_engine):
    engine, _ = plan_engine("nano")
    with pytest.raises(ValueError, match="prefill_chunk 300 is more than the 272 tokens"):
        Session(engine, prefill_chunk=300)


def test_a_session_of_fewer_slots_runs_on_the_state_of_all(pair, assert_same_tokens):
    engine, oracle, _ = pair("nano")
    session = Session(engine, slots=2)
    assert all(state.slots == 4 for state in session.states.values())
    results = generate(session, PROMPTS[:3], 6)
    for ours, plain in zip(results, generate(Session(oracle), PROMPTS[:3], 6), strict=True):
        assert_same_tokens(oracle, ours.prompt_token_ids, ours.token_ids, plain.token_ids, CLOSE)


def test_what_does_not_fit_a_plan_is_refused_in_one_line(plan_engine, monkeypatch):
    engine, _ = plan_engine("nano")
    with pytest.raises(ValueError, match="plans are compiled for their max_seq_len of 400"):
        with_max_seq_len(engine, 300)
    assert with_max_seq_len(engine, 400).manifest.limits.max_seq_len == 400
    size, _ = slot_bytes(engine)
    with pytest.raises(ValueError, match="the plans hold the state of 4 sequences"):
        slots_that_fit(engine, 3 * size, 1)
    assert slots_that_fit(engine, 4 * size, 1) == 1
    assert usable_bytes(engine, "cpu", 1.0) > 0
    monkeypatch.setattr(plans, "PLAN_DEVICE", "cuda")
    with pytest.raises(ValueError, match=r"run on a GPU, not on device cpu: use --device cuda"):
        Session(engine)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ValueError, match=r"needs the package tensorrt, which is not installed: pip install '"):
        Session(engine)


def damage_plan(engine, module, monkeypatch):
    module.plans.clear()
    return r"tensorrt 11\.4\.0 does not take .*main\.plan, which tensorrt 11\.4\.0 wrote \(the plan has an invalid"


def other_profiles(engine, module, monkeypatch):
    for _, config in module.plans.values():
        config.profiles.pop()
    return "has 2 profiles and 0 auxiliary streams, expected 3 and none"


def auxiliary_streams(engine, module, monkeypatch):
    for _, config in module.plans.values():
        config.max_aux_streams = 2
    return "3 profiles and 2 auxiliary streams"


def other_state(engine, module, monkeypatch):
    for network, _ in module.plans.values():
        del network.inputs["layers.0.conv.conv_ring"]
        break
    return "differs from its network in layers.0.conv.conv_ring"


def other_type(engine, module, monkeypatch):
    network, _ = next(iter(module.plans.values()))
    tensor = network.inputs["seq_lens"]
    tensor._sample = tensor._sample.to(torch.int64)
    return r"tensor seq_lens is DataType.INT64 \[-1\], expected int32"


def wrong_alias(engine, module, monkeypatch):
    from tensorrt_stand_in import Engine

    monkeypatch.setattr(Engine, "get_aliased_input_tensor", lambda self, name: "seq_lens")
    return r"TensorRT aliases .*\.out with seq_lens instead of"


def other_version(engine, module, monkeypatch):
    path = engine.directory / PLANS_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    return "has version 1, this replayssm runs version 2"


def no_description(engine, module, monkeypatch):
    (engine.directory / PLANS_FILE).write_text("[]")
    return "does not describe plans"


CHANGES = (damage_plan, other_profiles, auxiliary_streams, other_state, other_type, wrong_alias, other_version)


@pytest.mark.parametrize("change", [*CHANGES, no_description], ids=lambda change: change.__name__)
def test_plans_that_are_not_the_networks_are_refused_at_load(plan_engine, monkeypatch, change):
    engine, module = plan_engine("nano")
    message = change(engine, module, monkeypatch)
    with pytest.raises(EngineDirectoryError, match=message):
        Session(engine)


def test_the_oldest_version_runs(plan_engine, monkeypatch):
    """TensorRT 10.13 and 10.14 have no query for aliases, and type networks strongly by a flag."""
    from tensorrt_stand_in import Engine

    monkeypatch.delattr(Engine, "get_aliased_input_tensor")
    engine, _ = plan_engine("qwen_moe", version="10.13.3.9")
    assert generate(Session(engine), PROMPTS[:1], 2)[0].token_ids


def test_memory_is_reported(plan_engine):
    engine, _ = plan_engine("nano")
    runtime = PlanRuntime(engine.directory, "tensorrt", torch.device("cpu"))
    assert runtime.memory == {"plans": engine.weight_bytes, "scratch": 4096, "device_in_use": 0}


@pytest.mark.parametrize("name", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_the_stand_in_has_nothing_that_nvidias_bindings_lack(name):
    """Methods, properties and members of enumerations."""
    import tensorrt_stand_in as stand_in

    real, module = pytest.importorskip(name), stand_in.make_module()
    pairs = {"ICudaEngine": stand_in.Engine, "IExecutionContext": stand_in.Context, "Runtime": module.Runtime}
    if name == "tensorrt_rtx":
        pairs |= {"INetworkDefinition": stand_in.Network, "IBuilderConfig": stand_in.BuilderConfig}
        pairs |= {"Builder": stand_in.Builder, "ITensor": stand_in.Tensor}
    known = 0
    for real_name, kind in pairs.items():
        members = {n: value for n, value in vars(kind).items() if isinstance(value, (FunctionType, property))}
        # RTX has no plugins; the other is the stand-in's own.
        public = {n for n in members if not n.startswith("_")} - {"add_plugin", "sample"}
        assert public
        for member in public:
            assert hasattr(getattr(real, real_name), member), f"{real_name}.{member}"
            known += 1
    assert known > 15
    for member in ("num_io_tensors", "num_optimization_profiles", "num_aux_streams", "device_memory_size_v2"):
        assert hasattr(real.ICudaEngine, member)
    assert set(real.TensorIOMode.__members__) >= {"INPUT", "OUTPUT"}
    assert "USER_MANAGED" in real.ExecutionContextAllocationStrategy.__members__
    assert "JSON" in real.LayerInformationFormat.__members__
    assert {kind.name for kind in stand_in.DataType} <= set(real.DataType.__members__)


def test_a_plan_runs_with_the_calls_that_nvidia_documents(plan_engine):
    """What a real context is asked for: names of methods that were called on the stand-in, in order, for one bucket."""
    engine, _ = plan_engine("nano")
    session = Session(engine)
    calls = []
    from tensorrt_stand_in import Context

    originals = {n: v for n, v in vars(Context).items() if isinstance(v, FunctionType) and not n.startswith("_")}
    with pytest.MonkeyPatch.context() as patch:
        for name, original in originals.items():
            patch.setattr(Context, name, lambda self, *a, n=name, f=original: (calls.append(n), f(self, *a))[1])
        session.decode([session.allocate()], [5])
    order = list(dict.fromkeys(calls))
    assert order == [
        "set_device_memory",
        "set_optimization_profile_async",
        "set_input_shape",
        "set_tensor_address",
        "infer_shapes",
        "execute_async_v3",
    ]
