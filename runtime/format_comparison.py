"""State formats compared on a user's own model and prompts; `format_verdict` says what to make of the figures.

Every format reads the tokens that float32 chooses greedily, so that each position compares two predictions after the
same text: how often the most likely token differs, and by how much the distributions do. Where the data has answers,
each format also writes its own, and right answers are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from replayssm.plugins import traffic
from replayssm.plugins.contract import state_parts
from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.engine import Engine
from replayssm.runtime.format_verdict import FormatResult, paired_bound, upper_bound
from replayssm.runtime.generation import generate
from replayssm.runtime.json_lines import read_json_lines
from replayssm.runtime.session import Row, Session
from replayssm.runtime.text import encode_chat, encode_text

REFERENCE = "float32"
_STOCHASTIC = {"state_rounding": "stochastic"}
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"state_dtype": "float32"},
    "float16": {"state_dtype": "float16"},
    "float16-stochastic": {"state_dtype": "float16", **_STOCHASTIC},
    "float8-stochastic": {"state_dtype": "float8", **_STOCHASTIC},
    "float16-stochastic+float8": {"state_dtype": "float16", "readout_dtype": "float8", **_STOCHASTIC},
    "float16-stochastic+nvfp4": {"state_dtype": "float16", "readout_dtype": "nvfp4", **_STOCHASTIC},
    "float8-stochastic+nvfp4": {"state_dtype": "float8", "readout_dtype": "nvfp4", **_STOCHASTIC},
}
"""Name -> fields of `ReplaySettings`; what stands behind + is the readout."""

Progress = Callable[[str, int], None]
"""Hears what is running, and how many more problems are done."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and the answer that a right text ends in, if one is known."""

    prompt: list[int]
    answer: str | None = None


@dataclass
class _Tally:
    """Counts of one format by problem."""

    tokens: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    right: dict[int, bool] = field(default_factory=dict)
    cut_off: int = 0
    out_of_room: int = 0


def read_problems(path: Path, tokenizer: Any, chat: bool = False, limit: int = 0) -> list[Problem]:
    """The first `limit` problems of a file of JSON lines, all for 0: `{"prompt": str}` or `{"messages": [...]}`, and
    `"answer": str` where known. chat: prompts are a user's messages. ValueError, naming the line, for anything else."""
    example = '{"prompt": "...", "answer": "..."}'
    problems = read_json_lines(path, lambda value: _parse(value, tokenizer, chat), limit, example)
    if not problems:
        raise ValueError(f"{path} holds no problems: expected lines such as {example}")
    return problems


def _parse(value: dict[str, Any], tokenizer: Any, chat: bool) -> Problem:
    prompt, messages, answer = value.get("prompt"), value.get("messages"), value.get("answer")
    if (
        (prompt is None) == (messages is None)
        or not isinstance(prompt, str | None)
        or not isinstance(answer, str | None)
    ):
        raise ValueError(
            "expected either a text prompt or messages, and as answer a text or nothing; got the keys "
            f"{', '.join(value) or 'none'}"
        )
    if prompt is not None and chat:
        messages = [{"role": "user", "content": prompt}]
    if messages is None:
        tokens = encode_text(tokenizer, prompt)
        if not tokens:
            raise ValueError("the prompt is empty: it needs at least one token")
        return Problem(tokens, answer)
    if not tokenizer.chat_template:
        raise ValueError("the checkpoint has no chat template: give prompts as text, without --chat")
    return Problem(encode_chat(tokenizer, messages), answer)


def is_right(text: str, answer: str) -> bool:
    """Whether `text` ends in `answer`; white space and a full stop at the end do not count."""
    return text.strip().rstrip(".").rstrip().endswith(answer.strip().rstrip("."))


