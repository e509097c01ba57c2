"""Batched greedy decoding in the plain recurrent form, and MTP acceptance, in PyTorch alone.

This is the yardstick of the checkpoints, not the engine: it updates the whole state at every token. All
rows of a batch advance together from position 0 (a row reads its prompt until it ends, then itself),
so that one step is one fixed program, replayed as a CUDA graph on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples import scans
from examples.model import Attention, GatedDeltaNet, Mamba2, QwenBlock, Rows
from examples.networks import MTP_DEPTH, HybridLM
from examples.tokenizer import END, PAD

FP8_MAX = 448.0


def round_state(state: Tensor, name: str) -> Tensor:
    """fp32 state as it would read back from a `name` store: fp32, bf16, fp16, fp8 (scale per head)."""
    if name == "fp32":
        return state
    if name in ("bf16", "fp16"):
        return state.to({"bf16": torch.bfloat16, "fp16": torch.float16}[name]).float()
    if name == "fp8":
        scale = state.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / FP8_MAX
        return (state / scale).to(torch.float8_e4m3fn).float() * scale
    raise ValueError(f"state format must be fp32, bf16, fp16 or fp8, got {name!r}")


class _Conv:
    """Last conv_kernel - 1 inputs of each row."""

    def __init__(self, conv: torch.nn.Conv1d, rows: int, device: str) -> None:
        self.conv = conv
        self.weight = conv.weight[:, 0].float()
        self.past = torch.zeros(rows, conv.kernel_size[0] - 1, conv.in_channels, device=device, dtype=conv.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, C] -> [rows, C], silu included."""
        window = torch.cat((self.past, x[:, None]), 1)
        self.past.copy_(window[:, 1:])
        out = torch.einsum("rkc,ck->rc", window.float(), self.weight)
        return F.silu(out if self.conv.bias is None else out + self.conv.bias).to(x.dtype)


class _Mamba2Step:
    def __init__(self, mixer: Mamba2, rows: int, device: str, state_format: str) -> None:
        c, self.mixer, self.format = mixer.c, mixer, state_format
        self.conv = _Conv(mixer.conv1d, rows, device)
        shape = (rows, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)
        self.state = torch.zeros(shape, device=device)
        self.repeat = c.mamba_num_heads // c.n_groups

    def __call__(self, h: Tensor, position: Tensor) -> Tensor:
        m = self.mixer
        z, xbc, dt = m.in_proj(h).split([m.inner, m.conv_dim, m.c.mamba_num_heads], -1)
        x, b, c = (t.float() for t in m.split_xbc(self.conv(xbc)))
        dt = F.softplus(dt.float() + m.dt_bias)
        decay = (-m.A_log.exp() * dt).exp()
        b, c = (t.repeat_interleave(self.repeat, 1) for t in (b, c))
        new = self.state * decay[..., None, None]
        new = new + (dt[..., None] * x)[..., None] * b[:, :, None]
        self.state.copy_(round_state(new, self.format))
        y = (self.state @ c[..., None])[..., 0] + m.D[:, None] * x
        return m.out_proj(m.gated_norm(y.flatten(-2), z))


class _GDNStep:
    def __init__(self, mixer: GatedDeltaNet, rows: int, device: str, state_format: str) -> None:
        c, self.mixer, self.format = mixer.c, mixer, state_format
        self.conv = _Conv(mixer.conv1d, rows, device)
        shape = (rows, c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)
        self.state = torch.zeros(shape, device=device)
        self.repeat = c.linear_num_value_heads // c.linear_num_key_heads

    def __call__(self, h: Tensor, position: Tensor) -> Tensor:
        m = self.mixer
        q, k, v = (t.float() for t in m.split_qkv(self.conv(m.in_proj_qkv(h))))
        q = scans.l2_normalize(q) * q.shape[-1] ** -0.5
        k = scans.l2_normalize(k)
        q, k = (t.repeat_interleave(self.repeat, 1) for t in (q, k))
        g, beta = m.gates(h)
        decayed = self.state * g.exp()[..., None, None]
        u = beta[..., None] * (v - (decayed @ k[..., None])[..., 0])
        self.state.copy_(round_state(decayed + u[..., None] * k[:, :, None], self.format))
        return m.finish((self.state @ q[..., None])[..., 0], m.in_proj_z(h))


class _AttentionStep:
    def __init__(self, mixer: Attention, rows: int, device: str, capacity: int) -> None:
        c, self.mixer = mixer.c, mixer
        shape = (rows, c.num_key_value_heads, capacity, c.head_dim)
        dtype = mixer.k_proj.weight.dtype
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slots = torch.arange(capacity, device=device)

    def __call__(self, h: Tensor, position: Tensor) -> Tensor:
        q, k, v, gate = self.mixer.project(h[:, None], position)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = (self.slots <= position)[None, None, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, seen, enable_gqa=True)
        return self.mixer.output(y, gate)[:, 0]


