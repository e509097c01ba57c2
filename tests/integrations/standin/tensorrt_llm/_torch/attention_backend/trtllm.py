"""tensorrt_llm/_torch/attention_backend/trtllm.py (1.0 to 1.4): TrtllmAttentionMetadata, without attention."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import tensorrt_llm
from tensorrt_llm._torch.modules.mamba.mamba2_metadata import Mamba2Metadata


@dataclass
class TrtllmAttentionMetadata:
    """seq_lens is on the host; kv_lens_cuda and seq_lens_cuda keep their addresses. with_kv_lens: other attention
    backends have no such tensor."""

    max_num_requests: int
    kv_cache_manager: Any
    with_kv_lens: bool = True
    with_state_indices: bool = True
    is_cuda_graph: bool = False
    num_contexts: int = 0
    seq_lens: torch.Tensor = None
    request_ids: list = field(default_factory=list)
    kv_cache_params: Any = None

    def __post_init__(self):
        device = tensorrt_llm.DEVICE
        self.mamba_metadata = Mamba2Metadata(self.max_num_requests, 8, self.with_state_indices)
        self.seq_lens_cuda = torch.zeros(self.max_num_requests, dtype=torch.int32, device=device)
        if self.with_kv_lens:
            self.kv_lens_cuda = torch.zeros(self.max_num_requests, dtype=torch.int32, device=device)

    @property
    def num_tokens(self):
        return int(self.seq_lens.sum())

    @property
    def num_ctx_tokens(self):
        return int(self.seq_lens[: self.num_contexts].sum())

    def prepare(self, request_ids, seq_lens, cached, num_contexts):
        self.request_ids, self.num_contexts = request_ids, num_contexts
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.kv_cache_params = SimpleNamespace(num_cached_tokens_per_seq=cached)
        rows = len(seq_lens)
        self.seq_lens_cuda[:rows].copy_(self.seq_lens)
        if self.with_kv_lens:
            self.kv_lens_cuda[:rows].copy_(self.seq_lens + torch.tensor(cached, dtype=torch.int32))
        self.mamba_metadata.prepare(self)
