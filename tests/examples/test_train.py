"""Training: the loss falls, and a resumed run is bit-equal to an uninterrupted one."""

import numpy as np
import pytest
import torch

from examples import networks, optim, train
from examples.tokenizer import ASSISTANT, BEGIN, END, USER


@pytest.fixture
def work(tmp_path):
    """Two shards of short documents that repeat a pattern."""
    rng = np.random.default_rng(0)
    (tmp_path / "shards").mkdir()
    for number in range(2):
        rows = []
        for _ in range(6):
            row = []
            while len(row) < 66:
                a, b = rng.integers(5, 20, 2)
                row += [BEGIN, USER, a, b, ASSISTANT, b, a, b, a, END]
            rows.append(row[:66])
        np.save(tmp_path / "shards" / f"shard-{number:05d}.npy", np.array(rows, dtype=np.uint16))
    return tmp_path


def make_trainer(tiny_networks, name, steps=10):
    recipe = train.Recipe(name, steps=steps, rows=2, warmup=2, shard_count=2, shard_rows=6)
    return train.Trainer(recipe, "cpu", model=tiny_networks(name))


@pytest.mark.parametrize("name", list(networks.LAYOUTS))
def test_resumed_run_is_bit_equal(tiny_networks, name, work):
    whole = make_trainer(tiny_networks, name)
    source = train.RowSource(work / "shards", whole.recipe)
    losses = [whole.train_step(source(whole.step))[0].item() for _ in range(8)]
    assert losses[-1] < losses[0]

    first = make_trainer(tiny_networks, name)
    for _ in range(3):
        first.train_step(source(first.step))
    first.save(work / "half.pt")
    second = make_trainer(tiny_networks, name)
    second.load(work / "half.pt")
    for _ in range(5):
        second.train_step(source(second.step))
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_rows_of_a_step_do_not_depend_on_where_the_run_began(work):
    recipe = train.Recipe("qwen3.5-tiny", rows=2, shard_count=2, shard_rows=6)
    source = train.RowSource(work / "shards", recipe)
    in_order = [source(step) for step in range(8)]
    assert torch.equal(train.RowSource(work / "shards", recipe)(5), in_order[5])
    assert torch.equal(in_order[0], in_order[6])


def test_schedule():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.param_groups[0]["peak"] = 2.0
    factors = [optim.set_rate([optimizer], s, 100, 10) for s in (0, 9, 50, 60, 80, 99)]
    assert factors == pytest.approx([0.1, 1, 1, 1, 0.5, 0.025])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 24, 6), (2, 6, 24)])
def test_orthogonalized_updates(shape):
    """Singular values end within the quintic's band around one."""
    values = torch.linalg.svdvals(optim.orthogonalize(torch.randn(shape)))
    assert values.max() < 1.3
    assert values.median() > 0.6
