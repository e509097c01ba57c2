"""Hugging Face checkpoint directories, read lazily.

`Checkpoint.open` reads headers only and checks every tensor that the model needs: name, shape, dtype, format. Data is
read through memory maps when a tensor is asked for, and pages already read are given back, so that the memory a
checkpoint takes does not grow with what has been read of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from replayssm.builders import nvfp4
from replayssm.builders.architecture import ModelConfig
from replayssm.builders.config import read_config, read_json
from replayssm.builders.elements import PIECE_ELEMENTS, all_finite
from replayssm.builders.formats import DENSE, FP8, NVFP4, W4A16_NVFP4, canonical_name
from replayssm.builders.safetensors_file import Entry, SafetensorsFile
from replayssm.builders.weight_shapes import fused_experts, mtp_shapes, quantizable_modules, storage, weight_shapes
from replayssm.plugins.state import torch_dtype

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DENSE_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
_KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")

# Pages of a shard stay in this process until so many bytes have been handed out; giving them back costs a page fault
# each when they are read again, so it is not done for every small tensor.
_RELEASE_AFTER_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Location:
    file: SafetensorsFile
    disk_name: str
    entry: Entry


class Checkpoint:
    """A checked checkpoint. Names are canonical (`formats.canonical_name`), experts one by one.

    config: the model; its `mtp` is None where the files hold no draft head, whatever config.json says.
    names: every tensor of the language model, scales included.
    shards: the safetensors files. extra_names: on-disk names of tensors outside the language model (vision tower).
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        files: list[SafetensorsFile],
        locations: dict[str, _Location],
        formats: dict[str, str],
        extra: dict[str, _Location],
    ) -> None:
        self.directory = directory
        self.config = config
        self.shards = tuple(files)
        self.names = tuple(locations)
        self.extra_names = tuple(extra)
        self.formats: Mapping[str, str] = formats
        self._locations = locations
        self._extra = extra
        self._unreleased = 0

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read and check the headers of a checkpoint directory.

        Raises ValueError with one message that names the file, the tensor and what was expected.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
        if not (directory / "config.json").is_file():
            raise ValueError(f"{directory / 'config.json'}: no such file; expected a Hugging Face checkpoint")
        config = read_config(directory)
        files, assigned = _open_files(directory)
        found = _canonical(files, assigned, config)
        if config.mtp is not None and not any(name.startswith("mtp.") for name in found):
            # transformers and modelopt drop the draft head's weights but keep the key that describes it.
            config = dataclasses.replace(config, mtp=None)
        return cls(directory, config, files, *_Matcher(config, directory, found).match())

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def dtype(self, name: str) -> str:
        """torch's name of the stored dtype."""
        return self._locations[name].entry.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._locations[name].entry.shape

    def nbytes(self, name: str) -> int:
        return self._locations[name].entry.nbytes

    def disk_name(self, name: str) -> str:
        """Name in the file; the fused tensor's for an expert of one."""
        return self._locations[name].disk_name

    @property
    def prefix(self) -> str:
        """What the files put before the names of embeddings, layers and final norm, such as "backbone."."""
        return self.disk_name(self.config.final_norm_name).removesuffix(self.config.final_norm_name)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored: a view of the memory-mapped file. Do not write to it."""
        if name not in self._locations:
            raise KeyError(f"{self.directory}: the checkpoint has no tensor {name!r}")
        return self._view(self._locations[name])

    def extra_tensor(self, disk_name: str) -> torch.Tensor:
        """A tensor of `extra_names`, as `tensor` gives it."""
        return self._view(self._extra[disk_name])

    def _view(self, location: _Location) -> torch.Tensor:
        self._unreleased += location.entry.nbytes
        if self._unreleased > _RELEASE_AFTER_BYTES:
            self.release()
            self._unreleased = location.entry.nbytes
        return location.file.view(location.entry)

    def require_finite(self, name: str, dtype: str) -> None:
        """ValueError naming file and tensor where a tensor, or one of `extra_names`, is not finite as `dtype`."""
        location = self._locations.get(name) or self._extra[name]
        for piece in self._view(location).reshape(-1).split(PIECE_ELEMENTS):
            if piece.is_floating_point() and not all_finite(piece.to(torch_dtype(dtype))):
                raise ValueError(
                    f"{location.file.path}: tensor {location.disk_name!r} holds NaN or infinity as {dtype}; "
                    "copy or download the checkpoint again"
                )

    def release(self) -> None:
        """Give back the memory of everything read so far. Tensors handed out stay valid."""
        for file in self.shards:
            file.release()
        self._unreleased = 0

    def module_format(self, module: str) -> str:
        """Format in which a linear module is stored: "dense", "nvfp4", "w4a16_nvfp4" or "fp8"."""
        return self.formats.get(module, DENSE)

    def dequantized(self, module: str) -> torch.Tensor:
        """fp32 weight of a linear module in any format. A dense one is converted."""
        weight, module_format = self.tensor(f"{module}.weight"), self.module_format(module)
        if module_format == DENSE:
            return weight.float()
        scale = self.tensor(f"{module}.weight_scale")
        if module_format == FP8:
            return nvfp4.dequantize_fp8(weight, scale)
        return nvfp4.dequantize(weight, scale, self.tensor(f"{module}.weight_scale_2"))

    @cached_property
    def identity(self) -> str:
        """SHA-256 over config files and shard headers (names, shapes, dtypes, sizes), not over the weights' data."""
        digest = hashlib.sha256()
        for name in ("config.json", "hf_quant_config.json"):
            path = self.directory / name
            digest.update(path.read_bytes() if path.is_file() else b"")
            digest.update(b"\0")
        for file in sorted(self.shards, key=lambda item: item.path.name):
            digest.update(f"{file.path.name}\0{file.size}\0".encode())
            digest.update(file.header)
        return digest.hexdigest()


