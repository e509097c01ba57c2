"""Greedy decoding of many right-aligned prompts through `examples.replay`, one state format after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.model import Attention, GatedDeltaNet, Mamba2, QwenBlock
from examples.networks import HybridLM
from examples.replay import BUFFER_LEN, GdnCore, Mamba2Core, normalized, softplus
from examples.state_formats import StateFormat, Store
from examples.tokenizer import END, PAD
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.reference.rounding import rounding_bits


@dataclass
class _Clock:
    """Device counters of a decoder: `position` [1] in the aligned batch, `fill` [1] of the ring, `live` [rows, 1]
    whether a row's prompt has begun, `own` [rows] its own position."""

    position: Tensor
    fill: Tensor
    live: Tensor
    own: Tensor


class _Conv:
    """Last conv_kernel - 1 inputs of each row; zero before a row begins."""

    def __init__(self, conv: nn.Conv1d, rows: int, clock: _Clock) -> None:
        self.bias, self.weight, self.clock = conv.bias, conv.weight[:, 0].float(), clock
        shape = (rows, conv.kernel_size[0] - 1, conv.in_channels)
        self.past = torch.zeros(shape, device=clock.fill.device, dtype=conv.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        window = torch.cat((self.past, (x * self.clock.live)[:, None]), 1)
        self.past.copy_(window[:, 1:])
        out = torch.einsum("rkc,ck->rc", window.float(), self.weight)
        return F.silu(out if self.bias is None else out + self.bias).to(x.dtype)


class _Mamba2Layer:
    def __init__(self, mixer: Mamba2, rows: int, clock: _Clock, wrap: Callable) -> None:
        c, self.mixer, self.clock = mixer.c, mixer, clock
        self.geometry = Mamba2Geometry(c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups)
        shape = (c.mamba_num_heads, c.n_groups, c.mamba_head_dim, c.ssm_state_size)
        self.conv, self.core = _Conv(mixer.conv1d, rows, clock), Mamba2Core(rows, shape, clock.fill, wrap)

    def __call__(self, h: Tensor) -> Tensor:
        m = self.mixer
        z, xbc, dt = m.in_proj(h).split([m.inner, m.conv_dim, m.c.mamba_num_heads], -1)
        x, B, C = (t.float() for t in m.split_xbc(self.conv(xbc)))
        dt = softplus(dt.float() + m.dt_bias) * self.clock.live
        y = self.core.step(x, dt, -m.A_log.float().exp(), B, C, m.D.float())
        return m.out_proj(m.gated_norm(y.to(h.dtype).flatten(-2), z))


class _GdnLayer:
    def __init__(self, mixer: GatedDeltaNet, rows: int, clock: _Clock, wrap: Callable) -> None:
        c, self.mixer, self.clock = mixer.c, mixer, clock
        sizes = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        self.geometry = GdnGeometry(*sizes)
        shape = (sizes[1], sizes[0], sizes[3], sizes[2])
        self.conv, self.core = _Conv(mixer.conv1d, rows, clock), GdnCore(rows, shape, clock.fill, wrap)

    def __call__(self, h: Tensor) -> Tensor:
        m = self.mixer
        q, k, v = m.split_qkv(self.conv(m.in_proj_qkv(h)))
        q, k = (normalized(t, h.dtype) for t in (q, k))
        g, beta = (gate.float() * self.clock.live for gate in m.gates(h))
        o = self.core.step(q * q.shape[-1] ** -0.5, k, v.float(), g, beta)
        return m.finish(o.to(h.dtype), m.in_proj_z(h))


class _AttentionLayer:
    def __init__(self, mixer: Attention, rows: int, clock: _Clock, capacity: int, start: Tensor) -> None:
        c, self.mixer, self.clock, self.start = mixer.c, mixer, clock, start
        shape = (rows, c.num_key_value_heads, capacity, c.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, device=start.device, dtype=mixer.k_proj.weight.dtype) for _ in range(2)
        )
        self.slots = torch.arange(capacity, device=start.device)

    def __call__(self, h: Tensor) -> Tensor:
        # Rows are the "tokens" of the projection, so that each has its own rotary position.
        q, k, v, gate = self.mixer.project(h[None], self.clock.own)
        q, k, v = (t[0].transpose(0, 1)[:, :, None] for t in (q, k, v))
        # Heads that share keys become the queries of one head, which needs no repeated keys.
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
        self.keys.index_copy_(2, self.clock.position, k)
        self.values.index_copy_(2, self.clock.position, v)
        seen = (self.slots <= self.clock.position) & (self.slots >= self.start[:, None])
        # A row that has not begun sees its own key, so that its softmax is one.
        seen = seen | (self.slots == self.clock.position)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, seen[:, None, None])
        y = y.flatten(1, 2)[:, :, None]
        return self.mixer.output(y, None if gate is None else gate[0][:, None])[:, 0]


