"""Weights of a network: how model definitions name them, in which format each is kept, and where it comes from.

This is the only place that knows about quantization formats. A model definition asks its `Parameters` for a projection
by its module name; the checkpoint's format of that module decides which tensors the engine stores for it
(`weight_shapes.storage`), packed as they are. Experts are the same with a leading expert dimension. `WeightRecipe`
says how each engine weight is obtained, and refuses values that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from replayssm.builders.elements import PIECE_ELEMENTS, all_finite
from replayssm.builders.formats import DENSE, FP8, NVFP4, W4A16_NVFP4
from replayssm.builders.weight_shapes import storage
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.network import WeightSpec
from replayssm.plugins.state import dtype_name, torch_dtype

if TYPE_CHECKING:
    from replayssm.builders.functional import Graph, Value

OPERAND_FORMATS: dict[str, tuple[str, str | None]] = {
    DENSE: ("dense", None),
    NVFP4: ("nvfp4", "nvfp4"),
    W4A16_NVFP4: ("nvfp4", None),
    FP8: ("fp8", "fp8"),
}
"""Checkpoint format of a module -> (weight format, activation format) of its linear operator."""

PACKED_DTYPES = ("uint8", "float8_e4m3fn")


@dataclass(frozen=True)
class WeightRecipe:
    """How one engine weight is obtained from checkpoint tensors.

    sources: canonical checkpoint names. `stacked` sources form a new first dimension, otherwise there is one source.
    dtype, shape: of the engine weight. Floating values are converted; packed ones are copied bit for bit.
    """

    sources: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    stacked: bool = False

    @property
    def spec(self) -> WeightSpec:
        return WeightSpec(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * ELEMENT_BITS[self.dtype] // 8

    def pieces(self, read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Contiguous tensors whose bytes, one after the other, are the weight. One source is read at a time, and a
        piece has at most PIECE_ELEMENTS, so that converting a large weight does not need its size in memory.

        read: canonical name -> tensor, such as `Checkpoint.tensor`.
        """
        shape = self.shape[1:] if self.stacked else self.shape
        for name in self.sources:
            source = _checked(name, read(name), self.dtype, shape)
            for piece in source.reshape(-1).split(PIECE_ELEMENTS):
                yield _finite(name, piece.to(torch_dtype(self.dtype)).contiguous(), self.dtype)
            del source, piece  # before the next one is read

    def load(self, read: Callable[[str], torch.Tensor], allow_view: bool = False) -> torch.Tensor:
        """The whole weight. allow_view: return what `read` gives where it is stored as the engine wants it."""
        if allow_view and not self.stacked:
            source = read(self.sources[0])
            if source.dtype == torch_dtype(self.dtype) and source.is_contiguous():
                for piece in _checked(self.sources[0], source, self.dtype, self.shape).view(-1).split(PIECE_ELEMENTS):
                    _finite(self.sources[0], piece, self.dtype)
                return source.view(self.shape)
        weight = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        flat, filled = weight.view(-1), 0
        for piece in self.pieces(read):
            flat[filled : filled + piece.numel()] = piece
            filled += piece.numel()
        return weight


