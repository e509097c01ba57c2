"""`replayssm generate` through click, and the way from a checkpoint to text through the console script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate as generate_tokens
from replayssm.runtime.session import Session
from replayssm.scripts.cli import main

CONSOLE_SCRIPT = Path(sys.executable).with_name("replayssm")
PROMPT = "The state of a sequence"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(tiny_checkpoint("nano"), output, BuildOptions(max_batch_size=3, max_seq_len=128, max_draft_len=3))
    return output


def generate(engine, *arguments, stdin=None):
    return CliRunner().invoke(main, ["generate", "--engine", str(engine), *map(str, arguments)], input=stdin)


def expected(engine, prompt, count):
    loaded = Engine.load(engine)
    tokens = loaded.tokenizer(prompt)["input_ids"]
    return generate_tokens(Session(loaded), [tokens], count, tokenizer=loaded.tokenizer)[0]


def test_text_and_summary(engine):
    result = generate(engine, "--prompt", PROMPT, "--max-new-tokens", 20)
    assert result.exit_code == 0
    assert result.stdout == expected(engine, PROMPT, 20).text + "\n"
    assert result.stderr.count("\n") == 1
    assert "+ 20 tokens, finished by length (--max-new-tokens 20 cut it off)" in result.stderr
    assert "tokens/s" in result.stderr


def test_more_tokens_than_the_engine_has_room_for(engine):
    """An upper bound that cannot be reached is cut and said; that the default does not fit is no news."""
    prompts = ("--prompt", "a", "--prompt", PROMPT, "--ignore-eos")
    longest = len(Engine.load(engine).tokenizer(PROMPT)["input_ids"])
    result = generate(engine, *prompts, "--max-new-tokens", 500)
    assert result.exit_code == 0
    note, *summaries = result.stderr.splitlines()
    assert note == (
        "note: --max-new-tokens 500 is more than fits: a sequence of this engine has at most 128 tokens, its prompt "
        f"included, which leaves {128 - longest} behind a prompt of {longest}; for more, build the engine with a "
        "larger --max-seq-len"
    )
    assert [line.split(", finished by ")[0] for line in summaries] == [
        "1 + 127 tokens",
        f"{longest} + {128 - longest} tokens",
    ]
    assert all("length (the engine's max_seq_len 128 cut it off)" in line for line in summaries)
    default = generate(engine, *prompts)
    assert default.stdout == result.stdout
    assert default.stderr.count("\n") == 2
    fits = generate(engine, "--prompt", PROMPT, "--ignore-eos", "--max-new-tokens", 128 - longest)
    assert fits.stderr.count("\n") == 1
    assert f"length (--max-new-tokens {128 - longest} cut it off)" in fits.stderr


@pytest.mark.parametrize("draft", ["none", "ngram", "mtp", "engine"])
def test_json(engine, draft):
    plain = expected(engine, PROMPT, 20)
    more = ("--draft-engine", engine) if draft == "engine" else ()
    result = generate(engine, "--prompt", PROMPT, "--max_new_tokens", 20, "--draft", draft, *more, "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert list(value) == [
        "prompt_token_ids", "token_ids", "text", "finish_reason", "acceptance_length", "timing"
    ]  # fmt: skip
    assert value["prompt_token_ids"] == plain.prompt_token_ids
    assert value["token_ids"] == plain.token_ids
    assert value["text"] == plain.text
    assert value["finish_reason"] == "length"
    assert value["acceptance_length"] >= 1.0
    assert value["timing"].keys() == {"prefill_s", "decode_s", "tokens_per_s"}


def test_several_prompts(engine, tmp_path):
    (tmp_path / "prompt.txt").write_text("rewritten when its ring is full", encoding="utf-8")
    arguments = ("--prompt", PROMPT, "--prompt-file", tmp_path / "prompt.txt", "--prompt-file", "-")
    result = generate(engine, *arguments, "--max-new-tokens", 9, "--json", stdin="is read")
    values = json.loads(result.stdout)
    for value, prompt in zip(values, (PROMPT, "rewritten when its ring is full", "is read"), strict=True):
        assert value["token_ids"] == expected(engine, prompt, 9).token_ids
    result = generate(engine, *arguments, "--max-new-tokens", 9, stdin="is read")
    assert [f"[{index}] " in result.stdout for index in (1, 2, 3)] == [True] * 3
    assert result.stderr.count("\n") == 3


def test_more_prompts_than_slots(engine):
    arguments = [item for index in range(5) for item in ("--prompt", f"{index}")]
    result = generate(engine, *arguments, "--max-new-tokens", 3, "--json")
    assert [len(value["token_ids"]) for value in json.loads(result.stdout)] == [3] * 5


def test_stream(engine):
    result = generate(engine, "--prompt", PROMPT, "--max-new-tokens", 20, "--stream", "--draft", "ngram")
    assert result.exit_code == 0
    assert result.stdout == expected(engine, PROMPT, 20).text + "\n"


def test_sampling_is_reproducible(engine):
    def run(seed):
        arguments = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.99, "--min-p", 0.001, "--seed", seed, "--json")
        return json.loads(generate(engine, "--prompt", PROMPT, "--max-new-tokens", 20, *arguments).stdout)["token_ids"]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_stop_and_end_token(engine):
    plain = expected(engine, PROMPT, 20)
    stop = plain.text[5]
    result = generate(engine, "--prompt", PROMPT, "--max-new-tokens", 20, "--stop", stop, "--json")
    value = json.loads(result.stdout)
    assert value["finish_reason"] == "stop"
    assert value["text"] == plain.text[: plain.text.index(stop)]
    result = generate(engine, "--prompt", PROMPT, "--max-new-tokens", 20, "--ignore-eos", "--json")
    assert len(json.loads(result.stdout)["token_ids"]) == 20


def test_chat(engine, tiny_checkpoint, tmp_path):
    result = generate(engine, "--prompt", "is read", "--chat")
    assert (result.exit_code, result.stderr) == (2, "error: the checkpoint has no chat template: leave out --chat\n")
    checkpoint = shutil.copytree(tiny_checkpoint("nano"), tmp_path / "nano")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (checkpoint / "chat_template.jinja").write_text(template)
    build_engine(checkpoint, tmp_path / "engine", BuildOptions(max_seq_len=128))
    result = generate(tmp_path / "engine", "--prompt", "is read", "--chat", "--max-new-tokens", 5, "--json")
    value = json.loads(result.stdout)
    assert value["token_ids"] == expected(engine, "user: is read\nassistant:", 5).token_ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only\n one turn') }}", "only one turn"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "division"),
        ("{% if %}", "Expected"),
    ],
)
def test_chat_template_that_fails(engine, monkeypatch, template, message):
    loaded = Engine.load(engine)
    loaded.tokenizer.chat_template = template
    monkeypatch.setattr(Engine, "load", lambda *_: loaded)
    result = generate(engine, "--prompt", "a", "--chat")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: the chat template refused the messages: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [(), ("--stop", b"\xff")])
def test_arguments_that_are_not_utf8(engine, more):
    """The shell hands over bytes, which Python keeps as surrogates."""
    command = [CONSOLE_SCRIPT, "generate", "--engine", engine, "--prompt", b"is\xff" if not more else b"is", *more]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "surrogate" in result.stderr
    assert result.stderr.count("\n") == 1


def damaged(engine, tmp_path, damage):
    return damage(shutil.copytree(engine, tmp_path / "engine"))


def truncate(directory):
    path = next((directory / "weights").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    return directory


def flip(directory):
    path = next((directory / "weights").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return directory


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (truncate, (), "the manifest says"),
        (flip, ("--verify",), "SHA-256"),
        (lambda directory: (directory / "networks.json").unlink() or directory, (), "is missing"),
        (lambda directory: directory / "weights", (), "has no config.json"),
    ],
)
def test_damaged_engine(engine, tmp_path, damage, arguments, message):
    result = generate(damaged(engine, tmp_path, damage), "--prompt", PROMPT, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def fill_with_nan(directory, end):
    """NaN in every weight whose name ends so, of the same size: damage that only --verify sees."""
    changed = 0
    for path in (directory / "weights").iterdir():
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name.endswith(end):
                first, last = (start + offset for offset in entry["data_offsets"])
                content[first:last] = b"\xff" * (last - first)
                changed += 1
        path.write_bytes(bytes(content))
    assert changed
    return directory


@pytest.mark.parametrize("end", ["norm.weight", "embeddings.weight", "A_log"])
@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_weights_full_of_nan(engine, tmp_path, end, draft):
    directory = fill_with_nan(shutil.copytree(engine, tmp_path / "engine"), end)
    result = generate(directory, "--prompt", PROMPT, "--draft", draft)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: the model produced logits that are not finite")
    assert "--verify" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one --prompt"),
        (("--prompt", ""), "prompt 1 of 1 is empty"),
        (
            ("--prompt", "is read " * 100),
            "at most 128 with its output: shorten the prompt, or build the engine",
        ),
        (("--prompt", "a", "--max-new-tokens", 0), "error: --max-new-tokens must be at least 1"),
        (("--prompt", "a", "--temperature", -1), "error: --temperature must be"),
        (("--prompt", "a", "--draft", "ngram", "--draft-len", 9), "error: --draft-len must be between 1"),
        (("--prompt", "a", "--top-k", 2**63), "error: --top-k must be an integer in [0, 2^31)"),
        (("--prompt", "a", "--seed", 2**64, "--top-k", -1), "--top-k must be an integer in [0, 2^31)"),
        (("--prompt", "a", "--seed", 2**64), "seed must be an integer in [0, 2^64)"),
        (("--prompt", "a", "--temperature", "nan"), "temperature must be"),
        (("--prompt", "a", "--draft-len", 2), "--draft-len needs --draft"),
        (("--prompt", "a", "--draft", "engine"), "--draft engine and --draft-engine DIR go together"),
        (("--prompt", "a", "--prompt", "b", "--stream"), "--stream goes with one prompt"),
        (("--prompt-file", "/nowhere"), "does not exist"),
        (("--prompt", "a", "--draft", "oracle"), "'oracle' is not one of"),
    ],
)
def test_bad_input(engine, arguments, message):
    result = generate(engine, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_last_newline_of_a_prompt_file_is_the_editors(engine, tmp_path, end):
    (tmp_path / "prompt.txt").write_bytes(f"{PROMPT}{end}".encode())
    result = generate(engine, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 1, "--json")
    plain = generate(engine, "--prompt", PROMPT, "--max-new-tokens", 1, "--json")
    assert json.loads(result.stdout)["prompt_token_ids"] == json.loads(plain.stdout)["prompt_token_ids"]


def test_prompt_from_a_closed_standard_input(engine):
    command = f"{CONSOLE_SCRIPT} generate --engine {engine} --prompt-file - <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --prompt-file - reads standard input, which is closed")
    assert result.stderr.count("\n") == 1


def test_prompt_file_that_is_not_text(engine, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = generate(engine, "--prompt-file", tmp_path / "binary")
    assert result.exit_code == 2
    assert f"{tmp_path / 'binary'} is not UTF-8" in result.stderr
    result = CliRunner().invoke(main, ["generate", "--engine", str(engine), "--prompt-file", "-"], input=b"\xff")
    assert result.stderr.startswith("error: standard input is not UTF-8 text")


def test_from_checkpoint_to_text_in_a_terminal(tiny_checkpoint, tmp_path):
    """The two commands as a user types them, offline, in an empty home directory."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*arguments):
        return subprocess.run(
            [CONSOLE_SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=True, env=environment
        )

    run("build", "--checkpoint", tiny_checkpoint("qwen"), "--output", tmp_path / "engine", "--max-draft-len", 2)
    arguments = (
        "--engine",
        tmp_path / "engine",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        12,
        "--draft",
        "mtp",
        "--json",
    )
    result = run("generate", *arguments)
    assert len(json.loads(result.stdout)["token_ids"]) == 12
    assert result.stderr == ""
