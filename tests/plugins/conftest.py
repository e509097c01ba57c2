"""Operators under test with random inputs, and pools of slots that several sequences share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from replayssm.plugins import reference
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Geometry, Mamba2Geometry
from replayssm.plugins.reference import recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state, raise_on_error, set_checkpoint_position, torch_dtype

GEOMETRIES: dict[str, Geometry] = {
    "mamba2": Mamba2Geometry(nheads=6, headdim=5, dstate=7, ngroups=2),
    "mamba2_odd": Mamba2Geometry(nheads=7, headdim=3, dstate=9, ngroups=1),
    "mamba2_ungrouped": Mamba2Geometry(nheads=5, headdim=4, dstate=8, ngroups=5),
    "mamba2_single": Mamba2Geometry(nheads=1, headdim=8, dstate=16, ngroups=1),
    "mamba2_tiles": Mamba2Geometry(nheads=3, headdim=8, dstate=2048, ngroups=3),
    "mamba2_words": Mamba2Geometry(nheads=4, headdim=6, dstate=64, ngroups=2),
    "gdn": GdnGeometry(num_k_heads=2, num_v_heads=6, head_k_dim=7, head_v_dim=5),
    "gdn_odd": GdnGeometry(num_k_heads=1, num_v_heads=7, head_k_dim=9, head_v_dim=3),
    "gdn_ungrouped": GdnGeometry(num_k_heads=5, num_v_heads=5, head_k_dim=8, head_v_dim=4),
    "gdn_single": GdnGeometry(num_k_heads=1, num_v_heads=1, head_k_dim=16, head_v_dim=8),
    "gdn_tiles": GdnGeometry(num_k_heads=1, num_v_heads=3, head_k_dim=2048, head_v_dim=8),
    "gdn_words": GdnGeometry(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=6),
    "conv": ConvGeometry(conv_dim=13, conv_kernel=4),
    "conv_short": ConvGeometry(conv_dim=5, conv_kernel=2),
    "attention": AttentionGeometry(num_kv_heads=2, head_dim=6),
}


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that equal means bit-equal, NaN included."""
    return tensor.contiguous().view(torch.uint8)


