"""What one forward call of TensorRT-LLM is about, read from its metadata by duck typing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """Packed rows: `contexts` prompt rows first, then `decodes` rows that each extend a sequence.

    slots: int32 [contexts + decodes], the state pool's slot of each row.
    one_token: whether every decode row has exactly one token (else it is a verify step of speculation).
    kv_lens: int32 [contexts + decodes] on the device, tokens of each sequence with this call's included; None where the
        attention backend has no such tensor.
    seq_lens: int32 [contexts + decodes] on the device, tokens of each row in this call; None likewise.
    continues: whether a prompt row may start from a state that is in the pool (chunked prefill).

    Nothing here keeps a state manager or its pools alive.
    """

    contexts: int
    decodes: int
    slots: torch.Tensor
    one_token: bool
    kv_lens: torch.Tensor | None
    seq_lens: torch.Tensor | None
    continues: bool

    @classmethod
    def read(cls, attn_metadata: Any, mamba_metadata: Any) -> Batch:
        """The batch of a call with a state manager."""
        contexts = int(attn_metadata.num_contexts)
        rows = int(attn_metadata.seq_lens.shape[0])
        indices = getattr(mamba_metadata, "state_indices", None)
        if indices is None:
            # The first versions asked the manager.
            indices = attn_metadata.kv_cache_manager.get_state_indices()
        decodes = rows - contexts
        return cls(
            contexts=contexts,
            decodes=decodes,
            slots=indices[:rows],
            one_token=int(attn_metadata.num_tokens) - int(attn_metadata.num_ctx_tokens) == decodes,
            kv_lens=_rows_of(getattr(attn_metadata, "kv_lens_cuda", None), rows, indices.device),
            seq_lens=_rows_of(getattr(attn_metadata, "seq_lens_cuda", None), rows, indices.device),
            continues=contexts > 0 and bool(getattr(mamba_metadata, "use_initial_states", True)),
        )

    def is_of(self, attn_metadata: Any) -> bool:
        """Whether another mixer's metadata can be of the same call."""
        rows = int(attn_metadata.seq_lens.shape[0])
        return attn_metadata.num_contexts == self.contexts and rows == self.contexts + self.decodes


def _rows_of(tensor: Any, rows: int, device: torch.device) -> torch.Tensor | None:
    """The first `rows` entries of a per-sequence integer tensor on `device`; None for anything else."""
    fits = (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == 1
        and tensor.shape[0] >= rows
        and tensor.dtype == torch.int32
        and tensor.device == device
    )
    return tensor[:rows] if fits else None


def state_pool(manager: Any, layer: int) -> torch.Tensor:
    """The recurrent states [slots, heads, rows, columns] of a layer in TensorRT-LLM's pool: a view, maybe strided."""
    if hasattr(manager, "get_ssm_states"):
        return manager.get_ssm_states(layer)
    return manager.mamba_layer_cache(layer).temporal
