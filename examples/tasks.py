"""Grade-school style problems with a written chain of steps, in tiers of difficulty.

Every problem is a question, a worked answer of small steps that ends in ``The answer is X.``,
and the answer itself. Arithmetic on long numbers is worked digit by digit, because a model of a few
million parameters learns that and does not learn multi-digit sums by heart.

Train and test problems are disjoint by construction: a hash of the question assigns each problem to
one split, and a generator asked for the other split draws again.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NAMES = [
    "Ada",
    "Ben",
    "Cara",
    "Dan",
    "Ella",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kira",
    "Liam",
    "Maya",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Umar",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
]
THINGS = [
    "apples",
    "books",
    "cards",
    "coins",
    "shells",
    "stamps",
    "pens",
    "beads",
    "marbles",
    "stickers",
    "buttons",
    "tickets",
    "pears",
    "plums",
    "nuts",
    "stones",
    "cups",
    "keys",
    "bricks",
    "flowers",
]
TREASURES = ["kite", "drum", "ball", "lamp", "ring", "boat", "bell", "hat", "map", "rope", "flute", "clock"]
PLACES = ["river", "garden", "market", "bridge", "school", "station", "forest", "harbour", "library", "farm"]
ANIMALS = ["fox", "owl", "horse", "cat", "dog", "goose", "rabbit", "mouse", "bear", "duck"]
MOODS = ["old", "quiet", "happy", "tired", "brave", "young", "small", "clever", "lazy", "hungry"]
DEEDS = ["walks", "sleeps", "waits", "sings", "rests", "plays", "hides", "runs", "dreams", "eats"]
TIMES = ["at noon", "at night", "in the morning", "in winter", "all day", "after the rain"]

TEST_SHARE = 16  # one question in 16 hashes to the test split


@dataclass(frozen=True)
class Problem:
    """One problem; `working` ends in the final line that holds `answer`."""

    tier: str
    question: str
    working: str
    answer: str


def final_line(answer: object) -> str:
    return f"The answer is {answer}."


def extract_answer(text: str) -> str | None:
    """The last stated final answer in a generated text, or None."""
    found = re.findall(r"The answer is ([^\n]+?)\.(?:\s|$)", text)
    return found[-1].strip() if found else None


def is_correct(text: str, answer: str) -> bool:
    """Exact match of the final answer."""
    return extract_answer(text) == answer


def _digits(value: int, width: int) -> list[int]:
    """Digits, least significant first, padded with zeros to `width`."""
    return [value // 10**i % 10 for i in range(width)]


def work_add(a: int, b: int) -> str:
    """`47 + 85: 7+5=12, 4+8+1=13. So 132.`"""
    width = max(len(str(a)), len(str(b)))
    carry, steps = 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{a} + {b}: {', '.join(steps)}. So {a + b}."


def work_sub(a: int, b: int) -> str:
    """`132 - 85: 12-5=7, 13-1-8=4, 1-1=0. So 47.` (a borrow adds ten above, takes one below)."""
    if b > a:
        raise ValueError(f"work_sub needs a >= b, got {a} - {b}: swap them")
    width = len(str(a))
    borrow, steps = 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        lent = x - borrow - y < 0
        left = x + 10 * lent
        rest = left - borrow - y
        steps.append(f"{left}{'-1' if borrow else ''}-{y}={rest}")
        borrow = int(lent)
    return f"{a} - {b}: {', '.join(steps)}. So {a - b}."


def work_mul(a: int, m: int) -> str:
    """`132 * 6: 2*6=12, 3*6+1=19, 1*6+1=7. So 792.` for a one-digit m."""
    carry, steps = 0, []
    for x in _digits(a, len(str(a))):
        total = x * m + carry
        steps.append(f"{x}*{m}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return f"{a} * {m}: {', '.join(steps)}. So {a * m}."


def work_div(a: int, m: int) -> str:
    """`792 / 6: 7/6=1 rest 1, 19/6=3 rest 1, 12/6=2 rest 0. So 132.` for a one-digit m."""
    rest, steps = 0, []
    for x in reversed(_digits(a, len(str(a)))):
        part = 10 * rest + x
        rest = part % m
        steps.append(f"{part}/{m}={part // m} rest {rest}")
    if rest:
        raise ValueError(f"work_div needs a multiple of {m}, got {a}: multiply first")
    return f"{a} / {m}: {', '.join(steps)}. So {a // m}."


GAINS = (
    "{who} buys {k} more {what}.",
    "{who} finds {k} {what} near the {place}.",
    "A friend gives {who} {k} {what}.",
    "{who} wins {k} {what} at the {place}.",
)
LOSSES = (
    "{who} gives away {k} {what}.",
    "{who} sells {k} {what} at the {place}.",
    "{who} loses {k} {what} near the {place}.",
    "Then {k} {what} break.",
)
TIMES_AS_MANY = (
    "After a good week {who} has {k} times as many {what}.",
    "The number of {what} grows to {k} times as many.",
)
SHARES = (
    "{who} puts the {what} in {k} equal bags and keeps one bag.",
    "{who} shares the {what} equally among {k} people and keeps one share.",
)
STARTS = (
    "{who} has {k} {what}.",
    "At first {who} owns {k} {what}.",
    "{who} starts the day with {k} {what}.",
)


def _ledger_event(
    rng: random.Random, value: int, low: int, high: int, kinds: str
) -> tuple[tuple[str, ...], int, int, str]:
    """One event on `value`: (sentence templates, operand, new value, worked step)."""
    while True:
        kind = rng.choice(kinds)
        amount = rng.randint(low, high)
        factor = rng.randint(2, 9)
        if kind == "+" and value + amount <= 10 * high:
            return GAINS, amount, value + amount, f"Add {amount}. {work_add(value, amount)}"
        if kind == "-" and amount < value:
            return LOSSES, amount, value - amount, f"Take {amount}. {work_sub(value, amount)}"
        if kind == "*" and value * factor <= 10 * high:
            return TIMES_AS_MANY, factor, value * factor, f"Times. {work_mul(value, factor)}"
        if kind == "/" and value >= 10:
            divisors = [m for m in range(2, 10) if value % m == 0]
            if divisors:
                m = rng.choice(divisors)
                return SHARES, m, value // m, f"Share. {work_div(value, m)}"
        if value <= low:
            kinds = "+"


def _ledger(rng: random.Random, tier: str, steps: tuple[int, int], low: int, high: int, kinds: str) -> Problem:
    """One person's store of things through a number of events."""
    who, what = rng.choice(NAMES), rng.choice(THINGS)
    value = rng.randint(low, high)
    story = [rng.choice(STARTS).format(who=who, what=what, k=value)]
    lines = [f"{who} has {value} {what}."]
    for _ in range(rng.randint(*steps)):
        templates, k, value, line = _ledger_event(rng, value, low, high, kinds)
        story.append(rng.choice(templates).format(who=who, what=what, k=k, place=rng.choice(PLACES)))
        lines.append(line)
    story.append(f"How many {what} does {who} have now?")
    return Problem(tier, " ".join(story), "\n".join([*lines, final_line(value)]), str(value))


