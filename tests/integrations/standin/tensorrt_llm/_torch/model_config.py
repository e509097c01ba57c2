"""tensorrt_llm/_torch/model_config.py (1.2 and later): ModelConfig, the fields that reach mixers, sizes for tests."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class ModelConfig:
    """spelling: where Mamba2Mixer keeps its decode operator: "global", or the name of an attribute."""

    kind: str = "mamba2"
    spelling: str = "_stp_ssu_func"
    layers: tuple[int, ...] = (0, 1)
    hidden_size: int = 24
    heads: int = 4
    groups: int = 2
    rows: int = 8
    columns: int = 16
    conv_kernel: int = 4
    dtype: torch.dtype = torch.bfloat16
    mapping: Any = field(default_factory=lambda: SimpleNamespace(tp_size=1, cp_size=1, enable_attention_dp=False))
    quant_config: Any = field(default_factory=lambda: SimpleNamespace(mamba_ssm_stochastic_rounding=False))
    spec_config: Any = None

    @property
    def pretrained_config(self):
        return SimpleNamespace(torch_dtype=self.dtype, architectures=["NemotronHForCausalLM"])

    @property
    def conv_dim(self):
        if self.kind == "mamba2":
            return self.heads * self.rows + 2 * self.groups * self.columns
        return 2 * self.groups * self.columns + self.heads * self.rows
