"""The command group: quick help, lazy imports, one line for an error."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from replayssm.runtime.errors import InferenceError
from replayssm.scripts import cli

CONSOLE_SCRIPT = Path(sys.executable).with_name("replayssm")


@pytest.fixture
def runner():
    return CliRunner()


@pytest.fixture
def failing(monkeypatch):
    """`failing(error)` makes `replayssm doctor` raise it."""

    def install(error):
        @click.command()
        def doctor():
            raise error

        monkeypatch.setattr(importlib.import_module("replayssm.scripts.doctor"), "doctor", doctor)

    return install


def test_help_lists_every_command(runner):
    result = runner.invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    for name, text in cli.COMMANDS.items():
        assert name in result.stdout
        assert text in result.stdout


def commands(path, command):
    """(path, command) of a command and of all below it."""
    yield path, command
    for name in command.list_commands(None) if isinstance(command, click.Group) else ():
        yield from commands((*path, name), command.get_command(None, name))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_describes_itself_and_its_options(runner, name):
    """--help of every command needs nothing else, and every option of it says what it is."""
    for path, command in commands((name,), cli.main.get_command(None, name)):
        result = runner.invoke(cli.main, [*path, "--help"])
        assert result.exit_code == 0
        assert f"Usage: main {' '.join(path)}" in result.stdout
        assert command.help
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        for option in options:
            assert option.help, f"{path}: {option.opts[0]} says nothing"
            assert option.opts[0] in result.stdout
        assert {name for names in getattr(command, "groups", {}).values() for name in names} <= {
            *(option.name for option in options), "concurrency", "max_batch_size", "streaming"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generte"], "No such command 'generte'. Did you mean 'generate'? (see main --help)"),
        (["x"], "No such command 'x' (see main --help)"),
        (
            ["bench", "prepare-dataset", "--engine", "."],
            "Missing command: give one of token-norm-dist, token-unif-dist, text "
            "(see main bench prepare-dataset --help)",
        ),
        (
            ["bench", "prepare-dataset", "text", "--engine", "."],
            "No such option '--engine': it goes before text (see main bench prepare-dataset text --help)",
        ),
    ],
)
def test_a_way_out_of_what_was_typed(runner, arguments, message):
    result = runner.invoke(cli.main, arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_version(runner):
    result = runner.invoke(cli.main, ["--version"])
    assert result.stdout == f"replayssm {metadata.version('replayssm-trt')}\n"


def test_help_is_quick_and_imports_nothing_heavy():
    """The best of three runs: the first may read files from a cold disk."""
    code = (
        "import sys; from replayssm.scripts.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'rich', 'numpy')))"
    )
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "error", [ValueError("expected a,\n  got b"), OSError("no space left"), InferenceError("not finite")]
)
def test_bad_input_is_one_line_and_exit_code_2(runner, failing, monkeypatch, error):
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    failing(error)
    result = runner.invoke(cli.main, ["doctor"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {' '.join(str(error).split())}\n"
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    assert runner.invoke(cli.main, ["doctor"]).exception is error


def test_errors_of_the_system_name_their_file(runner, failing):
    failing(PermissionError(13, "Permission denied", "/a/b"))
    assert runner.invoke(cli.main, ["doctor"]).stderr == "error: /a/b: Permission denied\n"


def test_a_full_disk_has_no_name_of_its_own(runner, failing):
    failing(OSError(28, "No space left on device"))
    error = runner.invoke(cli.main, ["doctor"]).stderr
    assert error == "error: No space left on device where the output goes: free some there, or write it elsewhere\n"


def test_errors_of_the_runtime_name_the_commands_option(runner, monkeypatch):
    """The runtime's name of a parameter becomes the option, also below a group; other words stay."""
    bench = importlib.import_module("replayssm.scripts.bench")
    for message, shown in (("slots must be 1", "--max-batch-size must be 1"), ("seed is 1", "seed is 1"),
                           ("max_seq_len must be 1", "--max-seq-len must be 1"), ("slots", "--max-batch-size"),
                           ("more than the engine's max_seq_len: raise max_num_tokens, not /a/max_seq_len or slots",
                            "more than the engine's max_seq_len: raise --max-num-tokens, not /a/max_seq_len or slots"),
                           ):  # fmt: skip
        monkeypatch.setattr(bench, "_run", lambda message=message, **_: (_ for _ in ()).throw(ValueError(message)))
        result = runner.invoke(cli.main, ["bench", "throughput", "--engine", "/", "--dataset", __file__])
        assert result.stderr == f"error: {shown}\n"


def test_other_errors_are_not_hidden(runner, failing):
    failing(RuntimeError("a bug"))
    result = runner.invoke(cli.main, ["doctor"])
    assert isinstance(result.exception, RuntimeError)


def test_callers_from_python_get_the_exception(failing):
    failing(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        cli.main.main(["doctor"], standalone_mode=False)


@pytest.mark.parametrize(("given", "used"), [(None, "passive"), ("active", "active")])
def test_threads_wait_without_spinning(runner, monkeypatch, given, used):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    runner.invoke(cli.main, ["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == used


@pytest.mark.parametrize("arguments", [["nothing"], ["build", "--nothing"], ["generate", "--engine", "/nowhere"]])
def test_wrong_usage(runner, arguments):
    result = runner.invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("--help)\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--version", "--help", "doctor", "generate --engine /tmp --prompt a --json"])
def test_closed_standard_output(arguments):
    result = subprocess.run(
        f"{CONSOLE_SCRIPT} {arguments} >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: standard output is closed")
    assert result.stderr.count("\n") == 1


def test_commands_that_write_files_need_no_standard_output():
    command = f"{CONSOLE_SCRIPT} build --checkpoint /nowhere --output /nowhere/x >&-"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert "/nowhere" in result.stderr


def test_console_script():
    result = subprocess.run([CONSOLE_SCRIPT, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("replayssm ")
    with subprocess.Popen([CONSOLE_SCRIPT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
