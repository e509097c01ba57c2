"""Every operator refuses wrong shapes when it is traced, with one message that names it."""

from __future__ import annotations

import pytest

from replayssm.builders import functional as F
from replayssm.builders.functional import Graph, State
from replayssm.builders.parameters import Parameters
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.network import TensorSpec

MAMBA2 = Mamba2Geometry(nheads=4, headdim=8, dstate=16, ngroups=2)
GDN = GdnGeometry(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16)


class Scene:
    """A graph and values of any shape in it."""

    def __init__(self) -> None:
        self.graph = Graph("scene", "bfloat16")
        self.parameters = Parameters(self.graph, lambda module: "dense", {})

    def value(self, *shape, dtype="bfloat16"):
        return self.graph.input(f"x{len(self.graph.network.inputs)}", TensorSpec(dtype, shape))

    def weight(self, *shape):
        return self.parameters.scalars(f"w{len(self.graph.network.weights)}", *shape)

    def projection(self, *shape):
        name = f"p{len(self.graph.network.weights)}"
        build = self.parameters.experts if len(shape) == 3 else self.parameters.linear
        return build(name, *shape)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def mamba2(s: Scene, **changed):
    shapes = {"x": (4, 8), "dt": (4,), "B": (2, 16), "C": (2, 16)}
    values = {name: s.value("T", *changed.get(name, shape)) for name, shape in shapes.items()}
    heads = {name: s.weight(*changed.get(name, (4,))) for name in ("A_log", "D", "dt_bias")}
    return F.mamba2_window(**values, **heads, state=State("ssm", changed.get("geometry", MAMBA2), 0))


def gdn(s: Scene, **changed):
    shapes = {"q": (2, 8), "k": (2, 8), "v": (4, 16), "a": (4,), "b": (4,)}
    values = {name: s.value("T", *changed.get(name, shape)) for name, shape in shapes.items()}
    heads = {name: s.weight(*changed.get(name, (4,))) for name in ("A_log", "dt_bias")}
    return F.gdn_window(**values, **heads, state=State("ssm", changed.get("geometry", GDN), 0))


def conv(s: Scene, x=12, weight=(12, 4), bias=(12,)):
    state = State("conv", ConvGeometry(12, 4), 0)
    return F.causal_conv1d_window(s.value("T", x), s.weight(*weight), bias and s.weight(*bias), state)


def attention(s: Scene, q=(4, 8), k=(2, 8), v=(2, 8)):
    state = State("attention", AttentionGeometry(2, 8), 0)
    return F.attention_window(*(s.value("T", *shape) for shape in (q, k, v)), state, 0.5)


def moe(s: Scene, activation="swiglu", up=(3, 6, 8), down=(3, 8, 6), weights=2):
    ids, values = s.value("T", 2, dtype="int64"), s.value("T", weights, dtype="float32")
    gate = [s.projection(3, 6, 8)] if activation == "swiglu" else []
    return F.moe(s.value("T", 8), ids, values, [*gate, s.projection(*up), s.projection(*down)], activation)


