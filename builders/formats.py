"""Which modules of a checkpoint are quantized, and how.

The two places that say so are `hf_quant_config.json` and the `quantization_config` of `config.json`, both in the form
that modelopt writes. Names in them carry the family's prefix and may be patterns; here everything is canonical.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from replayssm.builders.fields import is_name

DENSE = "dense"
NVFP4 = "nvfp4"
W4A16_NVFP4 = "w4a16_nvfp4"
FP8 = "fp8"
MODULE_FORMATS = (DENSE, NVFP4, W4A16_NVFP4, FP8)

MIXED_PRECISION = "MIXED_PRECISION"
FORMAT_OF_ALGO = {"NVFP4": NVFP4, "W4A16_NVFP4": W4A16_NVFP4, "FP8": FP8, None: DENSE}
ALGO_OF_FORMAT = {value: key for key, value in FORMAT_OF_ALGO.items()}
GROUP_SIZE = 16
"""Elements that share one NVFP4 block scale."""

# Longest first: "model.language_model.layers" must not stop at "model.".
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.backbone.",
    "language_model.",
    "backbone.",
    "model.",
)


def canonical_name(name: str) -> str:
    """`name` of a tensor or module without the prefix that families and wrappers put before it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _ancestors(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


@dataclass(frozen=True)
class QuantizationFormats:
    """Declared formats of linear modules, by canonical module name ("layers.0.mixer.in_proj").

    default: format of every linear module that neither `modules` nor `exclude` names.
    modules: explicit formats; an entry that ends in "experts" stands for all experts below it.
    exclude: fnmatch patterns of dense modules; a pattern that matches a parent covers its children.
    kv_cache: None or "fp8" (noted only: scales of k and v are read, the cache format is the engine's choice).
    """

    default: str = DENSE
    modules: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    kv_cache: str | None = None

    @property
    def is_quantized(self) -> bool:
        return self.default != DENSE or any(value != DENSE for value in self.modules.values())

    def module_format(self, module: str) -> str:
        """Declared format of a linear module."""
        names = _ancestors(canonical_name(module))
        if names[0] in self.modules:
            return self.modules[names[0]]
        for name in names[1:]:
            if name.endswith("experts") and name in self.modules:
                return self.modules[name]
        if self.default == DENSE or any(fnmatchcase(name, pattern) for pattern in self.exclude for name in names):
            return DENSE
        return self.default


def _format_of(algo: Any, where: str, key: str) -> str:
    if isinstance(algo, str) and algo.upper() in ("NONE", "BF16", "W16A16"):
        algo = None
    if not (algo is None or is_name(algo, FORMAT_OF_ALGO)):
        known = ", ".join(name for name in FORMAT_OF_ALGO if name)
        raise ValueError(
            f"{where}: {key} is {algo!r}, expected one of {known}, {MIXED_PRECISION}; "
            "quantize the original checkpoint with `replayssm quantize` instead"
        )
    return FORMAT_OF_ALGO[algo]


def _check_group_size(value: Any, where: str, key: str) -> None:
    if value not in (None, GROUP_SIZE):
        raise ValueError(f"{where}: {key} is {value!r}, expected {GROUP_SIZE} (the block of NVFP4)")


def _kv_cache_format(value: Any, where: str, key: str) -> str | None:
    """fp8 from "FP8" (hf_quant_config.json) or {"type": "float", "num_bits": 8} (config.json)."""
    if value is None:
        return None
    if isinstance(value, str) and value.upper() == "FP8":
        return FP8
    if isinstance(value, Mapping) and value.get("num_bits") == 8 and value.get("type") == "float":
        return FP8
    raise ValueError(f"{where}: {key} is {value!r}, expected FP8 or nothing")


def _parse(section: Mapping[str, Any], where: str, exclude_key: str, kv_key: str) -> QuantizationFormats:
    if "quant_algo" not in section:
        raise ValueError(f"{where}: quant_algo is missing, expected the name of a modelopt algorithm")
    algo = section["quant_algo"]
    kv_cache = _kv_cache_format(section.get(kv_key), where, kv_key)
    patterns, listed = section.get(exclude_key), section.get("quantized_layers")
    patterns, listed = [] if patterns is None else patterns, {} if listed is None else listed
    if not isinstance(patterns, list | tuple) or not all(map(is_name, patterns)):
        raise ValueError(f"{where}: {exclude_key} is {patterns!r}, expected a list of module names or patterns")
    if not isinstance(listed, Mapping):
        raise ValueError(f"{where}: quantized_layers is {listed!r}, expected an object of modules")
    exclude = tuple(map(canonical_name, patterns))
    if algo == MIXED_PRECISION and not listed:
        raise ValueError(f"{where}: quant_algo is {MIXED_PRECISION} but quantized_layers is missing or empty")
    modules = {}
    for name, entry in listed.items():
        key = f"quantized_layers[{name!r}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: {key} is {entry!r}, expected an object with quant_algo")
        modules[canonical_name(name)] = _format_of(entry.get("quant_algo"), where, f"{key}.quant_algo")
        _check_group_size(entry.get("group_size") if entry.get("quant_algo") != "FP8" else None, where, key)
    default = DENSE if algo == MIXED_PRECISION else _format_of(algo, where, "quant_algo")
    if default in (NVFP4, W4A16_NVFP4):
        _check_group_size(section.get("group_size"), where, "group_size")
    return QuantizationFormats(default, modules, exclude, kv_cache)


def read_formats(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, config_name: str, hf_quant_name: str
) -> QuantizationFormats:
    """Formats declared by the two files' parsed content; both must agree where both are present.

    `hf_quant_config.json` wins for what only it says. Raises ValueError naming file, key and value.
    """
    found = []
    section = config.get("quantization_config")
    if section is not None:
        if not isinstance(section, Mapping):
            raise ValueError(f"{config_name}: quantization_config is {section!r}, expected an object")
        method = section.get("quant_method")
        if method != "modelopt":
            raise ValueError(
                f"{config_name}: quantization_config.quant_method is {method!r}, expected 'modelopt'; "
                "quantize the original checkpoint with `replayssm quantize` instead"
            )
        found.append(_parse(section, f"{config_name}: quantization_config", "ignore", "kv_cache_scheme"))
    if hf_quant_config is not None:
        inner = hf_quant_config.get("quantization")
        if not isinstance(inner, Mapping):
            raise ValueError(f"{hf_quant_name}: quantization is {inner!r}, expected an object")
        found.append(_parse(inner, hf_quant_name, "exclude_modules", "kv_cache_quant_algo"))
    if not found:
        return QuantizationFormats()
    if len(found) == 2 and (found[0].default != found[1].default or dict(found[0].modules) != dict(found[1].modules)):
        raise ValueError(
            f"{hf_quant_name} and the quantization_config of {config_name} contradict each other "
            f"({found[1].default} and {found[0].default} by default, {len(found[1].modules)} and "
            f"{len(found[0].modules)} modules listed); delete the wrong one"
        )
    return found[-1]