def _checked(name: str, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = dtype_name(tensor.dtype)
    if found != dtype and (found in PACKED_DTYPES or dtype in PACKED_DTYPES or not tensor.is_floating_point()):
        raise ValueError(
            f"checkpoint tensor {name!r} is {found}, but its module's format needs {dtype}: the checkpoint's "
            "quantization config and its tensors disagree"
        )
    if _without_ones(tensor.shape) != _without_ones(shape):
        raise ValueError(f"checkpoint tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor


def _finite(name: str, piece: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype not in PACKED_DTYPES and not all_finite(piece):
        raise ValueError(
            f"checkpoint tensor {name!r} holds NaN or infinity as {dtype}: copy or download the checkpoint again, or "
            "choose a dtype of a larger range"
        )
    return piece


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


@dataclass(frozen=True)
class Projection:
    """Weight of a linear operator in its format; stacked [E, out, in] for experts.

    name: module name; shape: of the dequantized weight; kind: "dense", "nvfp4" or "fp8"; activations: how the
    operator's input is quantized, or None; tensors: engine weight names, the weight first and then its scales;
    dense_dtype: dtype of a dense weight.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    activations: str | None
    tensors: tuple[str, ...]
    dense_dtype: str | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        return {"format": self.kind, "activations": self.activations}

    def values(self, graph: Graph) -> list[Value]:
        """Operator inputs in order: the weight, then its scales."""
        return [graph.value(name) for name in self.tensors]


class Parameters:
    """Weights under a name prefix. `parameters / "mixer"` is the scope of a submodule.

    formats: module name -> "dense", "nvfp4", "w4a16_nvfp4" or "fp8".
    plan: engine weight name -> recipe, filled as weights are asked for; networks of one engine share it, and asking
        again for the same weight (a tied head, the embedding of a draft head) names the same one.
    """

    def __init__(
        self, graph: Graph, formats: Callable[[str], str], plan: dict[str, WeightRecipe], prefix: str = ""
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.plan = plan
        self.prefix = prefix

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(self.graph, self.formats, self.plan, self.name(name.removesuffix(".")))

    def name(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def tensor(self, name: str, *shape: int, dtype: str | None = None) -> Value:
        """A weight in the activation dtype, or `dtype`; dimensions of size 1 may be missing or extra on disk."""
        full = self.name(name)
        return self._declare(full, WeightRecipe((full,), dtype or self.graph.activation_dtype, shape))

    def scalars(self, name: str, *shape: int) -> Value:
        """A small weight that is kept in fp32: norms, A_log, D, dt_bias, router biases."""
        return self.tensor(name, *shape, dtype=self.graph.scalar_dtype)

    def linear(self, name: str, out_features: int, in_features: int, float32: bool = False) -> Projection:
        """Weight [out_features, in_features] of module `name`; `float32` keeps a dense one in fp32 (routers)."""
        module = self.name(name)
        dtype = self.graph.scalar_dtype if float32 else self.graph.activation_dtype
        return self._projection(module, (module,), (out_features, in_features), dtype)

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> Projection:
        """Stacked weight [count, out_features, in_features] of modules `experts.N.<name>`."""
        modules = tuple(self.name(f"experts.{index}.{name}") for index in range(count))
        shape = (count, out_features, in_features)
        return self._projection(self.name(f"experts.{name}"), modules, shape, self.graph.activation_dtype)

    def _projection(self, name: str, modules: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> Projection:
        found = {self.formats(module) for module in modules}
        if len(found) > 1:
            raise ValueError(f"experts of {name!r} have different formats {sorted(found)}: they must share one")
        checkpoint_format = found.pop()
        if checkpoint_format not in OPERAND_FORMATS:
            known = ", ".join(OPERAND_FORMATS)
            raise ValueError(f"module {name!r} has format {checkpoint_format!r}; expected one of {known}")
        kind, activations = OPERAND_FORMATS[checkpoint_format]
        tensors, stacked, experts = [], len(shape) == 3, shape[:-2]
        try:
            stored = storage(shape[-2:], checkpoint_format, dtype)
        except ValueError as error:
            raise ValueError(f"module {name!r}: {error}") from None
        for suffix, (tensor_dtype, tensor_shape) in stored.items():
            sources = tuple(f"{module}.{suffix}" for module in modules)
            recipe = WeightRecipe(sources, tensor_dtype, (*experts, *tensor_shape), stacked)
            tensors.append(self._declare(f"{name}.{suffix}", recipe).name)
        return Projection(name, shape, kind, activations, tuple(tensors), dtype if kind == "dense" else None)

    def _declare(self, name: str, recipe: WeightRecipe) -> Value:
        known = self.plan.setdefault(name, recipe)
        if known != recipe:
            raise ValueError(f"weight {name!r} is asked for as {recipe.spec}, but was {known.spec} before")
        self.graph.network.weights[name] = recipe.spec
        return self.graph.value(name)