@dataclass
class Operator:
    """One operator with fixed random weights. Inputs are lists of packed tensors [T, ...]."""

    name: str
    settings: ReplaySettings
    seed: int = 0
    implementation: object = reference
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    folds: int = 0
    """Checkpoints that the last `drive` saw, which bounds the times it rounded the state."""

    def __post_init__(self) -> None:
        self.geometry = GEOMETRIES[self.name]
        self.kind = self.geometry.kind
        self.dtype = torch_dtype(self.settings.activation_dtype)
        self.generator = torch.Generator().manual_seed(self.seed)
        g = self.geometry
        heads = g.state_shape[0] if self.recurrent else 0
        if self.recurrent:
            self.weights["A_log"] = self.uniform(heads, low=-2.0, high=1.0).float()
            self.weights["dt_bias"] = self.uniform(heads, low=-3.0, high=0.0).float()
        if self.kind == "mamba2":
            self.weights["D"] = self.normal(heads).float()
        if self.kind == "conv":
            self.weights = {
                "weight": self.normal(g.conv_dim, g.conv_kernel).float(),
                "bias": self.normal(g.conv_dim).float(),
            }

    @property
    def recurrent(self) -> bool:
        return self.kind in ("mamba2", "gdn")

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Random packed inputs in the activation dtype."""
        g = self.geometry
        if self.kind == "mamba2":
            shapes = [(g.nheads, g.headdim), (g.nheads,), (g.ngroups, g.dstate), (g.ngroups, g.dstate)]
        elif self.kind == "gdn":
            keys = (g.num_k_heads, g.head_k_dim)
            shapes = [keys, keys, (g.num_v_heads, g.head_v_dim), (g.num_v_heads,), (g.num_v_heads,)]
        elif self.kind == "conv":
            shapes = [(g.conv_dim,)]
        else:
            keys = (g.num_kv_heads, g.head_dim)
            shapes = [(3 * g.num_kv_heads, g.head_dim), keys, keys]
        return [self.normal(tokens, *shape).to(self.dtype) for shape in shapes]

    def pool(self, slots: int, poison: bool = True) -> LayerState:
        """Slots that hold NaN, as reused memory may, and nonsense positions."""
        state = allocate_state(self.geometry, self.settings, slots)
        if poison:
            for tensor in state.tensors.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else 12345)
        return state

    def place(self, state: LayerState, slot: int, position: int) -> torch.Tensor | None:
        """Start a sequence at `position` with a random state; returns what the checkpoint then holds."""
        if self.kind == "conv":
            ring, behind = state["conv_ring"][slot], torch.arange(position - self.geometry.conv_kernel + 1, position)
            ring[behind % ring.shape[0]] = self.normal(len(behind), ring.shape[1]).to(self.dtype)
            return ring[behind % ring.shape[0]]
        if not self.recurrent:
            raise ValueError("attention starts at position 0")
        state["checkpoint"][slot] = self.normal(*self.geometry.state_shape).to(state["checkpoint"].dtype)
        set_checkpoint_position(state, [slot], [position])
        return state["checkpoint"][slot].clone()

    def run(self, state, inputs, seq_lens, starts, lengths, slots) -> torch.Tensor:
        """One call with rows given as lists of ints."""
        rows = [int32(values) for values in (seq_lens, starts, lengths, slots)]
        w, ops = self.weights, self.implementation
        if self.kind == "mamba2":
            return ops.mamba2_window(*inputs, w["A_log"], w["D"], w["dt_bias"], state, *rows, 0)
        if self.kind == "gdn":
            return ops.gdn_window(*inputs, w["A_log"], w["dt_bias"], state, *rows, 0)
        if self.kind == "conv":
            return ops.causal_conv1d_window(*inputs, w["weight"], w["bias"], state, *rows)
        return ops.attention_window(*inputs, state, *rows, self.geometry.head_dim**-0.5)

    def window(self, state, inputs, slot: int, seq_len: int, start: int = 0, length: int | None = None) -> torch.Tensor:
        """One row alone: tokens [start, start + length) of `inputs` at seq_len."""
        length = inputs[0].shape[0] - start if length is None else length
        own = [tensor[start : start + length] for tensor in inputs]
        return self.run(state, own, [seq_len], [0], [length], [slot])

    def drive(self, state, inputs, slot: int, position: int, dice: random.Random, junk=None, prefill: float = 0.0):
        """Outputs of all tokens of `inputs`, run from `position` in random windows whose tails are rejected.

        A window is 1 to max_window tokens, of which a random number >= 1 is accepted; the rejected rest comes from
        `junk` (packed inputs, used cyclically). With probability `prefill` a longer window is run instead.
        """
        total, done, limit = inputs[0].shape[0], 0, self.settings.max_window
        outputs, positions = [], set()
        while done < total:
            if dice.random() < prefill and total - done > limit:
                length = accepted = dice.randint(limit + 1, total - done)
            else:
                length = dice.choice((1, limit, dice.randint(1, limit)))
                accepted = min(dice.randint(1, length), total - done)
            parts = [tensor[done : done + accepted] for tensor in inputs]
            if junk is not None and length > accepted:
                begin = done % (junk[0].shape[0] - limit)
                tails = [tensor[begin : begin + length - accepted] for tensor in junk]
                parts = [torch.cat(pair) for pair in zip(parts, tails, strict=True)]
            outputs.append(self.window(state, parts, slot, position + done)[:accepted])
            raise_on_error(state.error_flag)
            if "checkpoint_position" in state.tensors:
                positions.add(int(state["checkpoint_position"][slot, 0, 0]))
            done += accepted
        self.folds = len(positions)
        return torch.cat(outputs)

    def judge(self, inputs, initial: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(outputs, states after each token or None) of the token-by-token recurrence in fp64."""
        w = self.weights
        if self.kind == "mamba2":
            return recurrence.mamba2_recurrence(*inputs, w["A_log"], w["D"], w["dt_bias"], initial)
        if self.kind == "gdn":
            return recurrence.gdn_recurrence(*inputs, w["A_log"], w["dt_bias"], initial, self.dtype)
        if self.kind == "conv":
            return recurrence.causal_conv1d_recurrence(*inputs, w["weight"], w["bias"], initial), None
        q, k, v = (tensor.double() for tensor in inputs)
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * self.geometry.head_dim**-0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v), None


@pytest.fixture
def make_operator():
    """make_operator(name, seed=0, implementation=reference, **settings) -> Operator, fp64 unless told otherwise."""

    def make(name: str, seed: int = 0, implementation: object = reference, **settings) -> Operator:
        activation = settings.setdefault("activation_dtype", "float64")
        settings.setdefault("state_dtype", "float64" if activation == "float64" else "float32")
        settings.setdefault("u_format", "exact" if activation == "float64" else "bfloat16x2")
        settings.setdefault("max_seq_len", 2**24 if name.startswith(("mamba2", "gdn", "conv")) else 512)
        return Operator(name, ReplaySettings(**settings), seed, implementation)

    return make


@pytest.fixture
def snapshot():
    """snapshot(state) -> bytes of every tensor of a state, to be compared with `==`-like `same`."""

    def take(state: LayerState) -> dict[str, torch.Tensor]:
        return {name: bits(tensor).clone() for name, tensor in state.tensors.items()}

    return take


@pytest.fixture
def assert_same():
    """assert_same(a, b): tensors or snapshots are equal bit for bit."""

    def check(a, b) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.equal(a[name], b[name]), name
        else:
            assert torch.equal(bits(a), bits(b))

    return check


@pytest.fixture
def dice():
    """Seeded source of lengths and positions."""
    return random.Random(20261130)
