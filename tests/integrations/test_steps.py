"""`Steps`: where each slot stands, and which rows the operators are given."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from replayssm.plugins.contract import PAD_SLOT_ID

SLOTS = 5


@pytest.fixture
def package(trtllm) -> SimpleNamespace:
    trtllm.load()
    return SimpleNamespace(
        Steps=sys.modules["replayssm_trtllm.steps"].Steps, Batch=sys.modules["replayssm_trtllm.batch"].Batch
    )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(package, slots, kv_lens=None, contexts: int = 0, seq_lens=None):
    return package.Batch(contexts, len(slots) - contexts, ints(*slots), True, kv_lens, seq_lens, contexts > 0)


def test_a_shared_padding_slot_is_computed_once(package):
    """On a GPU, two rows of one slot would write the same state at the same time."""
    steps = package.Steps(SLOTS, 3, torch.device("cpu"))
    for _ in range(3):
        rows = steps.advance(make_batch(package, [2, 4, 4, 0, 4], ints(7, 8, 8, 9, 8)))
        assert sorted(rows.state_batch_indices.tolist()) == [PAD_SLOT_ID, PAD_SLOT_ID, 0, 2, 4]
        kept = [slot for slot in rows.state_batch_indices.tolist() if slot != PAD_SLOT_ID]
        assert len(set(kept)) == len(kept)
        assert rows.slots.tolist() == [2, 4, 4, 0, 4]
        assert rows.window_starts.tolist() == [0, 1, 2, 3, 4]
        assert rows.window_lens.tolist() == [1] * 5


def test_padding_rows_of_one_slot_agree_on_its_length(package):
    steps = package.Steps(SLOTS, 3, torch.device("cpu"))
    rows = steps.advance(make_batch(package, [4, 4, 4], ints(3, 9, 6)))
    assert len(set(rows.seq_lens.tolist())) == 1
    assert int(steps.expected[4]) == int(rows.seq_lens[0]) + 1
    assert steps.positions[4].tolist() == [int(rows.seq_lens[0])] * 3


def test_more_rows_than_slots(package):
    steps = package.Steps(2, 1, torch.device("cpu"))
    rows = steps.advance(make_batch(package, [1] * 7, ints(*[3] * 7)))
    assert rows.window_starts.tolist() == list(range(7))
    assert (rows.state_batch_indices != PAD_SLOT_ID).sum() == 1


def test_known_slots_keep_their_checkpoints(package):
    steps = package.Steps(SLOTS, 3, torch.device("cpu"))
    steps.advance(make_batch(package, [1, 3], ints(10, 20)))
    steps.advance(make_batch(package, [3, 1], ints(21, 11)))
    assert steps.positions[[1, 3], 0].tolist() == [10, 20]
    assert steps.expected[[1, 3]].tolist() == [12, 22]
    # A jump, ahead or back, means that the state came from elsewhere.
    steps.advance(make_batch(package, [1, 3], ints(13, 21)))
    assert steps.positions[[1, 3], 0].tolist() == [13, 21]
    # So does a prompt in between, even if the length is the one expected.
    steps.forget(ints(1))
    steps.advance(make_batch(package, [1, 3], ints(14, 22)))
    assert steps.positions[[1, 3], 0].tolist() == [14, 21]


def test_counter_without_lengths(package):
    steps = package.Steps(SLOTS, 1, torch.device("cpu"))
    for expected in (1, 2, 3):
        assert steps.advance(make_batch(package, [2])).seq_lens.tolist() == [expected]
    assert steps.positions[2].tolist() == [1]
    steps.forget(ints(2))
    assert steps.advance(make_batch(package, [2])).seq_lens.tolist() == [1]


def test_history_that_a_prompt_continues(package):
    steps = package.Steps(SLOTS, 1, torch.device("cpu"))
    steps.advance(make_batch(package, [0, 1, 2], ints(10, 20, 30)))
    # Slot 0 continues behind its 10 tokens, slot 1 does not, slot 3 never held anything.
    batch = make_batch(package, [0, 1, 3], ints(14, 26, 5), contexts=3, seq_lens=ints(4, 5, 5))
    assert steps.history_ends(batch).tolist() == [11, -1, -1]
    without = make_batch(package, [0, 1, 3], contexts=3)
    assert steps.history_ends(without).tolist() == [11, 21, -1]


def test_bytes_are_counted(package):
    steps = package.Steps(SLOTS, 3, torch.device("cpu"))
    held = [value for value in vars(steps).values() if isinstance(value, torch.Tensor)]
    assert steps.nbytes == sum(value.numel() * value.element_size() for value in held)
