"""Geometries of the recurrent layers of the published models."""

from replayssm.builders.inspection import recurrent_geometry

NANO, SUPER = recurrent_geometry("nano4b"), recurrent_geometry("super120b")
QWEN4B, QWEN122B = recurrent_geometry("qwen4b"), recurrent_geometry("qwen122b")