class Decoder:
    """Greedy decoding of a fixed number of rows."""

    def __init__(self, model: HybridLM, rows: int, capacity: int, device: str, state_format: str = "fp32") -> None:
        self.model, self.device, self.capacity = model, device, capacity
        self.mixers = []
        for block in model.blocks:
            mixer = block.mixer
            if isinstance(mixer, Mamba2):
                self.mixers.append(_Mamba2Step(mixer, rows, device, state_format))
            elif isinstance(mixer, GatedDeltaNet):
                self.mixers.append(_GDNStep(mixer, rows, device, state_format))
            elif isinstance(mixer, Attention):
                self.mixers.append(_AttentionStep(mixer, rows, device, capacity))
            else:
                self.mixers.append(lambda h, position, mlp=mixer: mlp(h))
        self.ids = torch.full((rows, capacity), PAD, device=device)
        self.prompt = torch.zeros(rows, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def step(self) -> None:
        """Read the token at `position`, write the next one unless the prompt has it."""
        h = self.model.embedding(self.ids.index_select(1, self.position)[:, 0])
        for block, mixer in zip(self.model.blocks, self.mixers, strict=True):
            if isinstance(block, QwenBlock):
                h = h + mixer(block.input_layernorm(h), self.position)
                h = h + block.mlp(block.post_attention_layernorm(h))
            else:
                h = h + mixer(block.norm(h), self.position)
        best = self.model.logits(self.model.final_norm(h)).argmax(-1)
        after = self.position + 1
        given = self.ids.index_select(1, after)[:, 0]
        chosen = torch.where(after < self.prompt, given, best)
        self.ids.index_copy_(1, after, chosen[:, None])
        self.position.add_(1)

    def _program(self) -> object:
        """The step as a callable: a replayed CUDA graph, or the function itself."""
        if self.device == "cpu":
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for mixer in self.mixers:
            if isinstance(mixer, _Mamba2Step | _GDNStep):
                mixer.state.zero_()
                mixer.conv.past.zero_()
        self.position.zero_()
        return graph.replay

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Prompts and answers, each with its <|end|> if it came within `max_new_tokens`."""
        advance = self._program()
        rows = torch.full_like(self.ids, PAD, device="cpu")
        for i, p in enumerate(prompts):
            rows[i, : len(p)] = torch.tensor(p)
        self.ids.copy_(rows)
        lengths = [len(p) for p in prompts]
        self.prompt.copy_(torch.tensor(lengths))
        limit = min(self.capacity, max(lengths) + max_new_tokens) - 1
        for t in range(limit):
            advance()
            # Asking costs a synchronisation, so ask now and then.
            if t % 32 == 31 and t >= max(lengths) and bool((self.ids[:, : t + 2] == END).any(1).all()):
                break
        ids = self.ids.cpu().tolist()
        return [
            row[: row.index(END, n) + 1] if END in row[n:] else row[: n + max_new_tokens]
            for row, n in zip(ids, lengths, strict=True)
        ]


@torch.no_grad()
def draft_hits(model: HybridLM, ids: Tensor) -> Tensor:
    """Whether draft d of the chain that starts at p equals token p+1+d: bool [rows, T-2, MTP_DEPTH].

    ids [rows, T] must be the model's own greedy output. A draft counts only after correct ones, so
    feeding the true tokens gives every chain at once. Depth d attends, as an engine would, to depth 1
    up to where its chain starts and to its own chain after that.
    """
    tokens = ids.shape[1] - 2
    hidden = model.trunk(ids[:, :tokens], Rows(torch.zeros_like(ids[:, :tokens])))
    embedded = model.embedding(ids[:, 1:-1])
    index = torch.arange(tokens, device=ids.device)
    mtp, keys, values, hits = model.mtp, [], [], []
    for depth in range(MTP_DEPTH):
        if depth:
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        residual, h = mtp.enter(hidden, embedded)
        q, k, v, gate = mtp.attention.project(h, index)
        keys.append(k)
        values.append(v)
        masks = [index[None, :] <= index[:, None] - depth]
        for later in range(1, depth + 1):
            masks.append(index[None, :] == index[:, None] - (depth - later))
        y = F.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1), enable_gqa=True
        )
        hidden = mtp.leave(residual, mtp.attention.output(y, gate))
        hit = model.logits(hidden).argmax(-1) == ids[:, 2:]
        hits.append(F.pad(hit[:, depth:], (0, depth)))
    return torch.stack(hits, -1)


def count_verifies(hits: list[list[bool]], prompt: int, length: int) -> tuple[int, int]:
    """(tokens emitted by verify steps, verify steps) of one greedy answer ids[prompt:length].

    Prefill yields token `prompt`. Each verify step then takes that token and MTP_DEPTH drafts, and
    emits the accepted drafts and one token more, cut at the end of the answer.
    """
    at, steps = prompt, 0
    while at < length - 1:
        accepted = 0
        for hit in hits[at - 1]:
            if not hit:
                break
            accepted += 1
        at = min(length - 1, at + accepted + 1)
        steps += 1
    return max(0, length - 1 - prompt), steps
