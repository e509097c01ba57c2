"""What a model is made of, independent of how a checkpoint spells it.

Frozen descriptions that `builders.config.read_config` fills from a Hugging Face `config.json`. Model definitions read
nothing else, so a field that is not here is a field that this version does not support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from replayssm.builders.formats import QuantizationFormats
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry

DEFAULT_MAX_SEQ_LEN = 4096

NEMOTRON_H = "nemotron_h"
QWEN3_5 = "qwen3_5"
FAMILIES = (NEMOTRON_H, QWEN3_5)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding of the first `dim` of `head_dim` elements (rotate-half inside those)."""

    theta: float
    dim: int


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba2 mixer: in_proj gives [z | x | B | C | dt]; the gate is applied before the grouped norm.

    norm_group_size: channels that share one RMS in the gated norm, nheads * headdim / ngroups.
    """

    geometry: Mamba2Geometry
    conv: ConvGeometry
    conv_bias: bool

    kind: ClassVar[str] = "mamba2"

    @property
    def inner_size(self) -> int:
        return self.geometry.nheads * self.geometry.headdim

    @property
    def norm_group_size(self) -> int:
        return self.inner_size // self.geometry.ngroups


@dataclass(frozen=True)
class GdnConfig:
    """Gated DeltaNet mixer with separate projections for [q | k | v], z, a and b; norm per value head, then gate."""

    geometry: GdnGeometry
    conv: ConvGeometry

    kind: ClassVar[str] = "gdn"

    @property
    def key_size(self) -> int:
        return self.geometry.num_k_heads * self.geometry.head_k_dim

    @property
    def value_size(self) -> int:
        return self.geometry.num_v_heads * self.geometry.head_v_dim


@dataclass(frozen=True)
class AttentionConfig:
    """Causal grouped-query attention.

    rope: None means no position encoding at all (Nemotron).
    qk_norm: zero-centred RMSNorm over head_dim of q and k, before rope.
    output_gate: q_proj is twice as wide, per head [q | gate], and sigmoid(gate) multiplies the attention output.
    """

    num_heads: int
    geometry: AttentionGeometry
    rope: RopeConfig | None
    qk_norm: bool
    output_gate: bool

    kind: ClassVar[str] = "attention"

    @property
    def num_kv_heads(self) -> int:
        return self.geometry.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.geometry.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class MlpConfig:
    """activation "squared_relu": down(relu(up(x))^2). "swiglu": down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str

    kind: ClassVar[str] = "mlp"


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts plus one shared expert.

    router: "sigmoid" picks top_k of sigmoid(logits) + correction_bias and weighs by the uncorrected scores (divided by
        their sum + 1e-20 if `normalize`) times `routed_scaling_factor`; "softmax" picks top_k of softmax(logits) and
        renormalises. Both in fp32.
    latent_size: width of the routed experts' inputs and outputs where fc1/fc2_latent_proj surround them, else None.
    shared_gate: the shared expert's output is multiplied by sigmoid(shared_expert_gate(x)).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    activation: str
    router: str
    routed_scaling_factor: float
    normalize: bool
    shared_gate: bool

    kind: ClassVar[str] = "moe"


Mixer = Mamba2Config | GdnConfig | AttentionConfig
FeedForward = MlpConfig | MoeConfig


@dataclass(frozen=True)
class LayerConfig:
    """One entry of the checkpoint's layer list.

    Nemotron: exactly one of `mixer` and `feed_forward` is set (one residual block). Qwen: both are set (two residual
    blocks). `prefix` starts the layer's canonical weight names ("layers.3.", "mtp.layers.0."); `mixer_prefix` and
    `feed_forward_prefix` start those of the two parts ("layers.3.linear_attn.", "layers.3.mlp.").
    """

    index: int
    prefix: str
    mixer: Mixer | None = None
    feed_forward: FeedForward | None = None
    mixer_prefix: str = ""
    feed_forward_prefix: str = ""

    @property
    def kind(self) -> str:
        """Kind of the mixer, or of the feed-forward part of a layer without one."""
        part = self.mixer if self.mixer is not None else self.feed_forward
        return part.kind


@dataclass(frozen=True)
class MtpConfig:
    """Draft head for multi-token prediction, applied recursively. It shares embeddings and lm_head with the model.

    Nemotron ("mtp.layers.0" is attention, "mtp.layers.1" MLP or MoE): eh_proj(cat[enorm(embedding), hnorm(hidden)]),
        both layers, final_layernorm of the last.
    Qwen: fc(cat[pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(hidden)]), one decoder layer, mtp.norm.
    """

    layers: tuple[LayerConfig, ...]


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid language model. Weight names elsewhere are canonical: on-disk names without the family's prefix.

    family: "nemotron_h" or "qwen3_5". architecture: the Hugging Face class name.
    zero_centered_norms: RMSNorm weights act as (1 + w). The gated norm of GDN is never zero-centred.
    dtype: torch's name of the dtype that unquantized weights are stored in, as the config states it.
    eos_token_ids: of generation_config.json where present, else of config.json.
    formats: which modules are quantized how (all dense for an unquantized checkpoint).
    source: where the description came from, for error messages.
    """

    family: str
    architecture: str
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    zero_centered_norms: bool
    max_position_embeddings: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    mtp: MtpConfig | None
    multimodal: bool
    formats: QuantizationFormats
    source: str

    @property
    def embedding_name(self) -> str:
        return "embeddings.weight" if self.family == NEMOTRON_H else "embed_tokens.weight"

    @property
    def final_norm_name(self) -> str:
        return "norm_f.weight" if self.family == NEMOTRON_H else "norm.weight"

    @property
    def lm_head_name(self) -> str:
        """Name of the output projection's weight; the embedding's where they are tied."""
        return self.embedding_name if self.tie_word_embeddings else "lm_head.weight"

    def max_seq_len(self, wanted: int | None) -> int:
        """`wanted`, or the model's own limit up to 4096. Raises ValueError where the model has fewer positions."""
        if wanted is None:
            return min(DEFAULT_MAX_SEQ_LEN, self.max_position_embeddings)
        if wanted > self.max_position_embeddings:
            raise ValueError(
                f"max_seq_len {wanted} is more than the model was made for: "
                f"{self.max_position_embeddings} positions (max_position_embeddings of {self.source})"
            )
        return wanted

    @property
    def recurrent_layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for layer in self.layers if layer.kind in ("mamba2", "gdn"))

    @property
    def attention_layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for layer in self.layers if layer.kind == "attention")
