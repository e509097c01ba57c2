"""Philox4x32 against the known answers of its authors' library (Random123, kat_vectors)."""

import pytest
import torch

from replayssm.plugins.philox import philox4x32

ZEROS, ONES = ((0,) * 4, (0,) * 2), ((2**32 - 1,) * 4, (2**32 - 1,) * 2)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ANSWERS = [
    (7, ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("rounds", "given", "answer"), ANSWERS)
def test_known_answers(rounds, given, answer) -> None:
    counter, key = given
    assert tuple(int(word) for word in philox4x32(counter, key, rounds)) == answer
    as_tensors = [[torch.tensor([word]) for word in words] for words in given]
    assert tuple(int(word) for word in philox4x32(*as_tensors, rounds)) == answer


def test_words_broadcast() -> None:
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    words = torch.stack(philox4x32((rows, 5, columns, 7), (11, torch.tensor([13])), 7), dim=-1)
    assert words.shape == (3, 4, 4)
    assert tuple(words[2, 1].tolist()) == tuple(int(word) for word in philox4x32((2, 5, 1, 7), (11, 13), 7))