WRONG = {
    "embedding": lambda s: F.embedding(s.value("R", dtype="int64"), s.projection(10, 8)),
    "linear": lambda s: F.linear(s.value("T", 7), s.projection(4, 8)),
    "rms_norm": lambda s: F.rms_norm(s.value("T", 8), s.weight(7), 1e-5),
    "gated_rms_norm z": lambda s: F.gated_rms_norm(s.value("T", 8), s.value("T", 4), s.weight(8), 1e-5, 4, True),
    "gated_rms_norm weight": lambda s: F.gated_rms_norm(s.value("T", 8), s.value("T", 8), s.weight(2), 1e-5, 4, True),
    "gated_rms_norm group": lambda s: F.gated_rms_norm(s.value("T", 8), s.value("T", 8), s.weight(8), 1e-5, 3, True),
    "add": lambda s: F.add(s.value("T", 8), s.value("T", 1)),
    "add dtype": lambda s: F.add(s.value("T", 8), s.value("T", 8, dtype="float32")),
    "multiply": lambda s: F.multiply(s.value("T", 8), s.value("T", 2)),
    "split": lambda s: F.split(s.value("T", 8), [4, 3]),
    "concat": lambda s: F.concat(s.value("T", 8), s.value("R", 8)),
    "reshape": lambda s: F.reshape(s.value("T", 8), 3, 2),
    "rope": lambda s: F.rope(s.value("T", 2, 8), 1e4, 10),
    "rope odd": lambda s: F.rope(s.value("T", 2, 8), 1e4, 3),
    "gather": lambda s: F.gather(s.value("T", 2, 8), s.graph.input("logits_indices")),
    "route_sigmoid": lambda s: F.route_sigmoid(s.value("T", 8), s.weight(7), 2, 1.0, True),
    "route_softmax": lambda s: F.route_softmax(s.value("T", 8), 9),
    "moe up": lambda s: moe(s, up=(3, 6, 7)),
    "moe down": lambda s: moe(s, down=(3, 8, 5)),
    "moe weights": lambda s: moe(s, weights=3),
    "moe activation": lambda s: moe(s, activation="gelu"),
    "causal_conv1d_window x": lambda s: conv(s, x=13),
    "causal_conv1d_window weight": lambda s: conv(s, weight=(12, 3)),
    "causal_conv1d_window bias": lambda s: conv(s, bias=(11,)),
    "mamba2_window x": lambda s: mamba2(s, x=(4, 7)),
    "mamba2_window dt": lambda s: mamba2(s, dt=(3,)),
    "mamba2_window B": lambda s: mamba2(s, B=(4, 16)),
    "mamba2_window D": lambda s: mamba2(s, D=(2,)),
    "mamba2_window state": lambda s: mamba2(s, geometry=GDN),
    "gdn_window q": lambda s: gdn(s, q=(4, 8)),
    "gdn_window v": lambda s: gdn(s, v=(2, 16)),
    "gdn_window a": lambda s: gdn(s, a=(2,)),
    "gdn_window state": lambda s: gdn(s, geometry=MAMBA2),
    "attention_window k": lambda s: attention(s, k=(4, 8)),
    "attention_window q": lambda s: attention(s, q=(4, 7)),
    "attention_window heads": lambda s: attention(s, q=(3, 8)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_are_refused(scene, case):
    with pytest.raises(ValueError, match=f"^{case.split()[0]}: "):
        WRONG[case](scene)
    assert not scene.graph.network.nodes


@pytest.mark.parametrize("build", [mamba2, gdn, conv, attention, moe])
def test_right_shapes_give_one_valid_node(scene, build):
    output = build(scene)
    network = scene.graph.finish(output=output)
    assert len(network.nodes) == 1
    assert output.shape[0] == "T"


def test_a_message_says_what_was_expected_and_found(scene):
    with pytest.raises(ValueError, match=r"^linear: .*p0.* must be 8, got 7$"):
        F.linear(scene.value("T", 7), scene.projection(4, 8))


def test_a_state_belongs_to_one_node(scene):
    conv(scene)
    with pytest.raises(ValueError, match="state 'conv' is already used"):
        conv(scene)


def test_shapes_and_dtypes_follow(scene):
    x = scene.value("T", 8)
    assert F.linear(x, scene.projection(6, 8)).spec == TensorSpec("bfloat16", ("T", 6))
    assert F.linear(x, scene.projection(6, 8), output_dtype="float32").dtype == "float32"
    assert F.linear(x, scene.parameters.linear("router", 6, 8, float32=True)).dtype == "float32"
    assert [part.shape for part in F.split(x, [5, 3])] == [("T", 5), ("T", 3)]
    assert F.concat(x, F.reshape(x, 8)).shape == ("T", 16)
    assert F.gather(x, scene.graph.input("logits_indices")).shape == ("R", 8)
    ids, weights = F.route_softmax(x, 3)
    assert (ids.spec, weights.spec) == (TensorSpec("int64", ("T", 3)), TensorSpec("float32", ("T", 3)))
