"""`Layers` over a stand-in for TensorRT, so that lowerings are checked without it and without a GPU."""

from __future__ import annotations

import pytest
import torch
from tensorrt_stand_in import evaluate, make_module

from replayssm.builders.targets.tensorrt_layers import Layers
from replayssm.plugins import tensorrt_ops


class EagerLayers(Layers):
    """A network over the stand-in and its values. inputs: of each network input by name.

    outputs: computed when they are first asked for; plugins leave their state there, not in the inputs.
    """

    def __init__(self, inputs: dict[str, torch.Tensor], arch: int = 0) -> None:
        super().__init__(make_module(), "eager", arch)
        self.inputs = inputs
        self._values: dict[str, torch.Tensor] | None = None

    def plugin_call(self, spec, tensors):
        """What `emit_network` adds."""
        return tensorrt_ops.plugin_call(self.module.plugin, spec, tensors)

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        if self._values is None:
            network = self.network
            self._values = evaluate(network, {tensor: self.inputs[name] for name, tensor in network.inputs.items()})
        return self._values


@pytest.fixture(scope="session")
def eager_layers() -> type[EagerLayers]:
    return EagerLayers