class ReplayDecoder:
    """Prompts [rows] whose last tokens are aligned; `prefill` once, then `decode` for every format.

    new_tokens: the most that a row may generate. seed: of stochastic rounding. wrap: applied to the functions that
    read or round states, such as torch.compile.
    """

    def __init__(
        self, model: HybridLM, prompts: list[list[int]], new_tokens: int, seed: int = 0, wrap: Callable | None = None
    ) -> None:
        device = next(model.parameters()).device
        self.wrap = wrap or (lambda function: function)
        rows, self.longest = len(prompts), max(map(len, prompts))
        capacity = self.longest + new_tokens
        self.model, self.new_tokens, self.seed = model, new_tokens, seed
        self.start = torch.tensor([self.longest - len(p) for p in prompts], device=device)
        ids = torch.full((rows, capacity), PAD)
        for row, prompt in zip(ids, prompts, strict=True):
            row[self.longest - len(prompt) : self.longest] = torch.tensor(prompt)
        self.ids = ids.to(device)
        zero = torch.zeros(1, dtype=torch.long, device=device)
        self.clock = _Clock(zero, zero.clone(), torch.zeros(rows, 1, device=device), torch.zeros_like(self.start))
        self.layers = [self._layer(block.mixer, rows, capacity) for block in model.blocks]
        recurrent = {
            number: layer for number, layer in enumerate(self.layers) if isinstance(layer, _Mamba2Layer | _GdnLayer)
        }
        self.recurrent, self.numbers = list(recurrent.values()), list(recurrent)
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.bits: list[Tensor] = []

    def _layer(self, mixer: nn.Module, rows: int, capacity: int):
        if isinstance(mixer, Mamba2):
            return _Mamba2Layer(mixer, rows, self.clock, self.wrap)
        if isinstance(mixer, GatedDeltaNet):
            return _GdnLayer(mixer, rows, self.clock, self.wrap)
        if isinstance(mixer, Attention):
            return _AttentionLayer(mixer, rows, self.clock, capacity, self.start)
        return mixer

    def _step(self) -> None:
        """Read the token at `position`, write the next one unless the prompt has it."""
        clock = self.clock
        clock.own.copy_((clock.position - self.start).clamp(min=0))
        clock.live.copy_((clock.position >= self.start)[:, None])
        h = self.model.embedding(self.ids.index_select(1, clock.position)[:, 0])
        for block, layer in zip(self.model.blocks, self.layers, strict=True):
            if isinstance(block, QwenBlock):
                h = h + layer(block.input_layernorm(h))
                h = h + block.mlp(block.post_attention_layernorm(h))
            else:
                h = h + layer(block.norm(h))
        best = self.model.logits(self.model.final_norm(h)).argmax(-1)
        after = clock.position + 1
        given = self.ids.index_select(1, after)[:, 0]
        self.ids.index_copy_(1, after, torch.where(after < self.longest, given, best)[:, None])
        clock.position.add_(1)
        clock.fill.add_(1)

    def _program(self) -> Callable[[], None]:
        """The step as a callable: a replayed CUDA graph, or the function itself.

        The ring must be empty. Warming up leaves traces only where the first step writes again.
        """
        if self.ids.device.type == "cpu":
            return self._step
        pasts = [layer.conv.past.clone() for layer in self.recurrent]
        ids, position = self.ids.clone(), int(self.clock.position)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.ids.copy_(ids)
        self.clock.position.fill_(position)
        self.clock.fill.zero_()
        for layer, past in zip(self.recurrent, pasts, strict=True):
            layer.conv.past.copy_(past)
            layer.core.clear()
        return graph.replay

    def _flush(self, stores: Sequence[Store] | None, index: int = 0) -> None:
        nothing = [None] * len(self.recurrent)
        for layer, store, bits in zip(self.recurrent, stores or nothing, self.bits or nothing, strict=True):
            layer.core.flush(store, None if bits is None else bits[index])
        self.clock.fill.zero_()

    @torch.no_grad()
    def prefill(self) -> None:
        """Fold all of every prompt but its last token, exactly."""
        advance = self._program()
        for token in range(self.longest - 1):
            advance()
            if token % BUFFER_LEN == BUFFER_LEN - 1:
                self._flush(None)
        self._flush(None)
        self.saved = [(layer.conv.past.clone(), layer.core.checkpoint.clone()) for layer in self.recurrent]
        first = self.longest - 1
        positions = torch.arange(first, first + self.new_tokens + BUFFER_LEN, BUFFER_LEN, device=self.ids.device)
        self.bits = [
            rounding_bits(layer.geometry.state_shape, self.seed, number, positions)
            for number, layer in enumerate(self.recurrent)
        ]

    @torch.no_grad()
    def decode(self, form: StateFormat) -> list[list[int]]:
        """Answers (new tokens) of all rows, each with its <|end|> if it came in time."""
        self.clock.position.fill_(self.longest - 1)
        self.clock.fill.zero_()
        self.ids[:, self.longest :] = PAD
        stores = [Store(form.of_layer(number), self.wrap) for number in self.numbers]
        for layer, store, bits, (past, S) in zip(self.recurrent, stores, self.bits, self.saved, strict=True):
            layer.conv.past.copy_(past)
            layer.core.u_from_checkpoint = form.u_source == "checkpoint"
            layer.core.start(S, store, bits[0])
        advance = self._program()
        for token in range(self.new_tokens):
            if token and token % BUFFER_LEN == 0:
                self._flush(stores, token // BUFFER_LEN)
                if bool((self.ids[:, self.longest :] == END).any(1).all()):
                    break
            advance()
        answers = self.ids[:, self.longest :].cpu().tolist()
        return [answer[: answer.index(END) + 1] if END in answer else answer for answer in answers]
