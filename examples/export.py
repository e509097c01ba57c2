"""Write a trained network as an ordinary Hugging Face checkpoint (bf16 safetensors), and read it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples import networks
from examples.model import NemotronConfig, QwenConfig
from examples.networks import HybridLM
from examples.tokenizer import BEGIN, END, PAD

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_POSITIONS = 4096
# The recurrence reads these in fp32; they are stored, and evaluated, rounded to bf16 like the rest.
WIDE_PARAMETERS = ("A_log", "dt_bias", ".D")


def nemotron_config(c: NemotronConfig) -> dict:
    """config.json of NemotronHForCausalLM."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": c.pattern,
        "num_hidden_layers": len(c.pattern),
        "mamba_num_heads": c.mamba_num_heads,
        "mamba_head_dim": c.mamba_head_dim,
        "ssm_state_size": c.ssm_state_size,
        "n_groups": c.n_groups,
        "conv_kernel": c.conv_kernel,
        "expand": c.mamba_num_heads * c.mamba_head_dim // c.hidden_size,
        "chunk_size": 128,
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "mamba_proj_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "attention_bias": False,
        "layer_norm_epsilon": c.eps,
        "residual_in_fp32": False,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 0.0001,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*-",
    }


def qwen_config(c: QwenConfig) -> dict:
    """config.json of Qwen3_5ForCausalLM."""
    kinds = ["linear_attention"] * (c.full_attention_interval - 1) + ["full_attention"]
    half = c.rotary_dim // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": c.num_hidden_layers,
        "full_attention_interval": c.full_attention_interval,
        "layer_types": [kinds[i % len(kinds)] for i in range(c.num_hidden_layers)],
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_conv_kernel_dim": c.conv_kernel,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_bias": False,
        "attn_output_gate": True,
        "partial_rotary_factor": c.rotary_dim / c.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dim / c.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }


def config_dict(c: NemotronConfig | QwenConfig) -> dict:
    own = qwen_config(c) if isinstance(c, QwenConfig) else nemotron_config(c)
    return own | {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }


def export(
    model: HybridLM,
    tokenizer: Path | None,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Weights, configs and, if `tokenizer` is a folder, its files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to("cpu", dtype).contiguous() for n, p in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_dict(model.c), indent=2) + "\n")
    generation = {
        "bos_token_id": BEGIN,
        "eos_token_id": [END],
        "pad_token_id": PAD,
        "do_sample": False,
        "max_new_tokens": 768,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer / name, folder / name)


def load(folder: Path, layout: str, dtype: torch.dtype = torch.float32) -> HybridLM:
    """A shipped checkpoint as the training network; decay parameters stay in at least fp32."""
    model = networks.LAYOUTS[layout]()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.to(dtype)
    for name, p in model.named_parameters():
        if name.endswith(WIDE_PARAMETERS):
            p.data = p.data.to(torch.promote_types(dtype, torch.float32))
    return model.requires_grad_(False).eval()
