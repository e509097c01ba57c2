"""Draft heads against plain PyTorch written from the published weights' names (transformers has no such module).

The head reads, at position p, the token of position p + 1 and the hidden state of position p; a recursion feeds its own
hidden state and its own token back at the next position.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

LAYOUTS = ("nano", "super", "qwen", "qwen_moe", "qwen_vl")
LENGTH = 40


class PlainHead:
    """Both heads over whole sequences, in float64, from on-disk names and config.json alone."""

    def __init__(self, model) -> None:
        config = json.loads((model.directory / "config.json").read_text())
        self.qwen = "qwen" in config["model_type"]
        self.config = config.get("text_config", config)
        self.tied = config.get("tie_word_embeddings", False)
        self.weights = {name: model.checkpoint.tensor(name).double() for name in model.checkpoint.names}

    def __call__(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, vocab] and hidden [T, hidden] of tokens ids [T] and hidden states [T, hidden]."""
        w = self.weights
        if self.qwen:
            embedding = self.norm(w["embed_tokens.weight"][ids], "mtp.pre_fc_norm_embedding")
            x = torch.cat([embedding, self.norm(hidden, "mtp.pre_fc_norm_hidden")], -1) @ w["mtp.fc.weight"].T
            x = x + self.qwen_attention(self.norm(x, "mtp.layers.0.input_layernorm"))
            x = x + self.feed_forward(self.norm(x, "mtp.layers.0.post_attention_layernorm"), "mtp.layers.0.mlp.")
            x = self.norm(x, "mtp.norm")
        else:
            first = "mtp.layers.0."
            embedding = self.norm(w["embeddings.weight"][ids], f"{first}enorm")
            x = torch.cat([embedding, self.norm(hidden, f"{first}hnorm")], -1) @ w[f"{first}eh_proj.weight"].T
            x = x + self.nemotron_attention(self.norm(x, f"{first}norm"))
            x = x + self.feed_forward(self.norm(x, "mtp.layers.1.norm"), "mtp.layers.1.mixer.")
            x = self.norm(x, "mtp.layers.1.final_layernorm")
        return x @ w["embed_tokens.weight" if self.tied else "lm_head.weight"].T, x

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"] + (1 if self.qwen else 0)
        return x / (x.pow(2).mean(-1, keepdim=True) + (1e-6 if self.qwen else 1e-5)).sqrt() * weight

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, hd], k and v [T, Hkv, hd]; every group of query heads shares a key head."""
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
        return out[0].transpose(0, 1)

    def heads(self, x: torch.Tensor, name: str, width: int | None = None) -> torch.Tensor:
        return (x @ self.weights[f"{name}.weight"].T).unflatten(-1, (-1, width or self.config["head_dim"]))

    def nemotron_attention(self, x: torch.Tensor) -> torch.Tensor:
        prefix = "mtp.layers.0.mixer."
        q, k, v = (self.heads(x, f"{prefix}{name}_proj") for name in "qkv")
        return self.attention(q, k, v).flatten(1) @ self.weights[f"{prefix}o_proj.weight"].T

    def qwen_attention(self, x: torch.Tensor) -> torch.Tensor:
        prefix, width = "mtp.layers.0.self_attn.", self.config["head_dim"]
        q = self.heads(x, f"{prefix}q_proj", 2 * width)
        q, gate = q[..., :width], q[..., width:]
        k, v = self.heads(x, f"{prefix}k_proj"), self.heads(x, f"{prefix}v_proj")
        q, k = (self.rotate(self.norm(t, f"{prefix}{name}_norm")) for t, name in ((q, "q"), (k, "k")))
        return (self.attention(q, k, v) * gate.sigmoid()).flatten(1) @ self.weights[f"{prefix}o_proj.weight"].T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Complex form of the rotation: entry i and entry i + dim / 2 are a complex number."""
        dim = int(self.config["head_dim"] * self.config["rope_parameters"]["partial_rotary_factor"])
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequency = (1 / self.config["rope_parameters"]["rope_theta"] ** exponent).double()
        turn = torch.polar(torch.ones(()).double(), torch.arange(len(x)).double()[:, None] * frequency)[:, None]
        rotated = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim]) * turn
        return torch.cat([rotated.real, rotated.imag, x[..., dim:]], -1)

    def feed_forward(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if f"{prefix}gate.weight" not in self.weights:
            return self.mlp(x, prefix)
        return torch.stack([self.qwen_moe(row, prefix) if self.qwen else self.nemotron_moe(row, prefix) for row in x])

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        up, down = (self.weights[f"{prefix}{name}_proj.weight"] for name in ("up", "down"))
        if not self.qwen:
            return (x @ up.T).clamp(min=0).pow(2) @ down.T
        gate = x @ self.weights[f"{prefix}gate_proj.weight"].T
        return (gate * gate.sigmoid() * (x @ up.T)) @ down.T

    def qwen_moe(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        probability = (self.weights[f"{prefix}gate.weight"] @ x).softmax(-1)
        chosen = probability.argsort(descending=True)[: self.config["num_experts_per_tok"]]
        total = sum(probability[e] * self.mlp(x, f"{prefix}experts.{e}.") for e in chosen.tolist())
        gate = (self.weights[f"{prefix}shared_expert_gate.weight"] @ x).sigmoid()
        return total / probability[chosen].sum() + gate * self.mlp(x, f"{prefix}shared_expert.")

    def nemotron_moe(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        score = (self.weights[f"{prefix}gate.weight"] @ x).sigmoid()
        corrected = score + self.weights[f"{prefix}gate.e_score_correction_bias"]
        chosen = corrected.argsort(descending=True)[: self.config["num_experts_per_tok"]]
        latent = self.weights[f"{prefix}fc1_latent_proj.weight"] @ x
        total = sum(score[e] * self.mlp(latent, f"{prefix}experts.{e}.") for e in chosen.tolist())
        total = total * self.config["routed_scaling_factor"] / score[chosen].sum()
        return self.weights[f"{prefix}fc2_latent_proj.weight"] @ total + self.mlp(x, f"{prefix}shared_experts.")


@pytest.fixture(scope="module")
def sequence(tiny_model):
    """`sequence(name)` -> (token ids [T + 1], the model's hidden states [T, hidden] after its final norm)."""
    made: dict[str, tuple] = {}

    def make(name: str):
        if name not in made:
            model = tiny_model(name)
            generator = torch.Generator().manual_seed(5)
            ids = torch.randint(3, model.config.vocab_size, (LENGTH + 1,), generator=generator)
            made[name] = ids, model.oracle.hidden_states(ids[None, :LENGTH])[0]
        return made[name]

    return make


def settings(**extra) -> dict:
    return {"dtype": "float64", "u_format": "exact", "state_dtype": "float64", "max_window": 3, **extra}


@pytest.mark.parametrize("name", LAYOUTS)
def test_model_returns_hidden_states_after_the_final_norm(tiny_model, sequence, name):
    """float64 beside transformers in float64: sums in another order."""
    ids, hidden = sequence(name)
    (output,) = tiny_model(name).driver(**settings()).run([(2, 0, ids[:LENGTH])])
    torch.testing.assert_close(output["hidden_states"], hidden, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_head_agrees_with_plain_pytorch(tiny_model, sequence, name):
    """A prefill, then single tokens; fp64, so 1e-11 leaves room for the order of sums alone."""
    ids, hidden = sequence(name)
    model = tiny_model(name)
    logits, hidden_states = PlainHead(model)(ids[1:], hidden)
    driver = model.driver(head="mtp", **settings())
    outputs = [driver.run([(4, 0, ids[1:30], hidden[:29])])[0]]
    outputs += [driver.run([(4, p, ids[p + 1 : p + 2], hidden[p : p + 1])])[0] for p in range(29, LENGTH)]
    torch.testing.assert_close(torch.cat([o["logits"] for o in outputs]), logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.cat([o["hidden_states"] for o in outputs]), hidden_states, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", LAYOUTS)
def test_recursion_and_its_rollback(tiny_model, sequence, name):
    """Three recursions beyond position 20, then the real tokens over them: drafts leave no trace in the cache."""
    ids, hidden = sequence(name)
    model = tiny_model(name)
    plain, driver = PlainHead(model), model.driver(head="mtp", **settings())
    (output,) = driver.run([(1, 0, ids[1:21], hidden[:20])])
    own_ids, own_hidden = ids[1:21], hidden[:20]
    for position in range(20, 23):
        logits, states = plain(own_ids, own_hidden)
        torch.testing.assert_close(output["logits"][-1], logits[-1], rtol=0, atol=1e-11)
        draft = logits[-1:].argmax(-1)
        own_ids, own_hidden = torch.cat([own_ids, draft]), torch.cat([own_hidden, states[-1:]])
        (output,) = driver.run([(1, position, draft, output["hidden_states"][-1:])])
    torch.testing.assert_close(output["logits"][-1], plain(own_ids, own_hidden)[0][-1], rtol=0, atol=1e-11)

    (output,) = driver.run([(1, 20, ids[21:24], hidden[20:23])])
    logits, _ = plain(ids[1:24], hidden[:23])
    torch.testing.assert_close(output["logits"], logits[20:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", LAYOUTS)
def test_head_shares_the_embedding_and_output_weights(tiny_model, name):
    networks, _ = tiny_model(name).engine("float32")
    config = tiny_model(name).config
    shared = set(networks.main.weights) & set(networks.mtp.weights)
    assert shared == {config.embedding_name, config.lm_head_name}
    layers = [spec.layer for network in (networks.main, networks.mtp) for spec in network.states.values()]
    recurrent = [layer for layer in layers if layer < len(config.layers)]
    assert min(set(layers) - set(recurrent)) == len(config.layers)
