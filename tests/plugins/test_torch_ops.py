"""The operators in torch.library: opcheck, torch.compile, torch.export, and other devices."""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins import reference, torch_ops
from replayssm.plugins.state import LayerState, allocate_state

NAMES = ["mamba2", "gdn", "conv", "attention"]
OP = {"mamba2": "mamba2_window", "gdn": "gdn_window", "conv": "causal_conv1d_window", "attention": "attention_window"}


def rows(*columns: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int32) for column in columns]


def flat_arguments(operator, state: LayerState, inputs, row_tensors) -> tuple:
    weights = {name: operator.weights[name] for name in operator.weights}
    if operator.kind == "mamba2":
        weights = [weights[name] for name in ("A_log", "D", "dt_bias")]
    elif operator.kind == "gdn":
        weights = [weights[name] for name in ("A_log", "dt_bias")]
    else:
        weights = list(weights.values())
    tail = {"mamba2": (3,), "gdn": (3,), "conv": (), "attention": (0.5,)}[operator.kind]
    return (*inputs, *weights, state.flat(), state.error_flag, state.spec, *row_tensors, *tail)


MODES = [{}, {"buffer_len": 0}, {"buffer_len": 0, "max_window": 1}, {"serial_exact": True, "u_format": "exact"}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", MODES)
def test_opcheck(make_operator, name, settings):
    """Schema (what is mutated, nothing aliased), fake kernel and tracing, with a fresh, a decode and a padding row."""
    operator = make_operator(name, **{"buffer_len": 4, "max_window": 2, "activation_dtype": "float32", **settings})
    state = operator.pool(3, poison=False)
    if operator.recurrent:
        operator.place(state, 2, 9)
    inputs = operator.inputs(5)
    args = flat_arguments(operator, state, inputs, rows([0, 9, 0], [0, 2, 4], [2, 1, 1], [0, 2, -1]))
    torch.library.opcheck(getattr(torch.ops.replayssm, OP[name]).default, args)


def test_opcheck_without_bias(make_operator):
    operator = make_operator("conv", activation_dtype="bfloat16")
    state = operator.pool(2)
    args = (*operator.inputs(2), operator.weights["weight"], None, state.flat(), state.error_flag, state.spec)
    torch.library.opcheck(torch.ops.replayssm.causal_conv1d_window.default, (*args, *rows([0], [0], [1], [1])))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", MODES)
def test_operator_equals_reference(make_operator, dice, snapshot, assert_same, name, settings):
    settings = {"buffer_len": 4, "max_window": 3, "activation_dtype": "bfloat16", **settings}
    outputs, states = [], []
    for implementation in (reference, torch_ops):
        operator = make_operator(name, implementation=implementation, **settings)
        state, inputs = operator.pool(2), operator.inputs(20)
        lengths = (1, 2, 1, 9) if settings["max_window"] > 1 else (1, 1, 5, 1)
        steps, done = [], 0
        for length in lengths:
            steps.append(operator.window(state, inputs, 1, done, done, length))
            done += length
        outputs.append(torch.cat(steps))
        states.append(snapshot(state))
    assert_same(*outputs)
    assert_same(*states)


@pytest.mark.parametrize("name", ["mamba2_words", "gdn_words"])
def test_low_precision_parts(make_operator, snapshot, assert_same, name):
    """Bytes and e4m3 scales as operator arguments: the reference's bits, and tracing."""
    settings = {"buffer_len": 4, "max_window": 2, "activation_dtype": "float32", "state_dtype": "float8"}
    settings |= {"state_rounding": "stochastic", "readout_dtype": "nvfp4", "u_source": "checkpoint"}
    outputs, states = [], []
    for implementation in (reference, torch_ops):
        operator = make_operator(name, implementation=implementation, **settings)
        state, inputs = operator.pool(2), operator.inputs(20)
        steps = [operator.window(state, inputs, 1, 0, 0, 9)]
        steps += [operator.window(state, inputs, 1, done, done, 1) for done in range(9, 20)]
        outputs.append(torch.cat(steps))
        states.append(snapshot(state))
    assert_same(*outputs)
    assert_same(*states)
    args = flat_arguments(operator, state, operator.inputs(3), rows([20, 0], [0, 2], [2, 1], [1, 0]))
    # The other checks multiply and compare every argument, which torch cannot do with e4m3.
    operation = getattr(torch.ops.replayssm, OP[name.removesuffix("_words")])
    torch.library.opcheck(operation.default, args, test_utils="test_faketensor")


@pytest.mark.parametrize("name", NAMES)
def test_compile_fullgraph(make_operator, snapshot, assert_same, name):
    """A compiled function that calls the operator between other operations, over several steps and one graph."""
    operator = make_operator(name, implementation=torch_ops, buffer_len=4, max_window=1, activation_dtype="float32")
    plain, compiled = operator.pool(2), operator.pool(2)
    steps, inputs = [operator.inputs(2) for _ in range(7)], None

    def step(state, inputs, *row_tensors):
        inputs = [tensor * 0.5 for tensor in inputs]
        weights = operator.weights
        if name == "mamba2":
            y = torch_ops.mamba2_window(
                *inputs, *(weights[w] for w in ("A_log", "D", "dt_bias")), state, *row_tensors, 0
            )
        elif name == "gdn":
            y = torch_ops.gdn_window(*inputs, weights["A_log"], weights["dt_bias"], state, *row_tensors, 0)
        elif name == "conv":
            y = torch_ops.causal_conv1d_window(*inputs, weights["weight"], weights["bias"], state, *row_tensors)
        else:
            y = torch_ops.attention_window(*inputs, state, *row_tensors, scale=0.5)
        return y + 1

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend=backend)
    for seq_len, inputs in enumerate(steps):
        columns = rows([seq_len] * 2, [0, 1], [1, 1], [1, 0])
        assert_same(fast(compiled, inputs, *columns), step(plain, inputs, *columns))
    assert_same(snapshot(compiled), snapshot(plain))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["mamba2", "attention"])