def _open_files(directory: Path) -> tuple[list[SafetensorsFile], dict[str, str] | None]:
    """All safetensors files, and the index's tensor -> file name map where there is an index."""
    index_path, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if not index_path.is_file():
        if single.is_file():
            return [SafetensorsFile(single)], None
        raise _no_weights(directory)
    index = read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map is missing or empty, expected tensor names and file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{index_path}: weight_map places {tensor!r} in {name!r}, expected the name of a file of this directory"
            )
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        if not (directory / name).is_file():
            tensor = next(key for key, value in weight_map.items() if value == name)
            raise ValueError(
                f"{directory / name}: no such file, but {INDEX_NAME} says it holds {tensor!r}; "
                "copy or download the missing shard"
            )
    if single.is_file() and SINGLE_NAME not in names:
        raise ValueError(
            f"{single} lies beside {INDEX_NAME}, which does not name it; delete whichever of the two is stale"
        )
    return [SafetensorsFile(directory / name) for name in names], weight_map


def _no_weights(directory: Path) -> ValueError:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return ValueError(
            f"{directory / pickles[0]}: pickled weights are refused, because loading them runs code; if you trust "
            "them, convert them: load the model with transformers and call model.save_pretrained(directory), which "
            f"writes {SINGLE_NAME}"
        )
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if shards:
        return ValueError(f"{directory / INDEX_NAME}: no such file, but {shards[0]} is there; copy the index too")
    return ValueError(f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME}; expected a Hugging Face checkpoint")


def _canonical(
    files: list[SafetensorsFile], assigned: dict[str, str] | None, config: ModelConfig
) -> dict[str, _Location]:
    """Every tensor by canonical name, once the index and the files agree on where each is."""
    found: dict[str, _Location] = {}
    for file in files:
        for name, entry in file.entries.items():
            if assigned is not None and assigned.get(name) != file.path.name:
                place = f"in {assigned[name]}" if name in assigned else "nowhere"
                raise ValueError(f"{file.path}: holds tensor {name!r}, which {INDEX_NAME} places {place}")
            canonical = canonical_name(name)
            if canonical == "embedding.weight":  # transformers up to 5.14 saved Nemotron's embeddings so
                canonical = config.embedding_name
            if canonical in found:
                raise ValueError(
                    f"{file.path}: tensor {name!r} is the same weight as {found[canonical].disk_name!r} in "
                    f"{found[canonical].file.path.name}; expected it once"
                )
            found[canonical] = _Location(file, name, entry)
    if assigned is not None:
        held = {name for file in files for name in file.entries}
        for name, file_name in assigned.items():
            if name not in held:
                raise ValueError(
                    f"{files[0].path.parent / file_name}: tensor {name!r} is missing, but {INDEX_NAME} says it is there"
                )
    return found


