"""Checkpoints with random weights, for tests and for trying the tools without a download.

They are ordinary Hugging Face directories: transformers loads them (all but the draft head, which it ignores).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from replayssm.builders.architecture import NEMOTRON_H, ModelConfig
from replayssm.builders.checkpoint import INDEX_NAME
from replayssm.builders.config import read_config
from replayssm.builders.safetensors_file import SafetensorsWriter, plan_shards
from replayssm.builders.weight_shapes import Shape, dense_dtype, weight_shapes
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.state import torch_dtype

_NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_nextn_predict_layers": 1,
}
_QWEN = {
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mtp_num_hidden_layers": 1,
}
_QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "nano": {
        **_NEMOTRON,
        # The inner width (8 * 16) equals neither 2 * hidden_size nor the attention width, as in Nano-4B.
        "hybrid_override_pattern": "M-M*-M",
        "mamba_head_dim": 16,
        "mtp_hybrid_override_pattern": "*-",
    },
    "super": {
        **_NEMOTRON,
        "hybrid_override_pattern": "MEM*EM",
        "mamba_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 96,
        "n_shared_experts": 1,
        "routed_scaling_factor": 5.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "qwen": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_QWEN,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
    },
    "qwen_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **_QWEN,
        **_QWEN_MOE,
        "shared_expert_intermediate_size": 64,
    },
    "qwen_vl": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "image_token_id": 500,
        "video_token_id": 501,
        "vision_start_token_id": 498,
        "vision_end_token_id": 499,
        "text_config": {"model_type": "qwen3_5_text", **_QWEN, "intermediate_size": 256},
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
        },
    },
}
"""Configs of tiny models, one for each layout of the published ones, all with a draft head."""


def disk_name(config: ModelConfig, name: str) -> str:
    """On-disk name of a canonical weight name, with the prefix that the model's family uses."""
    if name.startswith(("lm_head.", "mtp.")):
        return name
    if config.family == NEMOTRON_H:
        return f"backbone.{name}"
    return f"model.language_model.{name}" if config.multimodal else f"model.{name}"


def random_weight(config: ModelConfig, name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """A weight (fp32) with which activations stay near 1 and no term of the recurrences is trivial."""
    leaf = name.rsplit(".", 1)[-1]
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    if leaf == "A_log":
        return torch.log(1 + 15 * uniform)
    if leaf == "dt_bias":
        # softplus^-1 of step sizes between 0.001 and 0.1, evenly in the logarithm
        steps = torch.exp(uniform * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        return steps + torch.log(-torch.expm1(-steps))
    if leaf == "D":
        return 1 + 0.1 * normal
    if ".conv1d." in name:
        return 0.5 * normal
    if len(shape) == 1:
        is_norm = leaf == "weight" and not (config.zero_centered_norms and "linear_attn.norm" not in name)
        return 0.1 * normal + (1.0 if is_norm else 0.0)
    # Small logits keep absolute comparisons meaningful; the norm before every projection undoes it elsewhere.
    scale = 0.3 if name in (config.embedding_name, "lm_head.weight") else 1.0
    return scale * normal / math.sqrt(shape[-1])


def write_random_checkpoint(
    hf_config: Mapping[str, Any],
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 2**31,
) -> Path:
    """Write `config.json` and random weights to `directory` (created if missing) and return it.

    The same config, seed and dtype give the same bytes. One weight is in memory at a time. As in published checkpoints,
    a few weights are fp32 whatever `dtype` says.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = read_config(hf_config)
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    shapes = weight_shapes(config)
    sizes = [
        (name, math.prod(shape) * ELEMENT_BITS[dense_dtype(config, name, dtype)] // 8) for name, shape in shapes.items()
    ]
    generator = torch.Generator().manual_seed(seed)
    plan = plan_shards(sizes, max_shard_bytes)
    for file_name, names in plan.items():
        stored = {disk_name(config, name): (dense_dtype(config, name, dtype), shapes[name]) for name in names}
        (directory / file_name).unlink(missing_ok=True)
        with SafetensorsWriter(directory / file_name, stored) as writer:
            for name in names:
                weight = random_weight(config, name, shapes[name], generator)
                writer.write(disk_name(config, name), weight.to(torch_dtype(dense_dtype(config, name, dtype))))
    if len(plan) > 1:
        weight_map = {disk_name(config, name): file_name for file_name, names in plan.items() for name in names}
        index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return directory


def write_byte_tokenizer(directory: str | Path, text: str, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on `text` and write `tokenizer.json`. Ids 0, 1, 2 are pad, bos and eos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
