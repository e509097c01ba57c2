"""Puts replay into a model that TensorRT-LLM has built, and takes it out where it cannot stay."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .gdn import GdnLayer
from .layer import Layer
from .mamba2 import Mamba2Layer
from .model import ReplayModel
from .safety import check_model
from .settings import RefusedError, Settings, say, say_refused


def install(model: torch.nn.Module) -> ReplayModel | None:
    """Wrap every recurrent mixer of `model`; None, and the model unchanged, where that is refused.

    Nothing is allocated yet: pools exist from the first forward call on.
    """
    try:
        settings = Settings.read()
        check_model(model, settings)
        layers = [layer for module in model.modules() if (layer := _layer(module)) is not None]
        forwards = [_forward_arguments(layer.mixer) for layer in layers]
    except RefusedError as reason:
        say_refused(reason)
        return None
    except Exception as error:
        # Nothing was replaced yet, so a model that cannot be read is no reason to keep it from being served.
        say_refused(f"the model is spelled in an unknown way ({type(error).__name__}: {error})")
        return None
    if not layers:
        say("this rank has no recurrent layer, so there is nothing to replace")
        return None
    replay = ReplayModel(layers, settings)
    for layer, signature in zip(layers, forwards, strict=True):
        layer.replace()
        layer.mixer.forward = _wrapped(replay, layer, layer.mixer.forward, signature)
    return replay


def _layer(module: torch.nn.Module) -> Layer | None:
    """The replay of a recurrent mixer; None for any other module."""
    names = {base.__name__ for base in type(module).__mro__}
    index = getattr(module, "layer_idx", None)
    if "Mamba2Mixer" in names:
        return Mamba2Layer(module, index)
    if any(name.endswith("GatedDeltaNet") for name in names):
        return GdnLayer(module, index)
    return None


def _forward_arguments(mixer: torch.nn.Module) -> inspect.Signature:
    signature = inspect.signature(mixer.forward)
    missing = {"attn_metadata", "mamba_metadata"} - set(signature.parameters)
    if missing or not isinstance(getattr(mixer, "layer_idx", None), int):
        raise RefusedError(
            f"{type(mixer).__name__} is spelled in an unknown way: its forward lacks {', '.join(sorted(missing))}"
            if missing
            else f"{type(mixer).__name__} has no layer_idx"
        )
    return signature


def _wrapped(replay: ReplayModel, layer: Layer, forward: Callable, signature: inspect.Signature) -> Callable:
    """`forward` of a mixer, between the two halves of what replay does around it."""

    def replayed_forward(*args: Any, **kwargs: Any) -> Any:
        if replay.stopped:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError("ReplaySSM does not work under torch.compile: set torch_compile_config to null")
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if not replay.enter(layer, arguments["attn_metadata"], arguments["mamba_metadata"]):
            return forward(*args, **kwargs)
        try:
            result = forward(*args, **kwargs)
            replay.check(layer)
        finally:
            layer.leave()
        return result

    return replayed_forward
