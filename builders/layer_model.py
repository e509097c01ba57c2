"""transformers' own implementation of a model, one layer at a time, on memory-mapped weights.

A checkpoint far larger than memory can be run forward in this way: a model of a single layer takes and returns hidden
states, and its parameters are views of the checkpoint's files, which the kernel may drop and read again. Weights that
transformers keep in another form than the files (experts fused into one tensor, other dtypes) are written to a scratch
file and mapped from there, so that they take no memory of their own either.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from replayssm.builders.architecture import NEMOTRON_H, LayerConfig, MoeConfig
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import read_json
from replayssm.builders.weight_shapes import fused_experts

INSTALL = "pip install '.[quantize]' in the project's folder"
"""What provides modelopt and a transformers that it works with."""

# transformers' Mamba2 materialises a [tokens, chunk, heads, dstate] tensor; the chunk only sets its size.
_MAMBA2_CHUNK = 16


class LayerModels:
    """Models of single layers of `checkpoint`, in bf16."""

    def __init__(self, checkpoint: Checkpoint, scratch: Path) -> None:
        self.checkpoint = checkpoint
        self.scratch = scratch
        config = checkpoint.config
        raw = read_json(checkpoint.directory / "config.json")
        self._config_class, self._model_class = _transformers_classes(config.architecture)
        self._hf_config = self._config_class.from_dict(raw["text_config"] if config.multimodal else raw)
        self._hf_config._attn_implementation = "sdpa"
        self._hf_config._experts_implementation = "eager"

    def structure(self, layer: LayerConfig) -> torch.nn.Module:
        """The model of one layer without storage (on the meta device); its modules are named "layers.0...."."""
        config = copy.deepcopy(self._hf_config)
        config.layer_types = [self._hf_config.layer_types[layer.index]]
        if self.checkpoint.config.family != NEMOTRON_H:  # Nemotron's count follows from the list
            config.num_hidden_layers = 1
        with torch.device("meta"):
            model = self._model_class(config)
        for name in ("embeddings", "embed_tokens", "norm_f", "norm"):
            if hasattr(model, name):
                setattr(model, name, torch.nn.Identity())
        return model.eval()

    @contextlib.contextmanager
    def loaded(self, layer: LayerConfig) -> Iterator[torch.nn.Module]:
        """The model of one layer with its weights; call it as `model(inputs_embeds=hidden, use_cache=False)`."""
        model = self.structure(layer)
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="layer-") as folder:
            spool = _Spool(Path(folder))
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.startswith("layers.0."):
                    _assign(model, name, self._weight(layer, name, tuple(tensor.shape), spool))
            if hasattr(model, "rotary_emb"):
                model.rotary_emb = type(model.rotary_emb)(config=model.config)
            mixer = getattr(model.layers[0], "mixer", None)
            if hasattr(mixer, "time_step_limit"):
                # transformers clamps dt at the initialisation's time_step_min; the models were trained without.
                mixer.time_step_limit = (0.0, math.inf)
                mixer.chunk_size = _MAMBA2_CHUNK
            del tensor
            try:
                yield model
            finally:
                # Modules may refer to each other in circles and outlive this; their weights must not.
                for module in model.modules():
                    module._parameters.clear()
                    module._buffers.clear()
        self.checkpoint.release()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., hidden] in bf16 of token ids, the input of the first layer."""
        table = self.checkpoint.tensor(self.checkpoint.config.embedding_name)
        return torch.nn.functional.embedding(token_ids, table).bfloat16()

    def _weight(self, layer: LayerConfig, name: str, shape: tuple[int, ...], spool: _Spool) -> torch.Tensor:
        canonical = layer.prefix + name.removeprefix("layers.0.")
        fused = fused_experts(layer, self.checkpoint.config.hidden_size)
        if canonical in fused:
            return self._fused(layer, canonical, fused[canonical], spool)
        weight = self.checkpoint.tensor(canonical)
        if tuple(weight.shape) != shape:
            raise ValueError(f"transformers expects {canonical!r} as {list(shape)}, config.json says otherwise")
        # Nemotron's router computes in fp32 from whatever it is stored in.
        if weight.dtype == torch.bfloat16 or canonical.startswith(f"{layer.prefix}mixer.gate."):
            return weight
        mapped = spool.empty(shape)
        return mapped.copy_(weight)

    def _fused(self, layer: LayerConfig, name: str, layout: Any, spool: _Spool) -> torch.Tensor:
        shape, parts = layout
        assert isinstance(layer.feed_forward, MoeConfig)
        prefix = name.rsplit(".", 1)[0]
        mapped = spool.empty(shape)
        for expert in range(layer.feed_forward.num_experts):
            for projection, (start, stop) in parts.items():
                mapped[expert, start:stop] = self.checkpoint.tensor(f"{prefix}.{expert}.{projection}.weight")
        return mapped


class _Spool:
    """bf16 tensors in files of one folder, mapped shared: their pages can be written back and dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.count += 1
        path = str(self.folder / str(self.count))
        return torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.bfloat16).view(shape)


def _assign(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, leaf = name.rsplit(".", 1)
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def _transformers_classes(architecture: str) -> tuple[type, type]:
    try:
        import transformers
    except ImportError:
        raise ValueError(f"transformers is not installed; {INSTALL}") from None
    if architecture == "NemotronHForCausalLM":
        names = ("NemotronHConfig", "NemotronHModel")
    else:
        stem = "Qwen3_5Moe" if architecture.startswith("Qwen3_5Moe") else "Qwen3_5"
        names = (f"{stem}TextConfig", f"{stem}TextModel")
    if not all(hasattr(transformers, name) for name in names):
        raise ValueError(
            f"transformers {transformers.__version__} does not know {names[1]}; {INSTALL} brings a version that does"
        )
    return getattr(transformers, names[0]), getattr(transformers, names[1])
