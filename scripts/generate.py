"""`replayssm generate`: text from an engine."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from replayssm.scripts.draft_options import draft_options
from replayssm.scripts.engine_options import as_asked, device_option, fp8_activations_option, tensor_parallel_option
from replayssm.scripts.files import read_text

DEFAULT_NEW_TOKENS = 512


@click.command()
@click.option(
    "--engine",
    "--engine-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Engine directory made by `replayssm build`.",
)
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be given several times.")
@click.option(
    "--prompt-file",
    "prompt_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="File whose text, without a last newline, is a prompt; - reads standard input.",
)
@click.option("--chat", is_flag=True, help="Wrap each prompt as a user's message with the checkpoint's chat template.")
@click.option(
    "--max-new-tokens",
    type=int,
    help="Most tokens to generate.  [default: 512, or what the engine's max_seq_len leaves]",
)
@click.option("--temperature", default=0.0, show_default=True, help="0 always takes the most likely token.")
@click.option("--top-k", default=0, show_default=True, help="Sample among the k most likely tokens; 0 means all.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample among the most likely tokens of this mass.")
@click.option("--min-p", default=0.0, show_default=True, help="Leave out tokens this much less likely than the best.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first prompt; each next one has the next.")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the model's end token.")
@draft_options
@device_option
@tensor_parallel_option
@fp8_activations_option
@click.option("--verify", is_flag=True, help="Check every file of the engine against its SHA-256 first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list of them for several prompts).")
@click.option("--stream", is_flag=True, help="Print text as it is generated.")
def generate(
    engine: Path,
    prompts: tuple[str, ...],
    prompt_files: tuple[Path, ...],
    chat: bool,
    max_new_tokens: int | None,
    draft: str,
    draft_engine: Path | None,
    draft_len: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    device: str,
    tensor_parallel_size: int,
    fp8_activations: bool,
    verify: bool,
    as_json: bool,
    stream: bool,
    **sampling: Any,
) -> None:
    """Generate text with an engine."""
    texts = [*prompts, *(_read(path) for path in prompt_files)]
    if not texts:
        raise click.UsageError("give at least one --prompt or --prompt-file")
    if stream and (as_json or len(texts) > 1):
        raise click.UsageError("--stream goes with one prompt and without --json")
    if draft_len is not None and draft == "none":
        raise click.UsageError("--draft-len needs --draft ngram, mtp or engine")
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.generation import generate as generate_tokens
    from replayssm.runtime.parallel_session import open_session
    from replayssm.runtime.sampling import SamplingParams
    from replayssm.runtime.serving import make_drafter

    params = SamplingParams(**sampling)
    params = [replace(params, seed=(params.seed + index) % 2**64) for index in range(len(texts))]
    loaded = Engine.load(engine, "full" if verify else "size")
    loaded = as_asked(loaded, device, tensor_parallel_size, fp8_activations)
    tokenizer = loaded.tokenizer
    token_ids = [encode(tokenizer, text, chat) for text in texts]
    note = _room_note(loaded, max(map(len, token_ids)), max_new_tokens)
    if note:
        click.echo(note, err=True)
    max_new_tokens = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    slots = min(len(texts), loaded.manifest.limits.max_batch_size)
    with contextlib.closing(open_session(loaded, slots, device)) as session:
        session.warm_up()
        results = generate_tokens(
            session,
            token_ids,
            max_new_tokens,
            params,
            make_drafter(draft, session, None if draft_engine is None else Engine.load(draft_engine)),
            draft_len,
            eos_token_ids=() if ignore_eos else loaded.end_token_ids,
            stop=stop,
            tokenizer=tokenizer,
            on_tokens=(lambda index, tokens, text: click.echo(text, nl=False)) if stream else None,
        )
    if as_json:
        values = [_to_json(result) for result in results]
        click.echo(json.dumps(values[0] if len(values) == 1 else values))
        return
    for index, result in enumerate(results):
        if len(results) > 1:
            click.secho(f"[{index + 1}] ", bold=True, nl=False)
        click.echo("" if stream else result.text)
        click.secho(_summary(result, draft, loaded, max_new_tokens), dim=True, err=True)


def _read(path: Path) -> str:
    if str(path) == "-" and sys.stdin is None:
        raise ValueError("--prompt-file - reads standard input, which is closed: pipe the prompt in or name a file")
    # An editor or echo ends a text with a newline that the prompt was not meant to have.
    return read_text(path).replace("\r\n", "\n").removesuffix("\n")


def encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt. Raises ValueError for what is not text and for a chat template that fails."""
    from replayssm.runtime.text import encode_chat, encode_text

    if not chat:
        return encode_text(tokenizer, text)
    if not tokenizer.chat_template:
        raise ValueError("the checkpoint has no chat template: leave out --chat")
    return encode_chat(tokenizer, [{"role": "user", "content": text}])


def _to_json(result: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "acceptance_length": result.acceptance_length,
        "timing": result.timing,
    }


def _room_note(engine: Any, longest: int, asked: int | None) -> str:
    """What a user who asked for more tokens than fit behind the longest prompt should know; empty if there is nothing.

    It is no error: most texts end on their own, and so did the one that was asked for, perhaps. `Request.create` cuts.
    """
    limit = engine.manifest.replay.max_seq_len
    if asked is None or longest + asked <= limit or longest >= limit:  # the last one is refused, by its own message
        return ""
    return (
        f"note: --max-new-tokens {asked} is more than fits: a sequence of this engine has at most {limit} tokens, its "
        f"prompt included, which leaves {limit - longest} behind a prompt of {longest}; for more, "
        f"{engine.how_to_lengthen}"
    )


def _summary(result: Any, draft: str, engine: Any, max_new_tokens: int) -> str:
    finish = result.finish_reason
    if finish == "length":
        out_of_room = f"the engine's max_seq_len {engine.manifest.replay.max_seq_len}"
        asked = f"--max-new-tokens {max_new_tokens}"
        finish += f" ({out_of_room if len(result.token_ids) < max_new_tokens else asked} cut it off)"
    parts = [f"{len(result.prompt_token_ids)} + {len(result.token_ids)} tokens", f"finished by {finish}"]
    if result.timing["tokens_per_s"] is not None:
        parts.append(f"{result.timing['tokens_per_s']:,.1f} tokens/s")
    parts.append(f"prompt {result.timing['prefill_s'] * 1e3:,.0f} ms")
    if draft != "none" and result.acceptance_length is not None:
        parts.append(f"{result.acceptance_length:.2f} tokens per call with {draft} drafts")
    return ", ".join(parts)