def test_compile_with_functionalization(make_operator, snapshot, assert_same, name):
    """aot_eager functionalises the mutation of the state and must write it back."""
    operator = make_operator(name, implementation=torch_ops, buffer_len=4, max_window=1, activation_dtype="float32")
    plain, compiled = operator.pool(2), operator.pool(2)
    torch._dynamo.reset()

    def step(state, seq_lens, starts, lens, slots, inputs):
        if name == "mamba2":
            weights = [operator.weights[w] for w in ("A_log", "D", "dt_bias")]
            return torch_ops.mamba2_window(*inputs, *weights, state, seq_lens, starts, lens, slots, 0) * 2
        return torch_ops.attention_window(*inputs, state, seq_lens, starts, lens, slots, 0.5) * 2

    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seq_len in range(6):
        columns, inputs = rows([seq_len], [0], [1], [1]), operator.inputs(1)
        assert_same(fast(compiled, *columns, inputs), step(plain, *columns, inputs))
    assert_same(snapshot(compiled), snapshot(plain))


@pytest.mark.parametrize("name", NAMES)
def test_export(make_operator, snapshot, assert_same, name):
    """torch.export with a dynamic number of tokens; the exported program runs and updates the module's state."""
    operator = make_operator(name, implementation=torch_ops, buffer_len=4, max_window=8, activation_dtype="float32")
    module = StateModule(operator, operator.pool(2, poison=False))
    inputs, columns = operator.inputs(3), rows([0], [0], [3], [1])
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(
        module,
        (inputs, columns),
        dynamic_shapes=([{0: tokens}] * len(inputs), [None] * 4),
    )
    assert [node for node in program.graph.nodes if "replayssm" in str(node.target)]
    exported = program.module()
    longer, columns = operator.inputs(5), rows([0], [0], [5], [1])
    assert_same(exported(longer, columns), module(longer, columns))
    for name_, buffer in module.named_buffers():
        assert_same(dict(exported.named_buffers())[name_], buffer)
    program.run_decompositions({})


class StateModule(torch.nn.Module):
    """An operator whose state tensors are buffers."""

    def __init__(self, operator, state: LayerState) -> None:
        super().__init__()
        self.operator, self.spec, self.parts = operator, state.spec, list(state.tensors)
        for part in self.parts:
            self.register_buffer(part, state[part].clone())
        self.register_buffer("error_flag", torch.zeros(1, dtype=torch.int32))

    def forward(self, inputs, row_tensors):
        state = [getattr(self, part) for part in self.parts]
        args = flat_arguments(self.operator, FlatState(state, self.error_flag, self.spec), inputs, row_tensors)
        return getattr(torch.ops.replayssm, OP[self.operator.kind])(*args)


class FlatState:
    def __init__(self, tensors, error_flag, spec) -> None:
        self.tensors, self.error_flag, self.spec = tensors, error_flag, spec

    def flat(self):
        return self.tensors


def test_another_device_can_join(make_operator):
    """register_implementation gives a device its own function, which sees a LayerState; others stay without."""
    operator = make_operator("conv", activation_dtype="float32", max_window=1)
    state = allocate_state(operator.geometry, operator.settings, 2, device="meta")
    inputs = [tensor.to("meta") for tensor in operator.inputs(1)]
    seen = []

    def elsewhere(x, weight, bias, state, *row_tensors):
        seen.append((type(state), state.settings, list(state.tensors)))
        return torch.empty_like(x)

    torch_ops.register_implementation("causal_conv1d_window", "xpu", elsewhere)
    kernel = torch_ops._OPERATORS["causal_conv1d_window"].flattened(elsewhere)
    weights = [operator.weights[name].to("meta") for name in ("weight", "bias")]
    kernel(*inputs, *weights, state.flat(), state.error_flag, state.spec, *rows([0], [0], [1], [0]))
    assert seen == [(LayerState, operator.settings, ["conv_ring"])]
    with pytest.raises(ValueError, match="unknown operator 'conv'"):
        torch_ops.register_implementation("conv", "xpu", elsewhere)
