"""Large tensors, a piece at a time."""

from __future__ import annotations

import torch

PIECE_ELEMENTS = 2**24
"""Elements of a tensor that are converted or looked at together, so that doing so does not take its size in memory."""


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Takes no copy, of which torch.isfinite takes several."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())
