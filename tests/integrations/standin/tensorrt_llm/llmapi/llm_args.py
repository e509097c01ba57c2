"""tensorrt_llm/llmapi/llm_args.py (1.2 to 1.4): the fields of TorchLlmArgs that bear on recurrent state."""

from enum import Enum
from types import SimpleNamespace


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"


def TorchLlmArgs(**changes):  # noqa: N802
    """Defaults of a plain deployment; upstream's is a pydantic class with many more fields."""
    fields = {
        "kv_cache_config": SimpleNamespace(enable_block_reuse=False),
        "scheduler_config": SimpleNamespace(capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
        "speculative_config": None,
        "cache_transceiver_config": None,
        "kv_connector_config": None,
        "torch_compile_config": None,
        "max_beam_width": 1,
    }
    return SimpleNamespace(**{**fields, **changes})
