"""Names and shapes of every weight a model has on disk, and their bytes in each quantized format.

Names are canonical (see `formats.canonical_name`). Experts are listed one by one, as modelopt and the published
checkpoints store them; `fused_experts` names the fused tensors that transformers and Qwen's checkpoints may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from replayssm.builders.architecture import (
    NEMOTRON_H,
    QWEN3_5,
    AttentionConfig,
    GdnConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from replayssm.builders.formats import DENSE, FP8, GROUP_SIZE, MODULE_FORMATS, NVFP4, W4A16_NVFP4
from replayssm.plugins.contract import ELEMENT_BITS

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def weight_shapes(config: ModelConfig, *, mtp: bool = True) -> Shapes:
    """Shape of every unquantized weight by canonical name, in execution order; the draft head's last.

    The vision tower of a multimodal checkpoint is not part of it.
    """
    shapes: Shapes = {config.embedding_name: (config.vocab_size, config.hidden_size)}
    for layer in config.layers:
        shapes.update(layer_shapes(config, layer))
    shapes[config.final_norm_name] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if mtp and config.mtp is not None:
        shapes.update(mtp_shapes(config))
    return shapes


def layer_shapes(config: ModelConfig, layer: LayerConfig) -> Shapes:
    """Weights of one layer, norms included."""
    hidden = (config.hidden_size,)
    nemotron = config.family == NEMOTRON_H
    shapes: Shapes = {f"{layer.prefix}{'norm' if nemotron else 'input_layernorm'}.weight": hidden}
    if layer.mixer is not None:
        shapes.update(_prefixed(layer.mixer_prefix, _PART_SHAPES[layer.mixer.kind](layer.mixer, config.hidden_size)))
    if not nemotron:
        shapes[f"{layer.prefix}post_attention_layernorm.weight"] = hidden
    if layer.feed_forward is not None:
        part = layer.feed_forward
        shapes.update(_prefixed(layer.feed_forward_prefix, _PART_SHAPES[part.kind](part, config.hidden_size)))
    return shapes


def mtp_shapes(config: ModelConfig) -> Shapes:
    """Weights of the draft head."""
    if config.mtp is None:
        return {}
    hidden, joined = (config.hidden_size,), (config.hidden_size, 2 * config.hidden_size)
    layers = config.mtp.layers
    if config.family == NEMOTRON_H:
        first, last = layers[0].prefix, layers[-1].prefix
        shapes = {f"{first}eh_proj.weight": joined, f"{first}enorm.weight": hidden, f"{first}hnorm.weight": hidden}
        final = f"{last}final_layernorm.weight"
    else:
        shapes = {
            "mtp.fc.weight": joined,
            "mtp.pre_fc_norm_embedding.weight": hidden,
            "mtp.pre_fc_norm_hidden.weight": hidden,
        }
        final = "mtp.norm.weight"
    for layer in layers:
        shapes.update(layer_shapes(config, layer))
    shapes[final] = hidden
    return shapes


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _mamba2_shapes(mixer: Mamba2Config, hidden: int) -> Shapes:
    heads, inner, channels = mixer.geometry.nheads, mixer.inner_size, mixer.conv.conv_dim
    shapes = {
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "conv1d.weight": (channels, 1, mixer.conv.conv_kernel),
        "conv1d.bias": (channels,),
        "in_proj.weight": (inner + channels + heads, hidden),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }
    if not mixer.conv_bias:
        del shapes["conv1d.bias"]
    return shapes


def _gdn_shapes(mixer: GdnConfig, hidden: int) -> Shapes:
    heads = mixer.geometry.num_v_heads
    return {
        "A_log": (heads,),
        "dt_bias": (heads,),
        "conv1d.weight": (mixer.conv.conv_dim, 1, mixer.conv.conv_kernel),
        "in_proj_qkv.weight": (mixer.conv.conv_dim, hidden),
        "in_proj_z.weight": (mixer.value_size, hidden),
        "in_proj_a.weight": (heads, hidden),
        "in_proj_b.weight": (heads, hidden),
        "norm.weight": (mixer.geometry.head_v_dim,),
        "out_proj.weight": (hidden, mixer.value_size),
    }


def _attention_shapes(mixer: AttentionConfig, hidden: int) -> Shapes:
    q_size, kv_size = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    shapes = {
        "q_proj.weight": (q_size * (2 if mixer.output_gate else 1), hidden),
        "k_proj.weight": (kv_size, hidden),
        "v_proj.weight": (kv_size, hidden),
        "o_proj.weight": (hidden, q_size),
    }
    if mixer.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (mixer.head_dim,)
    return shapes


def _mlp_matrices(activation: str, intermediate: int, width: int) -> Shapes:
    shapes = {"up_proj.weight": (intermediate, width), "down_proj.weight": (width, intermediate)}
    return {"gate_proj.weight": (intermediate, width), **shapes} if activation == "swiglu" else shapes


def _mlp_shapes(mlp: MlpConfig, hidden: int) -> Shapes:
    return _mlp_matrices(mlp.activation, mlp.intermediate_size, hidden)


def _moe_shapes(moe: MoeConfig, hidden: int) -> Shapes:
    width = moe.latent_size or hidden
    shapes: Shapes = {"gate.weight": (moe.num_experts, hidden)}
    if moe.router == "sigmoid":
        shapes["gate.e_score_correction_bias"] = (moe.num_experts,)
    if moe.latent_size:
        shapes["fc1_latent_proj.weight"] = (width, hidden)
        shapes["fc2_latent_proj.weight"] = (hidden, width)
    for expert in range(moe.num_experts):
        matrices = _mlp_matrices(moe.activation, moe.intermediate_size, width)
        shapes.update(_prefixed(f"experts.{expert}.", matrices))
    shared = "shared_expert." if moe.shared_gate else "shared_experts."
    shapes.update(_prefixed(shared, _mlp_matrices(moe.activation, moe.shared_intermediate_size, hidden)))
    if moe.shared_gate:
        shapes["shared_expert_gate.weight"] = (1, hidden)
    return shapes


_PART_SHAPES: dict[str, Callable[..., Shapes]] = {
    "mamba2": _mamba2_shapes,
    "gdn": _gdn_shapes,
    "attention": _attention_shapes,
    "mlp": _mlp_shapes,
    "moe": _moe_shapes,
}


def fused_experts(layer: LayerConfig, hidden: int) -> dict[str, tuple[Shape, dict[str, tuple[int, int]]]]:
    """Fused expert tensors of a MoE layer: name -> (shape, {projection: its rows (start, stop) of axis 1}).

    Expert e's `projection` is `fused[e, start:stop]`. Empty for other layers.
    """
    moe = layer.feed_forward
    if not isinstance(moe, MoeConfig):
        return {}
    prefix, width, rows = f"{layer.feed_forward_prefix}experts.", moe.latent_size or hidden, moe.intermediate_size
    fused = {f"{prefix}down_proj": ((moe.num_experts, width, rows), {"down_proj": (0, width)})}
    if moe.activation == "swiglu":
        parts = {"gate_proj": (0, rows), "up_proj": (rows, 2 * rows)}
        fused[f"{prefix}gate_up_proj"] = ((moe.num_experts, 2 * rows, width), parts)
    else:
        fused[f"{prefix}up_proj"] = ((moe.num_experts, rows, width), {"up_proj": (0, rows)})
    return fused


# Linear weights that published checkpoints and modelopt's default recipes leave dense although they are matrices.
_NEVER_QUANTIZED = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "lm_head", "eh_proj", "fc")


def quantizable_modules(config: ModelConfig) -> tuple[str, ...]:
    """Linear modules that a recipe may quantize: all projections but routers, gates, in_proj_a/b, lm_head and MTP."""
    modules = []
    for name, shape in weight_shapes(config, mtp=False).items():
        module = name.removesuffix(".weight")
        leaf = module.rsplit(".", 1)[-1]
        if len(shape) == 2 and name != config.embedding_name and leaf not in _NEVER_QUANTIZED:
            modules.append(module)
    return tuple(modules)


def storage(shape: Shape, module_format: str, dtype: str = "bfloat16") -> dict[str, tuple[str, Shape]]:
    """Tensors that store one weight, by suffix after the module's name: {"weight": (dtype, shape), ...}.

    nvfp4: weight uint8 [out, in / 2] (two elements a byte, the even column in the low nibble), weight_scale
    float8_e4m3fn [out, in / 16], weight_scale_2 and input_scale fp32 []. w4a16_nvfp4: the same without input_scale.
    fp8: weight float8_e4m3fn [out, in], weight_scale and input_scale fp32 [].
    """
    if module_format == DENSE:
        return {"weight": (dtype, shape)}
    if module_format == FP8:
        return {
            "weight": ("float8_e4m3fn", shape),
            "weight_scale": ("float32", ()),
            "input_scale": ("float32", ()),
        }
    if module_format not in (NVFP4, W4A16_NVFP4):
        raise ValueError(f"unknown module format {module_format!r}; expected one of {', '.join(MODULE_FORMATS)}")
    rows, columns = shape
    if columns % GROUP_SIZE:
        raise ValueError(f"NVFP4 needs an input width in blocks of {GROUP_SIZE}, got a weight of shape {shape}")
    tensors = {
        "weight": ("uint8", (rows, columns // 2)),
        "weight_scale": ("float8_e4m3fn", (rows, columns // GROUP_SIZE)),
        "weight_scale_2": ("float32", ()),
        "input_scale": ("float32", ()),
    }
    if module_format == W4A16_NVFP4:
        del tensors["input_scale"]
    return tensors


def dense_dtype(config: ModelConfig, name: str, dtype: str = "bfloat16") -> str:
    """dtype in which an unquantized weight is stored where most are stored in `dtype`.

    The sigmoid router's correction bias is fp32. So are A_log and the gated norm of Qwen's original checkpoints (their
    published size to the byte shows it), but not those of modelopt's.
    """
    if name.endswith("e_score_correction_bias"):
        return "float32"
    if config.family == QWEN3_5 and not config.formats.is_quantized:
        return "float32" if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) else dtype
    return dtype


def weight_bytes(
    config: ModelConfig, formats: Mapping[str, str] | Callable[[str], str] | None = None, *, mtp: bool = True
) -> dict[str, int]:
    """Stored bytes by dtype name, plus "total", of the language model (file headers and vision tower excluded).

    formats: format of a module by canonical name, as a mapping (modules not in it are dense) or a function; None takes
    `config.formats`, what the checkpoint's own quantization config declares. Unquantized weights count as bf16, but for
    the few that `dense_dtype` names. An fp8 KV cache scheme adds one fp32 scale each for k and v of a layer.
    """
    if formats is None:
        quantizable = set(quantizable_modules(config))

        def format_of(module: str) -> str:
            return config.formats.module_format(module) if module in quantizable else DENSE

    elif isinstance(formats, Mapping):

        def format_of(module: str) -> str:
            return formats.get(module, DENSE)

    else:
        format_of = formats
    counts: dict[str, int] = {}
    for name, shape in weight_shapes(config, mtp=mtp).items():
        module_format = format_of(name.removesuffix(".weight")) if name.endswith(".weight") else DENSE
        for dtype, part in storage(shape, module_format, dense_dtype(config, name)).values():
            counts[dtype] = counts.get(dtype, 0) + math.prod(part) * ELEMENT_BITS[dtype] // 8
    if formats is None and config.formats.kv_cache is not None:
        counts["float32"] = counts.get("float32", 0) + 2 * len(config.attention_layers) * 4
    counts["total"] = sum(counts.values())
    return counts