def easy(rng: random.Random) -> Problem:
    """Three or four sums and differences of two-digit and three-digit numbers."""
    return _ledger(rng, "easy", (3, 4), 11, 300, "+-")


def medium(rng: random.Random) -> Problem:
    """Four to six steps with products and quotients, numbers to four digits."""
    return _ledger(rng, "medium", (4, 6), 25, 900, "++--*/")


def long(rng: random.Random) -> Problem:
    """Six to eight steps on numbers of four to six digits."""
    return _ledger(rng, "long", (6, 8), 2000, 90000, "++--*/")


def marathon(rng: random.Random) -> Problem:
    """Like `long` with 10 to 14 steps, beyond the training length: 700 to 1,200 tokens."""
    return _ledger(rng, "marathon", (10, 14), 2000, 90000, "++--*/")


def hard(rng: random.Random) -> Problem:
    """Three or four people trade; only the balances that change are written down."""
    people = rng.sample(NAMES, rng.randint(3, 4))
    what = rng.choice(THINGS)
    have = {p: rng.randint(60, 400) for p in people}
    story = [f"{p} has {have[p]} {what}." for p in people]
    lines = []
    for _ in range(rng.randint(4, 5)):
        giver, taker = rng.sample(people, 2)
        if have[giver] < 12:
            giver, taker = taker, giver
        k = rng.randint(2, max(3, have[giver] // 2))
        verb = rng.choice(["gives {k} {what} to {b}", "pays {b} {k} {what}", "lends {b} {k} {what}"])
        story.append(f"{giver} {verb.format(k=k, what=what, b=taker)}.")
        lines.append(f"{giver} has {work_sub(have[giver], k)}")
        lines.append(f"{taker} has {work_add(have[taker], k)}")
        have[giver] -= k
        have[taker] += k
    first, second = rng.sample(people, 2)
    if rng.random() < 0.5:
        answer = have[first]
        story.append(f"How many {what} does {first} have at the end?")
        lines.append(f"{first} has {answer}.")
    else:
        answer = have[first] + have[second]
        story.append(f"How many {what} do {first} and {second} have together at the end?")
        lines.append(f"{first} has {have[first]}. {second} has {have[second]}.")
        lines.append(f"Together {work_add(have[first], have[second])}")
    return Problem("hard", " ".join(story), "\n".join([*lines, final_line(answer)]), str(answer))


def _swaps(rng: random.Random, tier: str, holders: tuple[int, int], swaps: tuple[int, int]) -> Problem:
    """People hold one treasure each and swap: no numbers."""
    people = rng.sample(NAMES, rng.randint(*holders))
    held = dict(zip(people, rng.sample(TREASURES, len(people)), strict=True))
    story = [f"{p} holds the {held[p]}." for p in people]
    lines = []
    for _ in range(rng.randint(*swaps)):
        a, b = rng.sample(people, 2)
        held[a], held[b] = held[b], held[a]
        story.append(
            rng.choice(["{a} and {b} swap.", "{a} trades with {b}.", "Now {a} swaps with {b}."]).format(a=a, b=b)
        )
        lines.append(f"{a} and {b} swap: {a} holds the {held[a]}, {b} holds the {held[b]}.")
    who = rng.choice(people)
    story.append(f"What does {who} hold in the end?")
    lines.append(f"{who} holds the {held[who]}.")
    return Problem(tier, " ".join(story), "\n".join([*lines, final_line(held[who])]), held[who])


def track(rng: random.Random) -> Problem:
    """Five to seven people and 12 to 20 swaps."""
    return _swaps(rng, "track", (5, 7), (12, 20))


def tangle(rng: random.Random) -> Problem:
    """Seven people and 24 to 32 swaps, beyond the training length."""
    return _swaps(rng, "tangle", (7, 7), (24, 32))


def _filler(rng: random.Random, sentences: int) -> str:
    """Prose without facts; about 8 tokens a sentence."""
    return " ".join(
        f"The {rng.choice(MOODS)} {rng.choice(ANIMALS)} {rng.choice(DEEDS)} near the "
        f"{rng.choice(PLACES)} {rng.choice(TIMES)}."
        for _ in range(sentences)
    )


def recall(rng: random.Random) -> Problem:
    """Eight to fourteen facts, 500 to 1750 tokens of prose, then a sum over some of the facts."""
    people = rng.sample(NAMES, rng.randint(8, 14))
    what = rng.choice(THINGS)
    have = {p: rng.randint(11, 99) for p in people}
    facts = [
        rng.choice(["{p} keeps {k} {what} at home.", "{p} has {k} {what} in a box."]).format(p=p, k=have[p], what=what)
        for p in people
    ]
    asked = rng.sample(people, rng.randint(4, 5))
    question = f"How many {what} do {', '.join(asked[:-1])} and {asked[-1]} have together?"
    total = have[asked[0]]
    lines = [f"{asked[0]} has {total}."]
    for p in asked[1:]:
        lines.append(f"{p} has {have[p]}. {work_add(total, have[p])}")
        total += have[p]
    text = " ".join([*facts, _filler(rng, rng.randint(50, 172)), question])
    return Problem("recall", text, "\n".join([*lines, final_line(total)]), str(total))


def gsm(rng: random.Random) -> Problem:
    """reasoning-gym's gsm_symbolic: 100 templates of GSM8K problems, their own written steps."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tier gsm needs reasoning-gym: pip install reasoning-gym==0.1.25") from error

    while True:
        seed = rng.randrange(2**31)
        item = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=seed)[0]
        question = item["question"].replace(" Give the result as your final answer. Do not include units.", "")
        working = item["metadata"]["answer_cot"].rsplit("####", 1)[0].strip()
        answer = str(item["answer"])
        if len(question) < 700 and len(working) < 900 and "." not in answer:
            return Problem("gsm", question, f"{working}\n{final_line(answer)}", answer)


TIERS: dict[str, Callable[[random.Random], Problem]] = {
    "easy": easy,
    "medium": medium,
    "hard": hard,
    "long": long,
    "track": track,
    "recall": recall,
    "gsm": gsm,
}


# Never trained on: how accuracy falls past the training lengths.
STRETCH: dict[str, Callable[[random.Random], Problem]] = {"marathon": marathon, "tangle": tangle}
GENERATORS = TIERS | STRETCH


def split_of(question: str) -> str:
    """`train` or `test`, by a hash of the question."""
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def generate(tier: str, split: str, seed: int) -> Problem:
    """The problem of (tier, split, seed); the same on every machine and in every process."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    rng = random.Random(f"{tier}/{split}/{seed}")
    while True:
        problem = GENERATORS[tier](rng)
        if split_of(problem.question) == split:
            return problem


def held_out(tier: str, count: int) -> list[Problem]:
    """The first `count` test problems of a tier: the set that every figure is measured on."""
    return [generate(tier, "test", seed) for seed in range(count)]
