"""`examples` and `benchmarks` are folders of the checkout, not part of the package."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def tiny_networks():
    """One small random network of each layout, by checkpoint name."""
    import torch

    from examples.model import NemotronConfig, QwenConfig
    from examples.networks import NemotronH, Qwen35

    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
    }
    nemotron = NemotronConfig(pattern="M-*M-", mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=16, **sizes)
    qwen = QwenConfig(
        num_hidden_layers=5,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rotary_dim=4,
        **sizes,
    )

    def make(name: str):
        torch.manual_seed(0)
        model = {"nemotron-h-tiny": NemotronH, "qwen3.5-tiny": Qwen35}[name](
            {"nemotron-h-tiny": nemotron, "qwen3.5-tiny": qwen}[name]
        )
        model.reset(7)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 2:
                    p.mul_(3)  # so that tokens and not only biases decide the output
                elif "norm" in name or name.endswith(".D"):
                    p.add_(0.2 * torch.randn_like(p))
        return model

    return make
