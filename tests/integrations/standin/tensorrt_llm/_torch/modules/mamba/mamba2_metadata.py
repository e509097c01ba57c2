"""tensorrt_llm/_torch/modules/mamba/mamba2_metadata.py (1.2 to 1.4): what a step tells the recurrent mixers."""

import torch

import tensorrt_llm

CUDA_GRAPH_DUMMY_REQUEST_ID = 2**64 - 1
"""tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py."""


class Mamba2Metadata:
    """state_indices int32 [max_batch]: prompt rows, then decode rows; its address never changes. The first versions
    (1.0, 1.1) lacked it, and mixers asked the manager."""

    def __init__(self, max_batch_size, chunk_size, with_state_indices=True):
        device = tensorrt_llm.DEVICE
        self.max_batch_size, self.chunk_size = max_batch_size, chunk_size
        if with_state_indices:
            self.state_indices = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self.cu_seqlens = torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device)
        self.has_initial_states = torch.zeros(max_batch_size, dtype=torch.bool, device=device)
        self._arange_buffer_long = torch.arange(max_batch_size + 1, device=device)
        self.use_initial_states = False
        self.query_start_loc = self.query_start_loc_long = None

    def prepare(self, attn_metadata):
        """Called outside of a captured graph, before each forward or replay."""
        contexts, rows = attn_metadata.num_contexts, attn_metadata.seq_lens.shape[0]
        ids = attn_metadata.request_ids[:rows]
        padding = [request == CUDA_GRAPH_DUMMY_REQUEST_ID for request in ids]
        slots = attn_metadata.kv_cache_manager.get_state_indices(ids, padding)
        if hasattr(self, "state_indices"):
            self.state_indices[:rows].copy_(torch.tensor(slots, dtype=torch.int32))
        if not contexts:
            self.query_start_loc, self.query_start_loc_long = None, self._arange_buffer_long[: rows + 1]
            return
        # Decode rows have one token here; upstream counts them so too.
        ends = torch.cumsum(attn_metadata.seq_lens, 0)
        self.cu_seqlens[1 : rows + 1].copy_(ends)
        self.query_start_loc = self.cu_seqlens[: rows + 1]
        self.query_start_loc_long = self.query_start_loc.long()
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        self.has_initial_states[:contexts].copy_(torch.tensor([count > 0 for count in cached[:contexts]]))
        self.use_initial_states = any(count > 0 for count in cached[:contexts])
