"""How a model is run, alike in every command that runs one: where, by how many GPUs, with which activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replayssm.runtime.engine import Engine

device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda"]),
    help="cuda: the first GPU, with this project's kernels and captured steps.",
)

tensor_parallel_option = click.option(
    "--tensor-parallel-size",
    "--tp-size",
    "--tp",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="GPUs (or processes, on the CPU) that share the model.",
)

fp8_activations_option = click.option(
    "--fp8-activations",
    is_flag=True,
    help="Multiply in FP8 what the checkpoint's recipe rounds: inputs of FP8 layers and, on Hopper, of NVFP4 experts. "
    "Faster from some hundred tokens a step on; results move by that rounding.  [default: 16-bit activations]",
)


def as_asked(engine: Engine, device: str, tensor_parallel_size: int, fp8_activations: bool) -> Engine:
    """The engine that rank 0 of a command runs.

    Raises ValueError where the options do not go with the engine or the device.
    """
    from replayssm.runtime.parallel import rank_engine

    if fp8_activations:
        if engine.has_plans:
            raise ValueError(
                f"{engine.directory} holds {engine.manifest.target} plans, whose products were chosen when they were "
                "built: leave out --fp8-activations, or build with --target torch"
            )
        if device == "cpu":
            raise ValueError("--fp8-activations is for products on a GPU: add --device cuda, or leave it out")
        engine.fp8_products = engine.fp8_experts = True
    return rank_engine(engine, 0, tensor_parallel_size)
