"""Accept rules keep the model's distribution; n-gram drafts are the most recent longest match."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from replayssm.runtime.sampling import Purpose, SamplingBatch, SamplingParams, draw, sample
from replayssm.runtime.speculation import DraftRequest, NgramDrafter, accept_matching, accept_rejection

tokens_strategy = st.lists(st.integers(0, 2), max_size=6)


@given(tokens_strategy, st.data())
def test_matching_keeps_the_longest_agreeing_prefix(drafts, data):
    targets = data.draw(st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    kept = accept_matching(drafts, targets)
    agreeing = len(kept) - 1
    assert kept == targets[: agreeing + 1]
    assert drafts[:agreeing] == targets[:agreeing]
    assert agreeing == len(drafts) or drafts[agreeing] != targets[agreeing]


def test_matching_needs_one_more_target():
    with pytest.raises(ValueError, match="expected 3 target tokens, got 2"):
        accept_matching([1, 2], [1, 2])


def distributions(seed, rows, vocab):
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(rows, vocab, generator=generator)).double().softmax(dim=1)


def speculate(method, draft_probs, target_probs, trials):
    """The tokens of one verify window per trial; drafts are drawn with draws of their own."""
    count = draft_probs.shape[0]
    seeds = [trial for trial in range(trials) for _ in range(count + 1)]
    batch = SamplingBatch(
        [SamplingParams(temperature=1.0, seed=seed) for seed in seeds], list(range(count + 1)) * trials
    )
    draft, accept, token = (batch.uniform(p).view(trials, -1) for p in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.TOKEN))
    drafts = draw(draft_probs.repeat(trials, 1), draft[:, :count].reshape(-1)).view(trials, -1).tolist()
    if method == "matching":
        targets = sample(target_probs.log().repeat(trials, 1), batch).view(trials, -1).tolist()
        return [accept_matching(*pair) for pair in zip(drafts, targets, strict=True)]
    return [
        accept_rejection(drafts[trial], draft_probs, target_probs, accept[trial, :count], token[trial])
        for trial in range(trials)
    ]


@pytest.mark.parametrize("method", ["matching", "rejection"])
def test_speculation_keeps_the_distribution(method):
    """First and second tokens of 6000 windows against p, by chi-square at level 1e-3. With 4 degrees of freedom
    (critical value 18.5) a probability off by 0.03 of 0.2 is found with power above 0.9: non-centrality
    6000 * 0.03^2 / 0.2 = 27. A wrong rule, such as taking q's draft always, is off by far more."""
    vocab, trials = 5, 6000
    q, p = distributions(1, 2, vocab), distributions(2, 3, vocab)
    first, second, lengths = torch.zeros(vocab), torch.zeros(vocab), []
    for tokens in speculate(method, q, p, trials):
        lengths.append(len(tokens))
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    assert stats.chisquare(first, p[0] * trials).pvalue > 1e-3
    assert stats.chisquare(second, p[1] * float(second.sum())).pvalue > 1e-3
    # The chance that a draft stands is what each rule promises; 4 standard deviations of a binomial proportion.
    stands = float(torch.minimum(p[0], q[0]).sum() if method == "rejection" else (p[0] * q[0]).sum())
    observed = sum(length > 1 for length in lengths) / trials
    assert observed == pytest.approx(stands, abs=4 * (stands * (1 - stands) / trials) ** 0.5)


def test_rejection_accepts_everything_where_the_drafter_is_the_model():
    p = distributions(0, 4, 7)
    assert {len(tokens) for tokens in speculate("rejection", p[:3], p, 50)} == {4}


def test_rejection_never_yields_what_the_model_excludes():
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.0, 0.4, 0.6], [0.0, 0.0, 1.0]], dtype=torch.float64)
    outcomes = {tuple(tokens) for tokens in speculate("rejection", q, p, 200)}
    assert outcomes == {(1, 2), (2,)}


def test_rejection_checks_shapes():
    p = distributions(0, 2, 3)
    with pytest.raises(ValueError, match="2 drafts need 2 draft and 3 target distributions, got 2 and 2"):
        accept_rejection([0, 1], p, p, torch.zeros(2), torch.zeros(3))


def plain_lookup(tokens, count, max_ngram, min_ngram):
    """Prompt lookup by searching the whole sequence: the judge of the incremental index."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                copy = list(tokens)
                for offset in range(count):
                    copy.append(copy[start + size + offset])
                return copy[len(tokens) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(1, 4), max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_ngram_lookup_while_the_sequence_grows(tokens, growth, count, max_ngram, min_ngram):
    min_ngram = min(min_ngram, max_ngram)
    drafter = NgramDrafter(max_ngram, min_ngram)
    lengths = [max(1, len(tokens) - sum(growth[i:])) for i in range(len(growth))] + [len(tokens)]
    for length in sorted(lengths):
        known = tokens[:length]
        (draft,) = drafter.draft([DraftRequest(3, known, count)])
        assert draft.probs is None
        assert draft.tokens == plain_lookup(known, count, max_ngram, min_ngram)


def test_ngram_prefers_longer_then_more_recent():
    def propose(tokens, **options):
        return NgramDrafter(**options).draft([DraftRequest(0, tokens, 2)])[0].tokens

    assert propose([1, 2, 7, 7, 9, 2, 8, 8, 1, 2]) == [7, 7]
    assert propose([1, 2, 7, 7, 9, 2, 8, 8, 1, 2], max_ngram=1) == [8, 8]
    assert propose([5, 6, 5, 6, 5]) == [6, 5]
    assert propose([1, 2, 3]) == []
    assert propose([4]) == []


def test_ngram_slots_are_separate_and_forgotten():
    drafter = NgramDrafter()
    drafter.draft([DraftRequest(0, [1, 2, 1], 1), DraftRequest(1, [3, 4, 3], 1)])
    drafter.release(0)
    drafter.release(0)
    drafts = drafter.draft([DraftRequest(0, [5, 1], 1), DraftRequest(1, [3, 4, 3, 4], 1)])
    assert [draft.tokens for draft in drafts] == [[], [3]]
    with pytest.raises(ValueError, match="min_ngram <= max_ngram"):
        NgramDrafter(max_ngram=1, min_ngram=2)