def candidates(engine: Engine, names: Sequence[str] = tuple(FORMATS)) -> dict[str, ReplaySettings]:
    """Settings by format, float32 first. Formats that the engine's layers or settings refuse are left out, unless there
    is nothing else. ValueError for unknown names and engines of plans, whose formats are compiled in."""
    if engine.has_plans:
        raise ValueError("plans have their state format compiled in: calibrate an engine of target torch")
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    plain = {"state_rounding": "nearest", "rounding_seed": 0, "readout_dtype": "same", "u_source": "readout"}
    plain["readout_layers"] = ()
    found, refused = {}, ""
    for name in dict.fromkeys((REFERENCE, *names)):
        try:
            settings = replace(engine.manifest.replay, **{**plain, **FORMATS[name]}).with_u_format()
            for state in engine.networks["main"].states.values():
                state_parts(state.geometry, state.settings(settings))
        except ValueError as error:
            refused = str(error)
            continue
        found[name] = settings
    if len(found) < 2:
        raise ValueError(f"no format is left to compare with {REFERENCE}: {refused or 'name at least one'}")
    return found


def compare(
    engine: Engine,
    problems: Sequence[Problem],
    formats: Mapping[str, ReplaySettings],
    device: torch.device | str = "cpu",
    slots: int = 4,
    max_new_tokens: int = 256,
    progress: Progress = lambda what, done: None,
) -> list[FormatResult]:
    """One result per format, float32 first. `slots` problems run at once, in as many slots for every format.

    Raises ValueError for prompts that do not fit the engine.
    """
    limit = engine.manifest.replay.max_seq_len
    longest = max(len(problem.prompt) for problem in problems)
    if longest + 2 > limit:
        raise ValueError(
            f"a prompt of {longest} tokens does not fit the engine's max_seq_len {limit}: leave it out, or "
            f"{engine.how_to_lengthen}"
        )
    slots = min(slots, len(problems), engine.manifest.limits.max_batch_size)
    sessions = {
        name: Session(replace(engine, manifest=replace(engine.manifest, replay=settings)), slots, device)
        for name, settings in formats.items()
    }
    tallies = {name: _Tally() for name in formats}
    for start in range(0, len(problems), slots):
        group = problems[start : start + slots]
        texts = _follow(engine, sessions, group, max_new_tokens, tallies, progress)
        _answer(engine, sessions, group, start, texts, max_new_tokens, tallies, progress)
        progress("", len(group))
    for session in sessions.values():
        session.close()
    return [_result(engine, name, settings, tallies) for name, settings in formats.items()]


@torch.no_grad()
def _follow(
    engine: Engine,
    sessions: Mapping[str, Session],
    group: Sequence[Problem],
    max_new_tokens: int,
    tallies: Mapping[str, _Tally],
    progress: Progress,
) -> list[list[int]]:
    """float32's greedy tokens for a group; every format reads them and is compared at each."""
    slots = {name: [session.allocate() for _ in group] for name, session in sessions.items()}
    for tally in tallies.values():
        for values in (tally.tokens, tally.other, tally.kl):
            values += [0] * len(group)
    outputs: list[list[int]] = [[] for _ in group]
    progress("prompts", 0)
    logits = {name: _read_prompts(session, slots[name], group) for name, session in sessions.items()}
    running = list(range(len(group)))
    ends, limit = set(engine.end_token_ids), engine.manifest.replay.max_seq_len
    while running:
        progress(f"token {len(outputs[running[0]]) + 1} of at most {max_new_tokens}", 0)
        reference = logits[REFERENCE].float().log_softmax(-1)
        chosen = reference.argmax(-1)
        for name, tally in tallies.items():
            predicted = logits[name].float().log_softmax(-1)
            other = (predicted.argmax(-1) != chosen).tolist()
            kl = (reference.exp() * (reference - predicted)).sum(-1).tolist()
            for row, index in enumerate(running):
                at = index - len(group)
                tally.tokens[at] += 1
                tally.other[at] += other[row]
                tally.kl[at] += kl[row]
        tokens = chosen.tolist()
        for row, index in enumerate(running):
            outputs[index].append(tokens[row])
        # The last token of a sequence is not read any more.
        going = [
            index
            for row, index in enumerate(running)
            if tokens[row] not in ends
            and len(outputs[index]) < max_new_tokens
            and len(group[index].prompt) + len(outputs[index]) < limit
        ]
        if going:
            last = [outputs[index][-1] for index in going]
            logits = {
                name: session.decode([slots[name][index] for index in going], last)
                for name, session in sessions.items()
            }
        running = going
    for name, session in sessions.items():
        for slot in slots[name]:
            session.free(slot)
    return outputs


