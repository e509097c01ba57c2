"""Network definitions by model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from replayssm.builders.architecture import NEMOTRON_H, QWEN3_5, ModelConfig
from replayssm.builders.formats import DENSE
from replayssm.builders.functional import Graph
from replayssm.builders.models import nemotron_h, qwen3_5
from replayssm.builders.parameters import Parameters, WeightRecipe
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ACTIVATION_DTYPES

FAMILIES = {NEMOTRON_H: nemotron_h, QWEN3_5: qwen3_5}

Formats = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True)
class Networks:
    """Networks of one engine and the recipe of every weight that they name.

    mtp: the draft head, or None. It shares the embedding and the output head with `main` by name.
    """

    main: Network
    mtp: Network | None
    weight_plan: dict[str, WeightRecipe]


def build_networks(
    config: ModelConfig, formats: Formats | None = None, activation_dtype: str = "bfloat16", *, mtp: bool = True
) -> Networks:
    """Trace the networks of a model.

    formats: format of a module by canonical name, as a function (`Checkpoint.module_format`) or a mapping (modules not
        in it are dense); None takes what the config declares.
    mtp: also trace the draft head, where the model has one.
    """
    if activation_dtype not in ACTIVATION_DTYPES:
        known = ", ".join(ACTIVATION_DTYPES)
        raise ValueError(f"activation_dtype must be one of {known}, got {activation_dtype!r}")
    family, format_of, plan = FAMILIES[config.family], _format_function(config, formats), {}

    def parameters(name: str) -> Parameters:
        return Parameters(Graph(name, activation_dtype), format_of, plan)

    main = family.build_main(config, parameters("main"))
    draft = family.build_mtp(config, parameters("mtp")) if mtp and config.mtp is not None else None
    return Networks(main, draft, plan)


def _format_function(config: ModelConfig, formats: Formats | None) -> Callable[[str], str]:
    if formats is None:
        declared, quantizable = config.formats, set(quantizable_modules(config))
        return lambda module: declared.module_format(module) if module in quantizable else DENSE
    if isinstance(formats, Mapping):
        return lambda module: formats.get(module, DENSE)
    return formats
