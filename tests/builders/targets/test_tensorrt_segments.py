"""Where networks are cut, and what crosses the cuts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.builders.config import published
from replayssm.builders.models import build_networks
from replayssm.builders.targets.tensorrt_segments import Segment, cut


@pytest.fixture(scope="module", params=["nano4b", "super120b-nvfp4", "qwen4b", "qwen122b"])
def network(request):
    return build_networks(published(request.param), mtp=False).main


def test_every_node_runs_once_and_in_order(network):
    """The torch target runs the nodes of the same list in the same order."""
    order = []
    for step in cut(network):
        order += [step] if isinstance(step, int) else range(step.start, step.stop)
    assert order == list(range(len(network.nodes)))


def test_only_stateful_operators_run_outside_segments(network):
    for step in cut(network):
        nodes = [network.nodes[step]] if isinstance(step, int) else network.nodes[step.start : step.stop]
        assert all((node.state is not None) == isinstance(step, int) for node in nodes)


def test_values_cross_cuts_as_inputs_and_outputs_only(network):
    """Executed in order with nothing but declared inputs, every step finds what it reads, and nothing is dead."""
    available, read = set(network.inputs), set(network.outputs.values())
    for step in cut(network):
        if isinstance(step, int):
            node = network.nodes[step]
            inputs, outputs = set(node.inputs) - network.weights.keys(), set(node.outputs)
        else:
            local = set(step.inputs)
            for node in network.nodes[step.start : step.stop]:
                assert set(node.inputs) - network.weights.keys() <= local
                local |= set(node.outputs)
            inputs, outputs = set(step.inputs), set(step.outputs)
            assert outputs <= local
        assert inputs <= available
        read |= inputs
        available |= outputs
    assert available - set(network.inputs) == read - set(network.inputs)
    assert set(network.outputs.values()) <= available


def test_what_follows_a_convolution_is_a_view(network):
    """Splitting its output costs nothing: the kernels take strided tokens."""
    steps = cut(network)
    for index, step in enumerate(steps):
        if isinstance(step, int) and network.nodes[step].op == "causal_conv1d_window":
            following = steps[index + 1]
            assert isinstance(following, Segment)
            assert following.is_view


def test_nothing_imports_tensorrt_before_a_build_asks_for_it():
    """Engines are built and run where it is not installed, and its libraries are large."""
    code = (
        "import sys, replayssm.builders.engine, replayssm.scripts.build, replayssm.runtime.session\n"
        "import replayssm.scripts.check, replayssm.runtime.plan_check, replayssm.runtime.operator_check\n"
        "print([name for name in sys.modules if name.startswith('tensorrt')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_tensorrt_is_confined_to_its_files():
    """The runtime and everything else reach it through the engine directory or not at all."""
    root = Path(__file__).parents[3]
    # They name the targets of the builders, through which TensorRT comes.
    allowed = {"builders/engine.py", "scripts/check.py"}
    for folder in ("plugins", "builders", "runtime", "scripts"):
        for path in (root / folder).rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if name in allowed or name.startswith("builders/targets/tensorrt"):
                continue
            assert not re.search(r"^\s*(from|import)\s.*\btensorrt(?!_ops\b)", path.read_text(), re.MULTILINE), name
