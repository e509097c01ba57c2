"""Sampling: support and distribution of the filters, and randomness that no batch can change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from replayssm.runtime.errors import InferenceError
from replayssm.runtime.sampling import Purpose, SamplingBatch, SamplingParams, draw, probabilities, sample, uniform

VOCAB = 12


def logits_of(seed, rows=1, vocab=VOCAB):
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def expected_distribution(logits, params):
    """The filters one token at a time, in plain Python: the judge of the vectorised form."""
    values = logits.double().tolist()
    if params.temperature == 0:
        best = values.index(max(values))
        return [float(i == best) for i in range(len(values))]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if params.top_k:
        order = order[: params.top_k]
    weights = {i: math.exp((values[i] - max(values)) / params.temperature) for i in order}
    total = sum(weights.values())
    probs = {i: weight / total for i, weight in weights.items()}
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= params.top_p:
            break
        kept.append(i)
        mass += probs[i]
    kept = [i for i in kept if probs[i] >= params.min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(values))]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)


def test_uniform_depends_on_every_word_of_the_key():
    base = {"seed": 5, "position": 7, "purpose": 0}
    draws = set()
    for change in (
        {},
        {"seed": 6},
        {"seed": 5 + 2**40},
        {"seed": 2**64 - 1},
        {"position": 8},
        {"position": 7 + 2**33},
        {"purpose": 1},
    ):
        key = {**base, **change}
        batch = SamplingBatch([SamplingParams(seed=key["seed"])], [key["position"]])
        draws.add(float(batch.uniform(key["purpose"])))
    assert len(draws) == 7


def test_uniform_is_uniform():
    """Kolmogorov-Smirnov over positions and over seeds; the seeds are fixed, so the test either holds or does not."""
    count = torch.arange(20000)
    for seeds, positions in ((torch.zeros_like(count), count), (count, torch.zeros_like(count))):
        values = uniform(seeds, positions, Purpose.TOKEN)
        assert float(values.min()) >= 0.0
        assert float(values.max()) < 1.0
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.lists(params_strategy, min_size=1, max_size=5))
def test_probabilities_equal_the_plain_filters(seed, params):
    logits = logits_of(seed, len(params))
    result = probabilities(logits, SamplingBatch(params, range(len(params))))
    for row, (values, row_params) in enumerate(zip(logits, params, strict=True)):
        expected = expected_distribution(values, row_params)
        assert [p > 0 for p in result[row].tolist()] == [p > 0 for p in expected]
        # Logits are scaled by the temperature in fp32: relative error 2^-24 of exponents up to 12 / 0.3.
        assert result[row].tolist() == pytest.approx(expected, rel=2e-5, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.lists(params_strategy, min_size=1, max_size=5), st.integers(0, 10**6))
def test_samples_lie_in_the_support(seed, params, position):
    logits = logits_of(seed, len(params))
    batch = SamplingBatch(params, [position + row for row in range(len(params))])
    chosen = probabilities(logits, batch).gather(1, sample(logits, batch)[:, None])
    assert bool((chosen > 0).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.lists(params_strategy, min_size=2, max_size=6), st.randoms())
def test_a_row_does_not_depend_on_its_batch(seed, params, order):
    logits = logits_of(seed, len(params))
    positions = [13 * row for row in range(len(params))]
    together = sample(logits, SamplingBatch(params, positions)).tolist()
    shuffled = list(range(len(params)))
    order.shuffle(shuffled)
    again = sample(logits[shuffled], SamplingBatch([params[i] for i in shuffled], [positions[i] for i in shuffled]))
    assert again.tolist() == [together[i] for i in shuffled]
    for row, row_params in enumerate(params):
        alone = sample(logits[row : row + 1], SamplingBatch([row_params], positions[row : row + 1]))
        assert int(alone) == together[row]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05}],
)
def test_distribution(params):
    """Chi-square of 20,000 draws at level 1e-3. It detects (power above 0.99) a token whose probability is off by 0.02
    of 0.2: non-centrality 20000 * 0.02^2 / 0.2 = 40 against a critical value of about 31 for 11 degrees of freedom."""
    count = 20000
    logits = logits_of(3)
    batch = SamplingBatch([SamplingParams(seed=9, **params)] * count, range(count))
    counts = torch.bincount(sample(logits.expand(count, -1), batch), minlength=VOCAB).double()
    expected = torch.tensor(expected_distribution(logits[0], SamplingParams(**params)), dtype=torch.float64)
    support = expected > 0
    assert int(counts[~support].sum()) == 0
    assert stats.chisquare(counts[support], (expected * count)[support]).pvalue > 1e-3


def test_greedy_takes_the_first_of_equals_and_ignores_filters():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.1, min_p=0.5, seed=4)):
        assert int(sample(logits, SamplingBatch([params], [0]))) == 1
    mixed = SamplingBatch([SamplingParams(), SamplingParams(temperature=1.0)], [0, 1])
    assert int(sample(logits.expand(2, -1), mixed)[0]) == 1


def test_top_k_one_and_tiny_temperature_are_greedy():
    logits = logits_of(1, 4)
    for params in (SamplingParams(temperature=5.0, top_k=1), SamplingParams(temperature=1e-30)):
        assert torch.equal(sample(logits, SamplingBatch([params] * 4, range(4))), logits.argmax(dim=1))


@pytest.mark.parametrize("vocab", [5, 512, 700, 2600])
def test_plain_draws_cover_the_vocabulary(vocab):
    """Of one block and of several: a known uniform number leads to a known token, but for rounding at its edges."""
    logits = logits_of(7, vocab=vocab)
    for params in (SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.2, min_p=0.2, seed=4)):
        batch = SamplingBatch([params] * 400, range(400))
        assert batch.kind == "plain"
        tokens = sample(logits.expand(400, -1), batch)
        edges = torch.tensor(expected_distribution(logits[0], params), dtype=torch.float64).cumsum(0)
        uniforms = batch.uniform(Purpose.TOKEN)
        low, high = torch.where(tokens > 0, edges[tokens - 1], 0.0), edges[tokens]
        # Weights are rounded to fp32 one by one, and their sums to fp64.
        assert bool((low - 1e-6 <= uniforms).all())
        assert bool((uniforms <= high + 1e-6).all())
        assert len(tokens.unique()) > 3 or params.min_p


def test_kinds():
    kinds = [({}, "greedy"), ({"top_k": 3}, "greedy"), ({"temperature": 1.0, "min_p": 0.1}, "plain")]
    kinds += [({"temperature": 1.0, "top_k": 3}, "ranked"), ({"temperature": 0.5, "top_p": 0.9}, "ranked")]
    params = [SamplingParams(**options) for options, _ in kinds]
    assert [row.kind for row in params] == [kind for _, kind in kinds]
    assert SamplingBatch(params[:2], [0, 1]).kind == "greedy"
    assert SamplingBatch(params[:3], [0, 1, 2]).kind == "plain"
    assert SamplingBatch(params, range(5)).kind == "ranked"


def test_masked_logits_are_never_drawn():
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2] = -50.0
    batch = SamplingBatch([SamplingParams(temperature=2.0)], [0])
    assert int(sample(logits, batch)) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_logits_are_reported(value):
    logits = logits_of(0, 2)
    logits[1, 3] = value
    with pytest.raises(InferenceError, match="not finite"):
        sample(logits, SamplingBatch([SamplingParams()] * 2, [0, 1]))


def test_draw_at_the_edges():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for value, expected in ((0.0, 1), (0.2499999, 1), (0.25, 3), (1.0 - 2**-53, 3), (1.0, 3)):
        assert int(draw(probs, torch.tensor([value], dtype=torch.float64))) == expected
    # Not normalised, and u * total rounds to total.
    assert int(draw(probs * 1e-300, torch.tensor([1.0 - 2**-53], dtype=torch.float64))) == 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_invalid_parameters(params):
    with pytest.raises(ValueError, match=f"{next(iter(params))} must be"):
        SamplingParams(**params)
