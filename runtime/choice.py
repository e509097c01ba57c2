"""From a step's logits to the tokens that stand: sampling, accept rules and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from replayssm.runtime.errors import NOT_FINITE
from replayssm.runtime.requests import Request, TokenLogprob
from replayssm.runtime.sampling import Purpose, SamplingBatch, probabilities, sample, uniform
from replayssm.runtime.session import Row, StepResult
from replayssm.runtime.speculation import accept_matching, accept_rejection


class Choice(NamedTuple):
    """New tokens of a row, none while its prompt has chunks left. error: why the row cannot go on."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    error: str | None = None


_NOTHING = Choice()


def choose(
    requests: Sequence[Request], rows: Sequence[Row], result: StepResult, positions: Sequence[int]
) -> list[Choice]:
    """What each request's row yields. Logits that are not finite end their own row and no other.

    positions: of each row's first token.
    """
    targets, usable = result.chosen or _chosen(requests, rows, result, positions)
    all_usable = all(usable)
    choices = []
    for request, row, span, position in zip(requests, rows, result.logits_spans, positions, strict=True):
        if span.start == span.stop:
            choices.append(_NOTHING)
        elif not (all_usable or all(usable[span])):
            choices.append(Choice(error=NOT_FINITE))
        elif request.processor is not None:
            choices.append(_processed_choice(request, row, result, span, position))
        else:
            tokens = _accept(request, row, targets[span], lambda span=span: result.logits[span])
            choices.append(Choice(tokens, _logprobs(request, result, span, tokens)))
    return choices


def _chosen(
    requests: Sequence[Request], rows: Sequence[Row], result: StepResult, positions: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """(token, whether its logits are finite) behind each of the step's R wanted tokens."""
    owners = [
        (request, position + len(row.tokens) - (span.stop - span.start) + 1 + offset)
        for request, row, span, position in zip(requests, rows, result.logits_spans, positions, strict=True)
        for offset in range(span.stop - span.start)
    ]
    if not owners:
        return [], []
    logits = result.logits
    finite = logits.amax(dim=1).isfinite()
    if not bool(finite.all()):
        logits = logits.masked_fill(~finite[:, None], 0.0)
    batch = SamplingBatch(
        [request.params for request, _ in owners], [position for _, position in owners], logits.device
    )
    return sample(logits, batch).tolist(), finite.tolist()


def _processed_choice(request: Request, row: Row, result: StepResult, span: slice, position: int) -> Choice:
    """The choice from logits that the request's processor has changed, as sampling and accept rules see them."""
    logits = result.logits[span]
    try:
        changed = request.processor.process(logits, [] if request.plan else request.draft.tokens)
    except Exception as error:  # of a client's own making, perhaps: it must not end the step for the other rows
        return Choice(error=str(error) or type(error).__name__)
    count = logits.shape[0]
    first = position + len(row.tokens) - count + 1
    batch = SamplingBatch([request.params] * count, range(first, first + count), logits.device)
    tokens = _accept(request, row, sample(changed, batch).tolist(), lambda: changed)
    return Choice(tokens, _logprobs(request, result, span, tokens))


def _accept(request: Request, row: Row, targets: list[int], logits_of_row: Callable[[], torch.Tensor]) -> list[int]:
    if request.plan or len(row.tokens) == 1:
        return targets
    if request.draft.probs is None:
        return accept_matching(request.draft.tokens, targets)
    logits = logits_of_row()
    positions = range(len(request.tokens), len(request.tokens) + logits.shape[0])
    batch = SamplingBatch([request.params] * logits.shape[0], positions, logits.device)
    accept = uniform(batch.seeds, batch.positions, Purpose.ACCEPT)
    return accept_rejection(
        request.draft.tokens,
        request.draft.probs,
        probabilities(logits, batch),
        accept[:-1],
        batch.uniform(Purpose.TOKEN),
    )


def _logprobs(request: Request, result: StepResult, span: slice, tokens: Sequence[int]) -> list[TokenLogprob]:
    if request.logprobs is None:
        return []
    values = result.logits[span][: len(tokens)].float().log_softmax(dim=1)
    top = values.topk(min(request.logprobs, values.shape[1]), dim=1)
    return [
        TokenLogprob(token, float(values[index, token]), tuple(zip(ids, likeliest, strict=True)))
        for index, (token, ids, likeliest) in enumerate(
            zip(tokens, top.indices.tolist(), top.values.tolist(), strict=True)
        )
    ]