class _Matcher:
    """Compares what was found with what the model needs."""

    def __init__(self, config: ModelConfig, directory: Path, found: dict[str, _Location]) -> None:
        self.config = config
        self.directory = directory
        self.found = dict(found)
        self.quantizable = set(quantizable_modules(config))

    def match(self) -> tuple[dict[str, _Location], dict[str, str], dict[str, _Location]]:
        """Locations of all needed tensors, formats of quantized modules, and the rest by on-disk name."""
        self._split_fused_experts()
        locations: dict[str, _Location] = {}
        formats: dict[str, str] = {}
        for name, shape in weight_shapes(self.config).items():
            module = name.removesuffix(".weight")
            module_format = DENSE
            if name.endswith(".weight") and len(shape) == 2:
                module_format = self._stored_format(module, name)
                self._check_declared(module, module_format)
            if module_format != DENSE:
                formats[module] = module_format
                for suffix, (dtype, part_shape) in storage(shape, module_format).items():
                    locations[f"{module}.{suffix}"] = self._take(f"{module}.{suffix}", part_shape, (dtype,))
            else:
                locations[name] = self._take(name, shape, _DENSE_DTYPES)
        for layer in self.config.attention_layers:
            for suffix in _KV_SCALES:
                name = layer.mixer_prefix + suffix
                if name in self.found:
                    locations[name] = self._take(name, (), ("float32",))
        return locations, formats, self._rest()

    def _split_fused_experts(self) -> None:
        layers = (*self.config.layers, *(self.config.mtp.layers if self.config.mtp else ()))
        for layer in layers:
            for fused, (shape, parts) in fused_experts(layer, self.config.hidden_size).items():
                if fused in self.found:
                    location = self._take(fused, shape, _DENSE_DTYPES)
                    self.found.update(_expert_slices(location, fused, parts))

    def _take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> _Location:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        location = self.found.pop(name, None)
        if location is None:
            raise ValueError(f"{self.directory}: tensor {name!r} is missing, expected {wanted}{self._hint(name)}")
        entry = location.entry
        # A scalar scale may be stored as a vector of one.
        if entry.shape != shape and not (shape == () and entry.shape == (1,)):
            raise ValueError(
                f"{location.file.path}: tensor {location.disk_name!r} has shape {list(entry.shape)}, expected "
                f"{list(shape)} from config.json"
            )
        if entry.dtype not in dtypes:
            raise ValueError(
                f"{location.file.path}: tensor {location.disk_name!r} is {entry.dtype}, expected {' or '.join(dtypes)}"
            )
        return dataclasses.replace(location, entry=dataclasses.replace(entry, shape=shape))

    def _hint(self, name: str) -> str:
        if name == "lm_head.weight":
            return "; if it shares the embedding's weight, config.json must say tie_word_embeddings: true"
        if name.endswith(".input_scale"):
            return "; formats that quantize activations need it (weight-only FP8 is not supported)"
        if name.startswith("mtp."):
            return "; the draft head is incomplete: complete it, or remove all mtp.* tensors and its key in config.json"
        return ""

    def _stored_format(self, module: str, name: str) -> str:
        """Format that the tensors themselves show."""
        location = self.found.get(name)
        dtype = location.entry.dtype if location else "bfloat16"
        if dtype == "float8_e4m3fn":
            return FP8
        if dtype != "uint8":
            return DENSE
        if name == self.config.embedding_name:
            raise ValueError(f"{location.file.path}: {location.disk_name!r} is quantized; only dense is supported")
        declared = self.config.formats.module_format(module)
        has_input_scale = f"{module}.input_scale" in self.found
        return NVFP4 if has_input_scale or declared == NVFP4 else W4A16_NVFP4

    def _check_declared(self, module: str, stored: str) -> None:
        declared = self.config.formats.module_format(module)
        if declared == stored or (stored == DENSE and module not in self.quantizable):
            return
        raise ValueError(
            f"{self.directory}: module {module!r} is stored as {stored}, but the quantization config declares "
            f"{declared}; hf_quant_config.json or quantization_config of config.json belongs to other weights"
        )

    def _rest(self) -> dict[str, _Location]:
        """Tensors that are not the language model's. Anything unexpected would be dropped silently: refuse it."""
        rest = {}
        for name, location in self.found.items():
            vision = self.config.multimodal and name.startswith("visual.")
            head = self.config.tie_word_embeddings and name == "lm_head.weight"
            undescribed = name.startswith("mtp.") and not mtp_shapes(self.config)
            if not (vision or head or undescribed):
                raise ValueError(
                    f"{location.file.path}: unexpected tensor {location.disk_name!r}, which the model of config.json "
                    "does not have"
                )
            if not head:
                rest[location.disk_name] = location
        return rest


def _expert_slices(
    location: _Location, fused: str, parts: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, _Location]]:
    """Canonical per-expert weights inside a fused tensor [E, rows, columns]; each is contiguous."""
    entry = location.entry
    experts, rows, columns = entry.shape
    row_bytes = entry.nbytes // (experts * rows)
    prefix = fused.rsplit(".", 1)[0]
    for expert in range(experts):
        for projection, (start, stop) in parts.items():
            offset = entry.start + (expert * rows + start) * row_bytes
            part = Entry(entry.dtype, (stop - start, columns), offset, (stop - start) * row_bytes)
            yield f"{prefix}.{expert}.{projection}.weight", dataclasses.replace(location, entry=part)
