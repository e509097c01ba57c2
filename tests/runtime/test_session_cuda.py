"""Whole generations on a GPU: the example models answer as on the CPU, captured or not, replay or plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, sample
from replayssm.runtime.session import Row, Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
SLOTS = 4
LOGITS_BOUND = 0.03
"""Relative distance of logits computed in two ways in bf16: 2^-9 per rounding, some tens of them in a row."""
GAP = 0.5
"""Logits lie near 16, where bf16 keeps steps of 1/8 or 1/16: two runs may part where the best two are a few apart."""

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


pytestmark = pytest.mark.usefixtures("folding_rows_first")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """`engine(name, **build_options)`, built once."""
    built = {}

    def make(name: str, **options) -> Engine:
        key = (name, *sorted(options.items()))
        if key not in built:
            path = tmp_path_factory.mktemp("engines") / name
            options = {"max_seq_len": 1024, "max_batch_size": SLOTS, **options}
            build_engine(EXAMPLES / name, path, BuildOptions(**options))
            built[key] = Engine.load(path)
        return built[key]

    return make


def prompt_of(engine: Engine, name: str) -> list[int]:
    question = [{"role": "user", "content": QUESTIONS[name]["question"]}]
    return engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]


def prompts_of(engine: Engine, name: str) -> list[list[int]]:
    prompt = prompt_of(engine, name)
    return [prompt[start:] + prompt[:start] for start in (0, 3, 7, 12)]


def assert_same_tokens(engine: Engine, prompt: list[int], ours: list[int], wanted: list[int]) -> None:
    """Equal, or first different where the CPU's two best tokens are close."""
    index = next((i for i, pair in enumerate(zip(ours, wanted, strict=False)) if pair[0] != pair[1]), None)
    if index is not None:
        session = Session(engine, slots=1)
        first, second = session.prefill(session.allocate(), [*prompt, *wanted[:index]]).topk(2).values.tolist()
        assert first - second < GAP, f"token {index}: {ours[index]} instead of {wanted[index]}"


