"""The training networks: documents do not mix, decoding equals training, transformers agrees."""

import pytest
import torch

from examples import decode, export, networks
from examples.model import Rows

NAMES = list(networks.LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_do_not_see_each_other(tiny_networks, name):
    model = tiny_networks(name).double()
    first, second = torch.randint(5, 700, (1, 40)), torch.randint(5, 700, (1, 37))
    packed = torch.cat((first, second), 1)
    segment = torch.tensor([[0] * 40 + [1] * 37])
    with torch.no_grad():
        together = model(packed, segment)
        alone = torch.cat((model(first), model(second)), 1)
    # Rotary angles are fp32, and a packed document stands at other positions.
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_repeats_the_parallel_form(tiny_networks, name):
    model = tiny_networks(name).requires_grad_(False)
    torch.manual_seed(3)
    prompts = [[1, 3, *torch.randint(5, 700, (n,)).tolist(), 4] for n in (9, 20, 14)]
    outputs = decode.Decoder(model, 3, 64, "cpu").generate(prompts, 30)
    for output, prompt in zip(outputs, prompts, strict=True):
        best = model(torch.tensor([output])).argmax(-1)[0].tolist()
        assert best[len(prompt) - 1 : -1] == output[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_draft_hits_equal_explicit_chains(tiny_networks, name):
    """All chains at once, against running the head step by step as an engine does."""
    model = tiny_networks(name).double().requires_grad_(False)
    torch.manual_seed(4)
    ids = torch.randint(5, 700, (1, 18))
    tokens = ids.shape[1] - 2
    hidden = model.trunk(ids[:, :tokens], Rows(torch.zeros(1, tokens, dtype=torch.long)))
    best = []
    for start in range(tokens - networks.MTP_DEPTH):
        h = hidden[:, : start + 1]
        for depth in range(networks.MTP_DEPTH):
            embedded = model.embedding(ids[:, 1 : start + 2 + depth])
            out = model.mtp(h, embedded, Rows(torch.zeros(1, h.shape[1], dtype=torch.long)))
            best.append((start, depth, model.logits(out[:, -1]).argmax(-1).item()))
            h = torch.cat((h, out[:, -1:]), 1)
    # Put each chain's own choice where its hit is looked up, one choice at a time.
    for start, depth, token in best[:: networks.MTP_DEPTH]:
        changed = ids.clone()
        changed[0, start + 2 + depth] = token
        assert decode.draft_hits(model, changed)[0, start, depth]
    expected = torch.zeros(tokens, networks.MTP_DEPTH, dtype=torch.bool)
    for start, depth, token in best:
        expected[start, depth] = token == ids[0, start + 2 + depth]
    rows = tokens - networks.MTP_DEPTH
    assert torch.equal(decode.draft_hits(model, ids)[0, :rows], expected[:rows])


def test_counting_verify_steps():
    yes, no = [True] * 3, [False] * 3
    half = [True, False, True]
    # Prompt 2, answer tokens 2..7: the first comes from prefill, five from verify steps.
    assert decode.count_verifies([no, yes, no, no, no, no, no, no], 2, 8) == (5, 2)
    assert decode.count_verifies([no] * 8, 2, 8) == (5, 5)
    assert decode.count_verifies([half] * 8, 2, 8) == (5, 3)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_gives_the_same_logits(tiny_networks, name, tmp_path):
    """fp32 on both sides; the bound is some hundred roundings of values of about 10."""
    transformers = pytest.importorskip("transformers")
    model = tiny_networks(name)
    export.export(model, None, tmp_path, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for layer in theirs.model.layers:
        if hasattr(getattr(layer, "mixer", None), "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    ids = torch.randint(5, 700, (2, 150))
    with torch.no_grad():
        assert (model(ids) - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_export_and_load_are_inverse(tiny_networks, name, tmp_path, monkeypatch):
    model = tiny_networks(name)
    config = model.c
    export.export(model, None, tmp_path)
    monkeypatch.setitem(networks.LAYOUTS, name, lambda: type(model)(config))
    loaded = export.load(tmp_path, name)
    for (key, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p.bfloat16().float(), q), key
    half = export.load(tmp_path, name, torch.bfloat16)
    wide = [k for k, p in half.named_parameters() if p.dtype == torch.float32]
    assert wide
    assert all(k.endswith(export.WIDE_PARAMETERS) for k in wide)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8"])
def test_state_formats_round(name):
    state = torch.randn(2, 3, 8, 8)
    error = (decode.round_state(state, name) - state).abs().max() / state.abs().max()
    # Half a step of 24, 8, 11 and 4 significand bits.
    assert error <= {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4}[name] * 1.01
    with pytest.raises(ValueError, match="fp32, bf16, fp16 or fp8"):
        decode.round_state(state, "fp4")
