"""`replayssm quantize` as a user calls it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.quantize import RECIPES
from replayssm.scripts.cli import main
from replayssm.scripts.quantize import RECIPES as CHOICES


def run(*arguments: object):
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


def test_choices_are_the_recipes():
    """The command repeats the names so that --help imports neither torch nor modelopt."""
    assert tuple(RECIPES) == CHOICES


def test_quantize_in_both_spellings(tiny_checkpoint, tmp_path):
    source, output = tiny_checkpoint("nano"), tmp_path / "out"
    result = run("--checkpoint", source, "--output", output, "--calibration-samples", 2, "--calibration-length", 32)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{output}: 14 modules nvfp4, 1.3 MB to 0.8 MB, 64 calibration tokens, ")
    assert result.stderr == ""
    assert Checkpoint.open(output).config.formats.default == "nvfp4"
    again = ["--model_dir", source, "--output_dir", output, "--qformat", "fp8", "--calib_size", 1]
    refused = run(*again)
    assert refused.exit_code == 2
    assert refused.stderr == f"error: the output {output} exists: choose another, or replace it with --overwrite\n"
    assert run(*again, "--overwrite", "--verbose").exit_code == 0
    assert Checkpoint.open(output).config.formats.default == "fp8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--checkpoint", "/no/such"),
            "error: Invalid value for '--checkpoint' / '--model-dir': Directory",
        ),
        (("--calibration", "data.csv"), "error: data.csv: expected calibration data in a .txt or .jsonl file\n"),
        (("--calibration-samples", 0), "error: --calibration-samples is 0, expected at least 1\n"),
    ],
)
def test_bad_input_is_one_line(tiny_checkpoint, tmp_path, arguments, message):
    result = run("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_recipe_lists_the_known_ones(tmp_path):
    result = run("--checkpoint", tmp_path, "--output", tmp_path / "out", "--recipe", "int4")
    assert result.exit_code == 2
    assert "'int4' is not one of 'nvfp4', 'nvfp4-w4a16', 'fp8'" in result.stderr
