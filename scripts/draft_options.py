"""Options that choose drafts, alike in every command that has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

DRAFT_OPTIONS = (
    click.option(
        "--draft",
        type=click.Choice(["none", "ngram", "mtp", "engine"]),
        default="none",
        show_default=True,
        help="Speculation: drafts from the text so far, the checkpoint's draft head, or a smaller model.",
    ),
    click.option(
        "--draft-engine",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Engine of a smaller model, for --draft engine.",
    ),
    click.option("--draft-len", type=int, help="Draft tokens per call.  [default: the engine's max_draft_len]"),
)
SCHEDULED_DRAFT_OPTIONS = (
    click.option(
        "--adaptive-drafts",
        is_flag=True,
        help="Measure at the start what drafts cost here, then draft as many as pay for a request.",
    ),
    click.option(
        "--draft-sampling",
        is_flag=True,
        help="Draw the drafts of sampled requests and verify by rejection: more stand, in distribution the same text.",
    ),
)
DRAFT_NAMES = ("draft", "draft_engine", "draft_len", "adaptive_drafts", "draft_sampling")


def draft_options(command: Callable) -> Callable:
    """Add --draft, --draft-engine and --draft-len."""
    return _add(DRAFT_OPTIONS, command)


def scheduled_draft_options(command: Callable) -> Callable:
    """Add those, and what only a scheduler of many requests can do."""
    return _add((*DRAFT_OPTIONS, *SCHEDULED_DRAFT_OPTIONS), command)


def _add(options: tuple[Callable, ...], command: Callable) -> Callable:
    for option in reversed(options):
        command = option(command)
    return command
