"""transformers as an oracle in float64, and a driver that runs a network over slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.models import Networks, build_networks
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state, commit, raise_on_error
from replayssm.runtime.executor import Executor


class KeepDouble(TorchFunctionMode):
    """Ignores requests to narrow float64 tensors to float32, which transformers makes in norms, routers and rules."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            if function in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


class Oracle:
    """transformers' full forward in float64, without a cache, over a checkpoint's weights.

    weights: replaces parameters by canonical name before the model is widened; matrices rounded to bf16, for instance.
    """

    def __init__(self, directory: Path, transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> None:
        import transformers

        architecture = Checkpoint.open(directory).config.architecture
        self.model = getattr(transformers, architecture).from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if transform is not None:
                    parameter.copy_(transform(name, parameter))
        self.model.double().eval()
        self.routes: list[torch.Tensor] = []
        for module in self.model.modules():
            if hasattr(module, "time_step_limit"):
                # transformers clamps dt to time_step_min in its chunk path only; engines do not clamp.
                module.time_step_limit = (0.0, float("inf"))
            if type(module).__name__.endswith(("TopkRouter", "TopKRouter")):
                module.register_forward_hook(lambda module, args, output: self.routes.append(output[2]))

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, vocab] of token_ids [B, T]; `routes` then holds each MoE layer's experts [B * T, top_k]."""
        self.routes.clear()
        with KeepDouble():
            return self.model(input_ids=token_ids, use_cache=False).logits

    @torch.no_grad()
    def hidden_states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] after the final norm."""
        with KeepDouble():
            return self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state


class Row(NamedTuple):
    """A window of one sequence: its slot, its committed tokens and the tokens of the window."""

    slot: int
    seq_len: int
    token_ids: torch.Tensor
    hidden_states: torch.Tensor | None = None


@dataclass
class Driver:
    """Runs windows of a network as a session would. All state starts as NaN, which a fresh row must not read."""

    network: Network
    weights: Mapping[str, torch.Tensor]
    settings: ReplaySettings
    slots: int = 7
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.error_flag = torch.zeros(1, dtype=torch.int32)
        self.states: dict[str, LayerState] = {}
        for name, spec in self.network.states.items():
            state = allocate_state(spec.geometry, self.settings, self.slots, error_flag=self.error_flag)
            for tensor in state.tensors.values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            self.states[name] = state
        self.executor = Executor(self.network, self.weights, self.states, **self.options)

    def run(self, rows: list[tuple]) -> list[dict[str, torch.Tensor]]:
        """Outputs of each `Row` (or its fields), for all its tokens; a padding row is added to every call."""
        rows = [Row(*row) for row in rows]
        int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        lengths = [len(row.token_ids) for row in rows]
        starts = [sum(lengths[:index]) for index in range(len(rows))]
        positions = [torch.arange(row.seq_len, row.seq_len + len(row.token_ids)) for row in rows]
        inputs = {
            "token_ids": torch.cat([row.token_ids for row in rows]),
            "positions": torch.cat(positions).int(),
            "seq_lens": int32([*(row.seq_len for row in rows), 0]),
            "window_starts": int32([*starts, 0]),
            "window_lens": int32([*lengths, 0]),
            "state_batch_indices": int32([*(row.slot for row in rows), -1]),
            "logits_indices": torch.arange(sum(lengths)),
        }
        if rows[0].hidden_states is not None:
            inputs["hidden_states"] = torch.cat([row.hidden_states for row in rows])
        outputs = self.executor(inputs)
        raise_on_error(self.error_flag)
        return [
            {name: value[s : s + n] for name, value in outputs.items()} for s, n in zip(starts, lengths, strict=True)
        ]

    def commit(self, slots: list[int], accepted: list[int]) -> None:
        for state in self.states.values():
            commit(state, slots, accepted)


class TinyModel:
    """A tiny checkpoint with its networks, weights and oracle; what is expensive is made once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint = Checkpoint.open(directory)
        self.config = self.checkpoint.config
        self._engines: dict[str, tuple[Networks, dict[str, torch.Tensor]]] = {}
        self._oracle: Oracle | None = None

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            self._oracle = Oracle(self.directory)
        return self._oracle

    def engine(self, dtype: str) -> tuple[Networks, dict[str, torch.Tensor]]:
        if dtype not in self._engines:
            networks = build_networks(self.config, self.checkpoint.module_format, dtype)
            weights = {name: recipe.load(self.checkpoint.tensor) for name, recipe in networks.weight_plan.items()}
            self._engines[dtype] = networks, weights
        return self._engines[dtype]

    def driver(self, dtype: str = "float32", head: str = "main", options: dict | None = None, **settings) -> Driver:
        networks, weights = self.engine(dtype)
        settings = ReplaySettings(activation_dtype=dtype, max_seq_len=320, **settings)
        return Driver(getattr(networks, head), weights, settings, options=options or {})


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint) -> Callable[[str], TinyModel]:
    """`tiny_model(name)` -> the fp32 TinyModel of that layout."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            made[name] = TinyModel(tiny_checkpoint(name, dtype="float32"))
        return made[name]

    return make


@pytest.fixture(scope="session")
def make_oracle() -> type[Oracle]:
    """The oracle's class, for tests that change its weights."""
    return Oracle


@pytest.fixture(scope="session")
def tiny_model_of() -> type[TinyModel]:
    """`tiny_model_of(directory)` -> the TinyModel of any checkpoint."""
    return TinyModel
