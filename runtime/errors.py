"""Errors of a run that its user can act on. The module imports nothing, so that `replayssm --help` stays quick."""

from __future__ import annotations


class InferenceError(RuntimeError):
    """The engine computed something unusable, which no request causes; the message names the cause and the way out."""


NOT_FINITE = (
    "the model produced logits that are not finite: its weights may be damaged; check the engine with "
    "`replayssm generate --verify`, or rebuild it from an intact checkpoint"
)


class RankLostError(InferenceError):
    """Another rank of a tensor-parallel session has ended or hangs: the session cannot go on."""
