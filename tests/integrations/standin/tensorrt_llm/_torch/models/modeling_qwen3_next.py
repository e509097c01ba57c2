"""tensorrt_llm/_torch/models/modeling_qwen3_next.py (1.2 and later): Qwen3NextForCausalLM, its mixers only."""

from torch import nn

from tensorrt_llm._torch.modules.mamba.gdn_mixer import Qwen3NextGatedDeltaNet

from .modeling_utils import DecoderModelForCausalLM, register_auto_model


@register_auto_model("Qwen3NextForCausalLM")
class Qwen3NextForCausalLM(DecoderModelForCausalLM):
    def __init__(self, model_config):
        layers = nn.ModuleList(Qwen3NextGatedDeltaNet(model_config, None, layer_idx=i) for i in model_config.layers)
        super().__init__(layers, config=model_config, hidden_size=model_config.hidden_size, vocab_size=8)
