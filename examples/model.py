"""The two layouts in plain PyTorch, for training; parameter names are those of the checkpoints.

Nemotron-H: Mamba2, attention without position encoding, squared-ReLU MLP, one mixer per layer.
Qwen3.5: Gated DeltaNet or gated attention, each followed by a SwiGLU MLP, zero-centred norms.
Each has an MTP head: position p takes the trunk's normalised hidden state of p and the embedding of
token p+1 and predicts token p+2; its own normalised output is the `hidden` of the next, recursive step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import scans
from examples.tokenizer import VOCAB_SIZE


@dataclass(frozen=True)
class NemotronConfig:
    """Sizes under their Hugging Face names."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    pattern: str = "M-M-M*-M-M-"
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 2
    conv_kernel: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    eps: float = 1e-5


@dataclass(frozen=True)
class QwenConfig:
    """Sizes under their Hugging Face names."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_hidden_layers: int = 6
    full_attention_interval: int = 4
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    conv_kernel: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rotary_dim: int = 16
    intermediate_size: int = 448
    eps: float = 1e-6


@dataclass
class Rows:
    """What a forward pass knows about its packed rows.

    segment [batch, tokens] numbers the documents; `attend` maps q [b,h,T,d], k and v [b,hk,T,d] to
    [b,h,T,d] under a causal mask that stays inside a document.
    """

    segment: Tensor
    block_mask: object | None = None
    scan_dtype: torch.dtype | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.block_mask is not None:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(q, k, v, block_mask=self.block_mask, enable_gqa=True)
        tokens = q.shape[2]
        keep = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        keep = keep & (self.segment[:, :, None] == self.segment[:, None, :])
        return F.scaled_dot_product_attention(q, k, v, keep[:, None], enable_gqa=True)


class RMSNorm(nn.Module):
    """x / rms(x) * w, or * (1 + w) when zero-centred; fp32 inside."""

    def __init__(self, size: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))
        self.eps, self.offset = eps, float(zero_centred)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.to(wide.dtype) + self.offset)).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def causal_conv(x: Tensor, conv: nn.Conv1d, segment: Tensor) -> Tensor:
    """Depthwise causal convolution and silu over x [b,T,C], inside documents."""
    taps = conv.kernel_size[0]
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    weight = conv.weight.to(wide)
    out = x * weight[:, 0, taps - 1]
    for back in range(1, taps):
        same = F.pad(segment[:, back:] == segment[:, :-back], (back, 0))
        earlier = F.pad(x[:, :-back], (0, 0, back, 0)) * same[..., None]
        out = out + earlier * weight[:, 0, taps - 1 - back]
    return F.silu(out if conv.bias is None else out + conv.bias)


def _init_decay(heads: int) -> tuple[Tensor, Tensor]:
    """A_log of A in [1, 16] and dt_bias of dt in [1e-3, 1e-1], log-uniform (the usual Mamba2 init)."""
    dt = torch.exp(torch.rand(heads) * math.log(100.0) + math.log(1e-3))
    return torch.empty(heads).uniform_(1, 16).log(), dt + torch.log(-torch.expm1(-dt))


class Mamba2(nn.Module):
    """in_proj -> [z | x B C | dt], convolution, scan, gate then grouped norm, out_proj."""

    def __init__(self, c: NemotronConfig) -> None:
        super().__init__()
        self.c = c
        self.inner = c.mamba_num_heads * c.mamba_head_dim
        self.conv_dim = self.inner + 2 * c.n_groups * c.ssm_state_size
        self.in_proj = _linear(c.hidden_size, self.inner + self.conv_dim + c.mamba_num_heads)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, c.conv_kernel, groups=self.conv_dim)
        a_log, dt_bias = _init_decay(c.mamba_num_heads)
        self.A_log, self.dt_bias = nn.Parameter(a_log), nn.Parameter(dt_bias)
        self.D = nn.Parameter(torch.ones(c.mamba_num_heads))
        self.norm = RMSNorm(self.inner, c.eps)
        self.out_proj = _linear(self.inner, c.hidden_size)

    def gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate first, then RMSNorm over each of n_groups groups; y and z [..., inner]."""
        wide = y if y.dtype == torch.float64 else y.float()
        wide = (wide * F.silu(z.to(wide.dtype))).unflatten(-1, (self.c.n_groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.c.eps)
        return (wide.flatten(-2) * self.norm.weight).to(z.dtype)

    def split_xbc(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., conv_dim] -> x [..., heads, P], B and C [..., groups, N]."""
        c = self.c
        bc = c.n_groups * c.ssm_state_size
        x, b, cc = xbc.split([self.inner, bc, bc], -1)
        groups = (c.n_groups, c.ssm_state_size)
        return (
            x.unflatten(-1, (c.mamba_num_heads, c.mamba_head_dim)),
            b.unflatten(-1, groups),
            cc.unflatten(-1, groups),
        )

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        z, xbc, dt = self.in_proj(h).split([self.inner, self.conv_dim, self.c.mamba_num_heads], -1)
        xbc = causal_conv(xbc, self.conv1d, rows.segment).to(z.dtype)
        x, b, c = self.split_xbc(xbc)
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        y = scans.mamba2_chunked(x, dt, -self.A_log.exp(), b, c, self.D, rows.segment, matmul_dtype=rows.scan_dtype)
        return self.out_proj(self.gated_norm(y.flatten(-2), z))


class Attention(nn.Module):
    """Causal attention; Qwen3.5 adds per-head norms, partial rotary embedding and an output gate."""

    def __init__(self, c: NemotronConfig | QwenConfig) -> None:
        super().__init__()
        self.c = c
        self.gated = isinstance(c, QwenConfig)
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = _linear(c.hidden_size, q_size * (2 if self.gated else 1))
        self.k_proj = _linear(c.hidden_size, kv_size)
        self.v_proj = _linear(c.hidden_size, kv_size)
        self.o_proj = _linear(q_size, c.hidden_size)
        if self.gated:
            self.q_norm = RMSNorm(c.head_dim, c.eps, zero_centred=True)
            self.k_norm = RMSNorm(c.head_dim, c.eps, zero_centred=True)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate-half inside the first rotary_dim of x [b,h,T,d]; positions [T]."""
        size = self.c.rotary_dim
        power = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        angle = positions.float()[:, None] * self.c.rope_theta**-power
        cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angle.cos(), angle.sin()))
        first, rest = x[..., :size], x[..., size:]
        half = torch.cat((-first[..., size // 2 :], first[..., : size // 2]), -1)
        return torch.cat((first * cos + half * sin, rest), -1)

    def project(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """h [b,T,hidden] -> q [b,h,T,d], k, v [b,hk,T,d], gate [b,T,h*d] or None."""
        size = self.c.head_dim
        q = self.q_proj(h).unflatten(-1, (self.c.num_attention_heads, -1))
        k = self.k_proj(h).unflatten(-1, (-1, size))
        v = self.v_proj(h).unflatten(-1, (-1, size)).transpose(1, 2)
        if not self.gated:
            return q.transpose(1, 2), k.transpose(1, 2), v, None
        q, gate = q.chunk(2, -1)
        q = self.rotate(self.q_norm(q).transpose(1, 2), positions)
        k = self.rotate(self.k_norm(k).transpose(1, 2), positions)
        return q, k, v, gate.flatten(-2)

    def output(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """attended [b,h,T,d] -> [b,T,hidden]."""
        y = attended.transpose(1, 2).flatten(-2)
        return self.o_proj(y if gate is None else y * gate.sigmoid())

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        q, k, v, gate = self.project(h, torch.arange(h.shape[1], device=h.device))
        return self.output(rows.attend(q, k, v), gate)


class SquaredReLU(nn.Module):
    def __init__(self, c: NemotronConfig) -> None:
        super().__init__()
        self.up_proj = _linear(c.hidden_size, c.intermediate_size)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)

    def forward(self, h: Tensor, rows: Rows | None = None) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(h)).square())


class SwiGLU(nn.Module):
    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden_size, c.intermediate_size)
        self.up_proj = _linear(c.hidden_size, c.intermediate_size)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class GatedDeltaNet(nn.Module):
    """Separate qkv, z, a, b projections, convolution over [q|k|v], scan, norm then gate."""

    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        self.c = c
        self.key_dim = c.linear_num_key_heads * c.linear_key_head_dim
        self.value_dim = c.linear_num_value_heads * c.linear_value_head_dim
        conv_dim = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = _linear(c.hidden_size, conv_dim)
        self.in_proj_z = _linear(c.hidden_size, self.value_dim)
        self.in_proj_a = _linear(c.hidden_size, c.linear_num_value_heads)
        self.in_proj_b = _linear(c.hidden_size, c.linear_num_value_heads)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, c.conv_kernel, groups=conv_dim, bias=False)
        a_log, dt_bias = _init_decay(c.linear_num_value_heads)
        self.A_log, self.dt_bias = nn.Parameter(a_log), nn.Parameter(dt_bias)
        self.norm = RMSNorm(c.linear_value_head_dim, c.eps)
        self.out_proj = _linear(self.value_dim, c.hidden_size)

    def split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., conv_dim] -> q, k [..., hk, dk], v [..., hv, dv]."""
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        dk, dv = self.c.linear_key_head_dim, self.c.linear_value_head_dim
        return q.unflatten(-1, (-1, dk)), k.unflatten(-1, (-1, dk)), v.unflatten(-1, (-1, dv))

    def gates(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """g (log decay) and beta, both in the parameters' precision."""
        wide = self.dt_bias.dtype
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(h).to(wide) + self.dt_bias)
        return g, self.in_proj_b(h).to(wide).sigmoid()

    def finish(self, o: Tensor, z: Tensor) -> Tensor:
        """o [..., hv, dv], z [..., value_dim]."""
        gate = F.silu(z.to(o.dtype)).unflatten(-1, (-1, self.c.linear_value_head_dim))
        return self.out_proj((self.norm(o) * gate).flatten(-2).to(z.dtype))

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        qkv = self.in_proj_qkv(h)
        qkv = causal_conv(qkv, self.conv1d, rows.segment).to(qkv.dtype)
        g, beta = self.gates(h)
        o = scans.gdn_chunked(*self.split_qkv(qkv), g, beta, rows.segment)
        return self.finish(o, self.in_proj_z(h))


class NemotronBlock(nn.Module):
    """norm -> mixer -> residual."""

    def __init__(self, c: NemotronConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.mixer = {"M": Mamba2, "*": Attention, "-": SquaredReLU}[kind](c)

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        return h + self.mixer(self.norm(h), rows)


class QwenBlock(nn.Module):
    """norm -> GDN or attention -> residual; norm -> SwiGLU -> residual."""

    def __init__(self, c: QwenConfig, attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps, zero_centred=True)
        self.mlp = SwiGLU(c)
        if attention:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        h = h + self.mixer(self.input_layernorm(h), rows)
        return h + self.mlp(self.post_attention_layernorm(h))
