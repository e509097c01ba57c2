"""Parameters of OpenAI, vLLM and trtllm-serve that are no settings here, and what happens to a call that has them.

Those that cannot change an answer are ignored. Those that could are refused with the reason, unless they have the value
that changes nothing: clients send defaults along. All others are fields of `api_schema`. docs/serving.md lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from replayssm.runtime.api_errors import shown

IGNORED = {
    "metadata": "nothing is stored",
    "prediction": "--draft of the server drafts tokens",
    "prompt_cache_key": "beginnings of prompts are found by their tokens",
    "prompt_cache_options": "--prefix-cache of the server sets the cache",
    "prompt_cache_retention": "--prefix-cache of the server sets the cache",
    "request_id": "answers have an id of their own",
    "safety_identifier": "it names a user",
    "service_tier": "there is one",
    "session_id": "it names a conversation",
    "store": "nothing is stored",
    "user": "it names a user",
    "verbosity": "say in the prompt how long an answer should be",
}
"""Name -> why it changes nothing."""

_BEAMS = "answers are sampled, not searched with beams"
_IDS = "answers hold text; logprobs name its tokens"
_SPLIT = "one server computes prompts and answers"
_STRUCTURED = "use structured_outputs or response_format"
_TOOLS = "use tools and tool_choice"

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), "an answer begins after the messages"),
    "allowed_token_ids": ((), "use logit_bias or structured_outputs"),
    "audio": ((), "answers are text"),
    "bad_words": (([],), "use logit_bias"),
    "cache_salt": ((), "the prefix cache is one for all clients; the server's --prefix-cache 0 turns it off"),
    "chat_template": ((), "a template is a program: set --chat-template of the server"),
    "continue_final_message": ((False,), "write the beginning into a prompt for /v1/completions"),
    "detokenize": ((True,), _IDS),
    "disaggregated_params": ((), _SPLIT),
    "documents": (([],), "write them into a message"),
    "echo": ((False,), "put the prompt before the answer yourself"),
    "early_stopping": ((False,), _BEAMS),
    "function_call": (("none",), _TOOLS),
    "functions": (([],), _TOOLS),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "include_reasoning": ((True,), "leave the reasoning_content of an answer unread"),
    "include_stop_str_in_output": ((False,), "an answer ends before its stop string"),
    "kv_transfer_params": ((), _SPLIT),
    "length_penalty": ((1, 1.0), _BEAMS),
    "logits_processors": ((), "a processor is a program; use logit_bias"),
    "lora_request": ((), "the engine has no adapters"),
    "modalities": ((["text"],), "answers are text"),
    "moderation": ((), "nothing is moderated here"),
    "priority": ((0, 0.0), "requests are served first come, first served"),
    "prompt_ignore_length": ((0,), "penalties count all tokens"),
    "prompt_logprobs": ((), "logprobs are those of the answer's tokens"),
    "return_context_logits": ((False,), "use logprobs"),
    "return_token_ids": ((False,), _IDS),
    "return_tokens_as_token_ids": ((False,), _IDS),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "stream_interval": ((1,), "a stream brings tokens as they come"),
    "suffix": (("",), "answers continue the prompt"),
    "thinking_token_budget": ((), "use max_completion_tokens, or reasoning_effort none"),
    "top_p_min": ((0, 0.0), "use min_p"),
    "truncate_prompt_tokens": ((-1,), "shorten the prompt"),
    "use_beam_search": ((False,), _BEAMS),
    "web_search_options": ((), "the server searches nothing"),
}
"""Name -> (values that change nothing, why others are refused)."""


def keep_settings(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters of a body that are settings here. Null is a parameter's default, as with OpenAI.

    known: names of settings, among which those may be that are neutral elsewhere.
    Raises PydanticCustomError for a parameter that would have to be more than ignored, and for an unknown one.
    """
    kept = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in NEUTRAL:
            _check_neutral(name, value)
        elif name not in IGNORED:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else "leave it out"
            raise _error("unknown_parameter", f"{name} is no parameter of this endpoint: {advice}", name)
    return kept


def _check_neutral(name: str, value: Any) -> None:
    values, reason = NEUTRAL[name]
    if any(type(value) is type(neutral) and value == neutral for neutral in values):
        return
    if not values:
        raise _error("unsupported_parameter", f"{name} is not supported ({reason}): leave it out", name)
    expected = shown(values[0])
    raise _error("unsupported_value", f"{name}: expected {expected} or nothing, got {shown(value)}: {reason}", name)


def unsupported(message: str, name: str) -> PydanticCustomError:
    """The error for a value of the parameter `name` that this server does not support."""
    return _error("unsupported_value", message, name)


def _error(kind: str, message: str, name: str) -> PydanticCustomError:
    # Braces would be fields of pydantic's template.
    return PydanticCustomError(kind, "{message}", {"message": message, "param": name})
