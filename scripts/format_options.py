"""Options that choose how recurrent state is kept, alike in every command that takes them."""

from __future__ import annotations

from collections.abc import Callable

import click

from replayssm.plugins.settings import READOUT_DTYPES, ROUNDINGS, STATE_DTYPES, U_FORMATS, U_SOURCES


def _parse_layers(text: str) -> tuple[tuple[int, str], ...]:
    """`ReplaySettings.readout_layers` as `name_layers` writes them."""
    pairs = []
    for item in text.split(","):
        layer, _, dtype = (part.strip() for part in item.partition("="))
        if not (layer.isascii() and layer.isdigit() and dtype in READOUT_DTYPES):
            raise click.BadParameter(
                f"expected a layer's number and one of {', '.join(READOUT_DTYPES)}, such as 0=float8, got {item!r}"
            )
        pairs.append((int(layer), dtype))
    return tuple(pairs)


def name_layers(readout_layers: tuple[tuple[int, str], ...]) -> str:
    """`ReplaySettings.readout_layers` as the option has them."""
    return ",".join(f"{layer}={dtype}" for layer, dtype in readout_layers)


FORMAT_OPTIONS = (
    click.option(
        "--state-dtype",
        type=click.Choice(STATE_DTYPES),
        default="float32",
        show_default=True,
        help="Checkpoint of the state, which updates start from. float8 is e4m3 with a scale per row.",
    ),
    click.option(
        "--state-rounding",
        type=click.Choice(ROUNDINGS),
        default="nearest",
        show_default=True,
        help="How a checkpoint of 16 or 8 bits is rounded. stochastic has no bias, so errors do not add up.",
    ),
    click.option(
        "--readout-dtype",
        type=click.Choice(READOUT_DTYPES),
        default="same",
        show_default=True,
        help="Copy of the state that outputs read; same reads the checkpoint itself.",
    ),
    click.option(
        "--readout-layers",
        metavar="LAYER=FORMAT,...",
        callback=lambda context, parameter, value: () if value is None else _parse_layers(value),
        help="Layers whose readout has another format than --readout-dtype, such as 0=float8,3=same.",
    ),
    click.option(
        "--u-source",
        type=click.Choice(U_SOURCES),
        default="readout",
        show_default=True,
        help="What a Gated DeltaNet token's update reads; checkpoint reads both states for every token.",
    ),
    click.option(
        "--u-format",
        type=click.Choice(["auto", *U_FORMATS]),
        default="auto",
        show_default=True,
        callback=lambda context, parameter, value: None if value == "auto" else value,
        help="Gated DeltaNet's u until the next rewrite; auto is one bf16 number beside an nvfp4 readout, else two.",
    ),
    click.option(
        "--rounding-seed", type=int, default=0, show_default=True, help="Key of the random bits of stochastic rounding."
    ),
)


def format_options(command: Callable) -> Callable:
    """Add them, in this order, under the names of `ReplaySettings`."""
    for option in reversed(FORMAT_OPTIONS):
        command = option(command)
    return command