def _read_prompts(session: Session, slots: Sequence[int], group: Sequence[Problem]) -> torch.Tensor:
    """Prefill all prompts of a group, a chunk of each at a time; logits [len(group), vocab] of their last tokens."""
    left = {slot: list(problem.prompt) for slot, problem in zip(slots, group, strict=True)}
    plans = {slot: session.prefill_plan(tokens) for slot, tokens in left.items()}
    logits: dict[int, torch.Tensor] = {}
    while left:
        rows = []
        for slot, tokens in left.items():
            length = plans[slot].pop(0)
            rows.append(Row(slot, tokens[:length], "none" if plans[slot] else "last"))
            left[slot] = tokens[length:]
        result = session.step(rows)
        most = session.settings.max_window
        session.advance({row.slot: len(row.tokens) for row in rows if len(row.tokens) <= most})
        # The next captured step overwrites them.
        logits |= {row.slot: result.row_logits(i)[0].clone() for i, row in enumerate(rows) if not plans[row.slot]}
        left = {slot: tokens for slot, tokens in left.items() if tokens}
    return torch.stack([logits[slot] for slot in slots])


def _answer(
    engine: Engine,
    sessions: Mapping[str, Session],
    group: Sequence[Problem],
    first: int,
    outputs: Sequence[list[int]],
    max_new_tokens: int,
    tallies: Mapping[str, _Tally],
    progress: Progress,
) -> None:
    """Whether each format answers right. One that chose every token of float32 would write the same text again."""
    asked = [index for index, problem in enumerate(group) if problem.answer is not None]
    if not asked:
        return
    tokenizer = engine.tokenizer
    for name, session in sessions.items():
        texts = {index: tokenizer.decode(outputs[index], skip_special_tokens=True) for index in asked}
        written = {index: outputs[index] for index in asked}
        differing = [index for index in asked if tallies[name].other[index - len(group)]]
        if differing:
            progress(f"own texts of {name}", 0)
            prompts = [group[index].prompt for index in differing]
            results = generate(
                session, prompts, max_new_tokens, eos_token_ids=engine.end_token_ids, tokenizer=tokenizer
            )
            texts |= {index: result.text for index, result in zip(differing, results, strict=True)}
            written |= {index: result.token_ids for index, result in zip(differing, results, strict=True)}
        unended = [tokens for tokens in written.values() if tokens[-1] not in engine.end_token_ids]
        cut_off = sum(len(tokens) >= max_new_tokens for tokens in unended)
        tallies[name].cut_off += cut_off
        tallies[name].out_of_room += len(unended) - cut_off
        for index in asked:
            tallies[name].right[first + index] = is_right(texts[index], group[index].answer)


def _result(engine: Engine, name: str, settings: ReplaySettings, tallies: Mapping[str, _Tally]) -> FormatResult:
    tally, states = tallies[name], engine.networks["main"].states.values()
    geometries, layers = [state.geometry for state in states], [state.number for state in states]
    size = traffic.slot_bytes(geometries, settings, layers)
    result = FormatResult(
        name,
        settings,
        size.state + size.readout,
        traffic.traffic_per_token(geometries, settings, 0, 1.0, layers).replay,
    )
    result.tokens = sum(tally.tokens)
    result.problems, result.answered = len(tally.tokens), len(tally.right)
    result.cut_off, result.out_of_room = tally.cut_off, tally.out_of_room
    result.disagreement, result.disagreement_bound, result.disagreement_deviation = upper_bound(
        tally.other, tally.tokens
    )
    result.kl = sum(tally.kl) / result.tokens
    if tally.right:
        base = tallies[REFERENCE].right
        result.accuracy = sum(tally.right.values()) / len(tally.right)
        result.difference, result.difference_bound, result.difference_deviation = paired_bound(
            [(tally.right[index], base[index]) for index in tally.right]
        )
    if name == REFERENCE:
        result.disagreement_bound = 0.0
        result.difference_bound = None if result.difference is None else 0.0
    return result
