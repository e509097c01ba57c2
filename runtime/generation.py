"""Generation for a list of prompts, batched continuously over a session's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replayssm.plugins.integers import short
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.requests import Request, Update
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import Drafter


@dataclass(frozen=True)
class GenerationResult:
    """Output for one prompt.

    token_ids: generated tokens, with the end token if one was generated. text: decoded without special tokens and
        without the stop string; None without a tokenizer.
    finish_reason: "stop" (end token or stop string) or "length" (max_new_tokens or the engine's max_seq_len).
    acceptance_length: mean tokens per verify or decode call; None where the prompt's own logits gave all of them.
    timing: prefill_s (admission to first token), decode_s (first to last token), tokens_per_s while decoding.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_length: float | None
    timing: dict[str, float | None]


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    drafter: Drafter | None = None,
    draft_len: int | None = None,
    *,
    eos_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    on_tokens: Callable[[int, list[int], str | None], None] | None = None,
) -> list[GenerationResult]:
    """Continue every prompt; any number of prompts shares the session's free slots.

    prompts: token ids. sampling: one for all, or one per prompt; None is greedy.
    drafter, draft_len: speculation with up to draft_len tokens; None takes the engine's max_draft_len.
    eos_token_ids: tokens that end a sequence; None takes the checkpoint's, () ignores them.
    stop: strings that end a sequence; these and result texts need `tokenizer`.
    on_tokens: called with the prompt's index, its new tokens and the text that became final (None without tokenizer).

    Raises ValueError before anything runs if a prompt is empty, too long or not of this vocabulary, and
    InferenceError if the model's logits are not finite or an operator refuses a row.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, str | int) for prompt in prompts):
        raise ValueError(
            "expected a list of prompts, each a list of token ids, such as [engine.tokenizer(text)['input_ids']], got "
            f"{short(prompts)}"
        )
    scheduler = Scheduler(session, drafter, SchedulerOptions(draft_len=draft_len))
    params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
    if len(params) != len(prompts):
        raise ValueError(f"expected one SamplingParams per prompt ({len(prompts)}), got {len(params)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")

    errors: list[str] = []

    def report(index: int, request: Request, update: Update) -> None:
        if request.error is not None:
            errors.append(request.error)
        elif on_tokens is not None and update.finish_reason != "cancelled":
            on_tokens(index, list(update.tokens), update.text)

    requests = [
        Request.create(
            session,
            prompt,
            max_new_tokens,
            params[index],
            name=f"prompt {index + 1} of {len(prompts)}",
            end_tokens=eos_token_ids,
            tokenizer=tokenizer,
            stop=stop,
            on_update=partial(report, index),
        )
        for index, prompt in enumerate(prompts)
    ]
    if requests and not session.free_slots:
        raise ValueError(f"all {session.slots} slots of the session are in use: free one first")
    for request in requests:
        scheduler.submit(request)
    try:
        while not errors and scheduler.step():
            pass
    finally:
        scheduler.close()
    if errors:
        raise InferenceError(errors[0])
    return [_result(request) for request in requests]


def _result(request: Request) -> GenerationResult:
    count, decode_s = request.generated_count, request.last - request.first
    return GenerationResult(
        prompt_token_ids=request.prompt,
        token_ids=request.generated,
        text=request.text,
        finish_reason=request.finish_reason,
        acceptance_length=request.acceptance_length,
        timing={
            "prefill_s": request.first - request.admitted,
            "decode_s": decode_s,
            "tokens_per_s": (count - 1) / decode_s if count > 1 and decode_s > 0 else None,
        },
    )
