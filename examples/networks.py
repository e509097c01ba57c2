"""The two whole networks with their MTP heads, and the training loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.model import (
    Attention,
    NemotronBlock,
    NemotronConfig,
    QwenBlock,
    QwenConfig,
    RMSNorm,
    Rows,
)
from examples.tokenizer import ASSISTANT, BEGIN, END

MTP_DEPTH = 3
MTP_WEIGHT = 0.3


class _NemotronMTPAttention(nn.Module):
    def __init__(self, c: NemotronConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(c.hidden_size, c.eps), RMSNorm(c.hidden_size, c.eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.mixer = Attention(c)


class _NemotronMTPFeedForward(NemotronBlock):
    def __init__(self, c: NemotronConfig) -> None:
        super().__init__(c, "-")
        self.final_layernorm = RMSNorm(c.hidden_size, c.eps)


class NemotronMTP(nn.Module):
    """Two layers, attention and MLP (`mtp_hybrid_override_pattern` "*-")."""

    def __init__(self, c: NemotronConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_NemotronMTPAttention(c), _NemotronMTPFeedForward(c)])

    @property
    def attention(self) -> Attention:
        return self.layers[0].mixer

    def enter(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, attention input), both [b,T,hidden]."""
        first = self.layers[0]
        h = first.eh_proj(torch.cat((first.enorm(embedded), first.hnorm(hidden)), -1))
        return h, first.norm(h)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        last = self.layers[1]
        h = residual + attended
        return last.final_layernorm(h + last.mixer(last.norm(h)))

    def forward(self, hidden: Tensor, embedded: Tensor, rows: Rows) -> Tensor:
        residual, h = self.enter(hidden, embedded)
        return self.leave(residual, self.attention(h, rows))


class QwenMTP(nn.Module):
    """One full-attention decoder layer (`mtp_num_hidden_layers` 1)."""

    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.eps, zero_centred=True)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, c.eps, zero_centred=True)
        self.layers = nn.ModuleList([QwenBlock(c, attention=True)])
        self.norm = RMSNorm(c.hidden_size, c.eps, zero_centred=True)

    @property
    def attention(self) -> Attention:
        return self.layers[0].self_attn

    def enter(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, attention input), both [b,T,hidden]."""
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        h = self.fc(torch.cat(parts, -1))
        return h, self.layers[0].input_layernorm(h)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        layer = self.layers[0]
        h = residual + attended
        return self.norm(h + layer.mlp(layer.post_attention_layernorm(h)))

    def forward(self, hidden: Tensor, embedded: Tensor, rows: Rows) -> Tensor:
        residual, h = self.enter(hidden, embedded)
        return self.leave(residual, self.attention(h, rows))


class HybridLM(nn.Module):
    """What both networks share: trunk, shared head, MTP, initialisation."""

    mtp: NemotronMTP | QwenMTP

    @property
    def embedding(self) -> nn.Embedding:
        raise NotImplementedError

    @property
    def blocks(self) -> nn.ModuleList:
        raise NotImplementedError

    @property
    def final_norm(self) -> RMSNorm:
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]"""
        raise NotImplementedError

    def trunk(self, ids: Tensor, rows: Rows) -> Tensor:
        """ids [b,T] -> hidden after the final norm [b,T,hidden]."""
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h, rows)
        return self.final_norm(h)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    def forward(self, ids: Tensor, segment: Tensor | None = None) -> Tensor:
        """ids [b,T] -> logits [b,T,vocab], one document a row unless `segment` says otherwise."""
        rows = Rows(torch.zeros_like(ids) if segment is None else segment)
        return self.logits(self.trunk(ids, rows))

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Seeded normal initialisation; projections into the residual stream start smaller."""
        generator = torch.Generator().manual_seed(seed)
        depth = 2 * len(self.blocks)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                inward = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
                scale = 0.04 / math.sqrt(depth) if inward else 0.04
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
            elif "conv1d.weight" in name:
                p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
            elif "conv1d.bias" in name:
                p.zero_()


class NemotronH(HybridLM):
    def __init__(self, c: NemotronConfig | None = None) -> None:
        super().__init__()
        self.c = c = c or NemotronConfig()
        self.backbone = nn.Module()
        self.backbone.embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.backbone.layers = nn.ModuleList(NemotronBlock(c, kind) for kind in c.pattern)
        self.backbone.norm_f = RMSNorm(c.hidden_size, c.eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.mtp = NemotronMTP(c)

    embedding = property(lambda self: self.backbone.embeddings)
    blocks = property(lambda self: self.backbone.layers)
    final_norm = property(lambda self: self.backbone.norm_f)
    head_weight = property(lambda self: self.lm_head.weight)


class Qwen35(HybridLM):
    def __init__(self, c: QwenConfig | None = None) -> None:
        super().__init__()
        self.c = c = c or QwenConfig()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(
            QwenBlock(c, attention=(i + 1) % c.full_attention_interval == 0) for i in range(c.num_hidden_layers)
        )
        self.model.norm = RMSNorm(c.hidden_size, c.eps, zero_centred=True)
        self.mtp = QwenMTP(c)

    embedding = property(lambda self: self.model.embed_tokens)
    blocks = property(lambda self: self.model.layers)
    final_norm = property(lambda self: self.model.norm)
    head_weight = property(lambda self: self.model.embed_tokens.weight)


LAYOUTS: dict[str, type[HybridLM]] = {"nemotron-h-tiny": NemotronH, "qwen3.5-tiny": Qwen35}


def segments(ids: Tensor) -> Tensor:
    """Document number of each token of packed rows [b,T]: a document begins with <|begin|>."""
    return (ids == BEGIN).cumsum(1)


def answer_mask(ids: Tensor) -> Tensor:
    """True where a token belongs to an answer: after <|assistant|> up to and with <|end|>."""
    opened = (ids == ASSISTANT).cumsum(1)
    closed = (ids == END).cumsum(1)
    inside = opened > closed
    return (inside & (ids != ASSISTANT)) | (ids == END)


def token_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the masked tokens, fp32."""
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    weight = mask.flatten().float()
    return (each * weight).sum() / weight.sum().clamp(min=1)


def training_loss(model: HybridLM, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """(loss to minimise, [1 + MTP_DEPTH] parts) for packed ids [b, T+2]; rows cover T tokens.

    Every MTP depth predicts token i+2 at index i: depth 1 from the trunk's hidden state of i, depth d
    from depth d-1's output at i-1, which is how a draft chain runs.
    """
    tokens = ids.shape[1] - 2
    mask = answer_mask(ids)
    hidden = model.trunk(ids[:, :tokens], rows)
    parts = [token_loss(model.logits(hidden), ids[:, 1:-1], mask[:, 1:-1])]
    embedded = model.embedding(ids[:, 1:-1])
    same = F.pad(rows.segment[:, 1:] == rows.segment[:, :-1], (1, 0))[..., None]
    for depth in range(MTP_DEPTH):
        if depth:
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0)) * same
        hidden = model.mtp(hidden, embedded, rows)
        parts.append(token_loss(model.logits(hidden), ids[:, 2:], mask[:, 2:]))
    loss = parts[0] + MTP_WEIGHT * sum(parts[1:]) / MTP_DEPTH
    return loss, torch.stack(parts).detach()
