"""How many GPUs share a model, alike in every command that runs one."""

import click

tensor_parallel_option = click.option(
    "--tensor-parallel-size",
    "--tp-size",
    "--tp",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="GPUs (or processes, on the CPU) that share the model.",
)
