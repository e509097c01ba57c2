"""tensorrt_llm/_torch/pyexecutor/mamba_cache_manager.py (1.0 to 1.3; then kv_cache/mamba_cache_manager/).

One class per kind of manager, all over the same few lines: pools, and a slot for each request.
"""

from types import SimpleNamespace

import torch

import tensorrt_llm
from tensorrt_llm._torch.modules.mamba.mamba2_metadata import CUDA_GRAPH_DUMMY_REQUEST_ID


class MambaCacheManager:
    """Slots are taken from the end of a free list; one more is shared by all padding requests."""

    speculative = False

    def __init__(self, config, slots, ssm_dtype, enable_block_reuse=False):
        self.max_batch_size, self.padding_slot = slots, slots
        self.kv_cache_config = SimpleNamespace(enable_block_reuse=enable_block_reuse)
        self.free, self.slot_of, self.batch_ids = list(range(slots)), {}, []
        self.offsets = {layer: number for number, layer in enumerate(config.layers)}
        shape = (config.heads, config.rows, config.columns)
        self.ssm_states = self._pool(len(config.layers), slots + 1, shape, ssm_dtype)
        conv_shape = (config.conv_dim, config.conv_kernel - 1)
        self.conv_states = self._pool(len(config.layers), slots + 1, conv_shape, config.dtype)
        self._indices = torch.zeros(64, dtype=torch.int32, device=tensorrt_llm.DEVICE)

    def _pool(self, layers, slots, shape, dtype):
        """[layers, slots, *shape], full of garbage."""
        return torch.full((layers, slots, *shape), 3.0, device=tensorrt_llm.DEVICE).to(dtype)

    def add(self, request_id):
        self.slot_of[request_id] = self.free.pop()

    def free_resources(self, request_id):
        self.free.append(self.slot_of.pop(request_id))

    def get_state_indices(self, request_ids=None, is_padding=None):
        """A list for the requests asked for; the first versions return the device tensor of the current batch."""
        if request_ids is None:
            return self._indices
        known = {**self.slot_of, CUDA_GRAPH_DUMMY_REQUEST_ID: self.padding_slot}
        slots = [known[request] for request in request_ids]
        self._indices[: len(slots)].copy_(torch.tensor(slots, dtype=torch.int32))
        return slots

    def get_ssm_states(self, layer_idx):
        return self.ssm_states[self.offsets[layer_idx]]

    def get_conv_states(self, layer_idx):
        return self.conv_states[self.offsets[layer_idx]]

    def mamba_layer_cache(self, layer_idx):
        return SimpleNamespace(conv=self.get_conv_states(layer_idx), temporal=self.get_ssm_states(layer_idx))

    def is_speculative(self):
        return self.speculative


class MambaHybridCacheManager(MambaCacheManager):
    """1.0 to 1.2: attention pages and states in separate pools."""


class MixedMambaHybridCacheManager(MambaCacheManager):
    """1.3: the same, beside newer managers."""


class CppMambaHybridCacheManager(MambaCacheManager):
    """1.3: states are blocks of the C++ pool of attention pages, so a slot's state is followed by other bytes.

    With block reuse, `prepare_resources` moves a sequence's state to another block when it crosses a snapshot.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        interval = 256 if self.kv_cache_config.enable_block_reuse else 0
        self.linear_attention_metadata = SimpleNamespace(states_snapshot_interval=interval)

    def _pool(self, layers, slots, shape, dtype):
        size = torch.Size(shape).numel()
        wide = torch.full((slots, layers, size + 32), 3.0, device=tensorrt_llm.DEVICE).to(dtype)
        return wide[..., :size].transpose(0, 1).unflatten(-1, shape)


class MambaHybridCacheManagerV2(MambaCacheManager):
    """1.3 and later: may suspend a request and move its states to host memory."""

    def suspend_request(self, request_id):
        raise NotImplementedError


class NewKindOfManager(MambaCacheManager):
    """One that nobody has read."""