@pytest.mark.parametrize("draft_len", [0, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", QUESTIONS)
class TestOnTheGpu:
    pytestmark = gpu

    def test_example_model_answers(self, engine, name: str, draft_len: int) -> None:
        one = engine(name, max_draft_len=draft_len)
        session = Session(one, slots=1, device="cuda")
        session.warm_up()
        drafter = MtpDrafter(session) if draft_len else None
        (result,) = generate(session, [prompt_of(one, name)], 512, drafter=drafter, tokenizer=one.tokenizer)
        assert result.text.strip().endswith(QUESTIONS[name]["answer"])

    @pytest.mark.parametrize("buffer_len", [16, 0])
    def test_greedy_tokens_are_those_of_the_cpu(self, engine, name: str, draft_len: int, buffer_len: int) -> None:
        one = engine(name, max_draft_len=draft_len, buffer_len=buffer_len)
        prompts = prompts_of(one, name)
        tokens = []
        for device in ("cpu", "cuda"):
            drafter = NgramDrafter() if draft_len else None
            results = generate(Session(one, device=device), prompts, 40, drafter=drafter, eos_token_ids=())
            tokens.append([result.token_ids for result in results])
        for prompt, wanted, ours in zip(prompts, *tokens, strict=True):
            assert_same_tokens(one, prompt, ours, wanted)

    def test_captured_steps_equal_eager_ones(self, engine, name: str, draft_len: int) -> None:
        """As many tokens as the graph has and full windows, so that both run products of the same shapes: bit-equal."""
        one = engine(name, max_draft_len=draft_len)
        sessions = [Session(one, device="cuda", graphs=graphs) for graphs in (False, True)]
        window = 1 + draft_len
        for session in sessions:
            for _ in range(4):
                session.allocate()
        for length in (128, 32):
            rows = [Row(slot, [(5 * slot + i * i) % 97 + 3 for i in range(length)], "none") for slot in range(4)]
            assert torch.equal(*(session.step(rows).hidden_states for session in sessions)), length
        assert {tokens for _, tokens in sessions[1]._programs["main"].prompts._graphs} == {512, 128}
        for step in range(40):
            rows = [Row(slot, [(7 * step + 3 * slot + i) % 97 + 3 for i in range(window)], "all") for slot in range(4)]
            eager, captured = (session.step(rows) for session in sessions)
            assert torch.equal(eager.logits, captured.logits), step
            assert torch.equal(eager.hidden_states, captured.hidden_states)
            assert captured.chosen.tokens == eager.logits.argmax(dim=1).tolist()
            assert all(captured.chosen.finite)
            for session in sessions:
                session.advance({slot: 1 + (step + slot) % window for slot in range(4)})
        for part, tensor in (
            (f"{name}/{part}", tensor)
            for name, state in sessions[0].states.items()
            for part, tensor in state.tensors.items()
        ):
            state, _, field = part.rpartition("/")
            assert torch.equal(tensor.view(torch.uint8), sessions[1].states[state][field].view(torch.uint8)), part

    def test_replay_equals_plain(self, engine, name: str, draft_len: int) -> None:
        """The same windows through both kinds of state, over several flushes."""
        engines = [engine(name, max_draft_len=draft_len, buffer_len=buffer_len) for buffer_len in (16, 0)]
        sessions = [Session(one, device="cuda") for one in engines]
        for session, one in zip(sessions, engines, strict=True):
            for prompt in prompts_of(one, name):
                session.prefill(session.allocate(), prompt)
        window = 1 + draft_len
        for step in range(40):
            rows = [Row(slot, [(7 * step + 3 * slot + i) % 97 + 3 for i in range(window)], "all") for slot in range(4)]
            replay, plain = (session.step(rows).logits.double() for session in sessions)
            assert (replay - plain).norm() < LOGITS_BOUND * plain.norm(), step
            for session in sessions:
                session.advance({slot: 1 + (step + slot) % window for slot in range(4)})

    def test_decoding_ahead_equals_decoding(self, engine, name: str, draft_len: int) -> None:
        one = engine(name, max_draft_len=draft_len)
        ahead, plain = (Session(one, device="cuda") for _ in range(2))
        ahead.warm_up()
        slots, first = list(range(4)), []
        for session in (ahead, plain):
            prompts = prompts_of(one, name)
            first = [int(session.prefill(session.allocate(), prompt).argmax()) for prompt in prompts]
        tokens, expected = first, []
        for _ in range(50):
            tokens = plain.decode(slots, tokens).argmax(dim=1).tolist()
            expected.append(tokens)
        assert list(ahead.decode_ahead(slots, first, 50)) == expected

    def test_sampling_in_the_graph_equals_sampling_outside(self, engine, name: str, draft_len: int) -> None:
        one = engine(name, max_draft_len=draft_len)
        session = Session(one, device="cuda")
        for prompt in prompts_of(one, name):
            session.prefill(session.allocate(), prompt)
        params = [
            SamplingParams(temperature=1.3, seed=5),
            SamplingParams(),
            SamplingParams(temperature=0.9, top_k=7, seed=2**63 + 1),
            SamplingParams(temperature=2.0, top_p=0.9, min_p=0.01, seed=9),
        ]
        for step in range(10):
            result = session.step([Row(slot, [step + 5], "all", params[slot]) for slot in range(4)])
            positions = [session.seq_len(slot) + 1 for slot in range(4)]
            batch = SamplingBatch(params, positions, "cuda")
            assert result.chosen.tokens == sample(result.logits, batch).tolist()
            session.advance(dict.fromkeys(range(4), 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_missing_gpu_is_one_clear_error(tmp_path: Path, tiny_checkpoint) -> None:
    build_engine(tiny_checkpoint("nano"), tmp_path / "engine", BuildOptions(max_seq_len=64))
    with pytest.raises(ValueError, match=r"no CUDA device .* use device cpu"):
        Session(Engine.load(tmp_path / "engine"), device="cuda")
