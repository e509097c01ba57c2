"""tensorrt_llm/_torch/models/modeling_nemotron_h.py (1.1 and later): NemotronHForCausalLM, its mixers only."""

from torch import nn

from tensorrt_llm._torch.modules.mamba.mamba2_mixer import Mamba2Mixer

from .modeling_utils import DecoderModelForCausalLM, register_auto_model


@register_auto_model("NemotronHPuzzleForCausalLM")
@register_auto_model("NemotronHForCausalLM")
class NemotronHForCausalLM(DecoderModelForCausalLM):
    def __init__(self, model_config):
        layers = nn.ModuleList(Mamba2Mixer(layer_idx=i, config=model_config) for i in model_config.layers)
        super().__init__(layers, config=model_config, hidden_size=model_config.hidden_size, vocab_size=8)
