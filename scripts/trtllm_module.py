"""`replayssm trtllm-module`: where the module is that TensorRT-LLM loads."""

from __future__ import annotations

import sys
from pathlib import Path

import click

NAME = "replayssm_trtllm"


def module_directory() -> Path:
    """The package directory, beside this one in a checkout and in an installation alike."""
    return Path(__file__).resolve().parents[1] / "integrations" / NAME


@click.command("trtllm-module")
@click.option("--check", is_flag=True, help="Import it here, as TensorRT-LLM would, and say what it registers.")
def trtllm_module(check: bool) -> None:
    """Print the directory for `trtllm-serve --custom_module_dirs`.

    The commands are: trtllm-serve MODEL --custom_module_dirs "$(replayssm trtllm-module)", and likewise trtllm-bench
    throughput.
    """
    directory = module_directory()
    if not (directory / "__init__.py").is_file():
        raise ValueError(f"{directory} is missing: install replayssm-trt again")
    if not check:
        click.echo(directory)
        return
    sys.path.insert(0, str(directory.parent))
    try:
        import replayssm_trtllm
    except ImportError as error:
        raise ValueError(str(error)) from error
    finally:
        sys.path.remove(str(directory.parent))
    if not replayssm_trtllm.REGISTERED:
        raise ValueError("replay is not active here; the line of the log above says why")
    click.echo(f"replay is registered for {', '.join(replayssm_trtllm.REGISTERED)}")
