"""tensorrt_llm/_torch/models/modeling_utils.py: the registry (1.0 to 1.3; 1.4 adds that built-ins never overwrite)."""

from torch import nn

MODEL_CLASS_MAPPING = {}


def register_auto_model(name):
    """Last writer wins."""

    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


class PostInitCaller(type):
    """The metaclass of every causal model: `__post_init__` runs behind the outermost `__init__`."""

    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.__post_init__()
        return made


class DecoderModelForCausalLM(nn.Module, metaclass=PostInitCaller):
    """Only what wraps the layers; logits are left out."""

    def __init__(self, model, *, config, hidden_size, vocab_size):
        super().__init__()
        self.model, self.model_config, self.config = model, config, config.pretrained_config
        self.post_init_ran = False

    def __post_init__(self):
        self.post_init_ran = True

    def forward(self, attn_metadata, inputs_embeds, spec_metadata=None):
        hidden = inputs_embeds
        for layer in self.model:
            hidden = hidden + layer(
                hidden, attn_metadata, mamba_metadata=attn_metadata.mamba_metadata, **_spec(layer, spec_metadata)
            )
        return hidden


def _spec(layer, spec_metadata):
    """The first mixers took no speculation metadata."""
    return {} if getattr(layer, "spelling", "") == "global" else {"spec_metadata": spec_metadata}
