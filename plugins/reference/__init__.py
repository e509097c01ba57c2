"""PyTorch implementations of the operators: what a CPU runs, and what every kernel is tested against."""

from replayssm.plugins.reference.attention import attention_window
from replayssm.plugins.reference.conv import causal_conv1d_window
from replayssm.plugins.reference.gdn import gdn_window
from replayssm.plugins.reference.mamba2 import mamba2_window
from replayssm.plugins.state import commit, copy_slot, set_checkpoint_position

__all__ = [
    "attention_window",
    "causal_conv1d_window",
    "commit",
    "copy_slot",
    "gdn_window",
    "mamba2_window",
    "set_checkpoint_position",
]
