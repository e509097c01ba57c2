"""Problems: deterministic, disjoint between the splits, worked correctly, scored exactly."""

import importlib.util
import random
import re

import pytest

from examples import tasks

HAVE_GSM = importlib.util.find_spec("reasoning_gym") is not None
TIERS = [
    pytest.param(t, marks=pytest.mark.skipif(t == "gsm" and not HAVE_GSM, reason="no reasoning-gym"))
    for t in tasks.GENERATORS
]


@pytest.mark.parametrize("tier", TIERS)
def test_same_seed_same_problem(tier):
    assert tasks.generate(tier, "train", 11) == tasks.generate(tier, "train", 11)
    assert tasks.generate(tier, "train", 11) != tasks.generate(tier, "train", 12)


def test_problems_are_pinned():
    """The held-out set is the same for every figure ever reported on it."""
    problem = tasks.generate("easy", "test", 0)
    assert problem.question == (
        "At first Finn owns 143 books. Finn wins 267 books at the bridge. Finn wins 284 books at the "
        "garden. Finn gives away 156 books. How many books does Finn have now?"
    )
    assert problem.answer == "538"


@pytest.mark.parametrize("tier", TIERS)
def test_splits_are_disjoint(tier):
    for seed in range(25):
        for split in ("train", "test"):
            assert tasks.split_of(tasks.generate(tier, split, seed).question) == split


@pytest.mark.parametrize("tier", TIERS)
def test_working_ends_in_the_answer(tier):
    for seed in range(25):
        problem = tasks.generate(tier, "test", seed)
        assert tasks.is_correct(problem.working, problem.answer)
        assert not tasks.is_correct(problem.working, problem.answer + "1")


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'train' or 'test'"):
        tasks.generate("easy", "validation", 0)


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@pytest.mark.parametrize("tier", ["easy", "medium", "hard", "long", "recall", "marathon"])
def test_every_small_step_is_true(tier):
    for seed in range(20):
        working = tasks.generate(tier, "train", seed).working
        for a, sign, b, result in re.findall(r"(\d+) ([-+*/]) (\d+): [^.]*\. So (\d+)\.", working):
            assert OPERATIONS[sign](int(a), int(b)) == int(result)
        for left, right, rest in re.findall(r"([\d+*/-]+)=(\d+)(?: rest (\d+))?", working):
            assert eval(left.replace("/", "//")) == int(right)  # digits and signs only
            if rest:
                assert eval(left.replace("/", "%")) == int(rest)


def test_worked_arithmetic_reads_like_long_hand():
    assert tasks.work_add(47, 85) == "47 + 85: 7+5=12, 4+8+1=13. So 132."
    assert tasks.work_sub(132, 85) == "132 - 85: 12-5=7, 13-1-8=4, 1-1-0=0. So 47."
    assert tasks.work_mul(132, 6) == "132 * 6: 2*6=12, 3*6+1=19, 1*6+1=7. So 792."
    assert tasks.work_div(792, 6) == "792 / 6: 7/6=1 rest 1, 19/6=3 rest 1, 12/6=2 rest 0. So 132."


def test_worked_results_for_random_numbers():
    rng = random.Random(0)
    for _ in range(300):
        a, b = sorted((rng.randrange(10**6), rng.randrange(10**6)), reverse=True)
        m = rng.randint(2, 9)
        assert tasks.work_add(a, b).endswith(f"So {a + b}.")
        assert tasks.work_sub(a, b).endswith(f"So {a - b}.")
        assert all(eval(s) == int(r) for s, r in re.findall(r"([\d-]+)=(\d+)", tasks.work_sub(a, b)))
        assert tasks.work_mul(a, m).endswith(f"So {a * m}.")
        assert tasks.work_div(a * m, m).endswith(f"So {a}.")


def test_impossible_working_says_why():
    with pytest.raises(ValueError, match="swap them"):
        tasks.work_sub(3, 5)
    with pytest.raises(ValueError, match="multiple of 4"):
        tasks.work_div(7, 4)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 3.\nThe answer is 3.", "3"),
        ("The answer is 3.\nThe answer is lamp. ", "lamp"),
        ("The answer is 3", None),
        ("the answer: 3.", None),
        ("The answer is 1.5.", "1.5"),
        ("", None),
    ],
)
def test_the_last_final_line_counts(text, answer):
    assert tasks.extract_answer(text) == answer
