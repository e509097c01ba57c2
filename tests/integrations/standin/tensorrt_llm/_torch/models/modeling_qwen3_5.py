"""tensorrt_llm/_torch/models/modeling_qwen3_5.py (1.3 and later): text models that reuse Qwen3-Next's."""

from .modeling_qwen3_next import Qwen3NextForCausalLM
from .modeling_utils import register_auto_model


@register_auto_model("Qwen3_5ForCausalLM")
class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801
    pass


@register_auto_model("Qwen3_5MoeForCausalLM")
class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):  # noqa: N801
    pass
