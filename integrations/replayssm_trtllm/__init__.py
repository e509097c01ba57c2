"""ReplaySSM inside TensorRT-LLM: `trtllm-serve MODEL --custom_module_dirs "$(replayssm trtllm-module)"`.

Importing this package registers subclasses of TensorRT-LLM's Nemotron-H and Qwen3-Next / Qwen3.5 models under the same
names. They replace one thing: the operator that decodes one token of a recurrent layer. Instead of rewriting the state
for every token, ours keeps recent tokens in a ring and rewrites the state when the ring is full. See docs/trtllm.md.

Written against the sources of TensorRT-LLM 1.2 to 1.4; not run with them.
"""

from .registration import register

REGISTERED = register()
"""Architectures that are served with replay in this process; empty where it is off or refused."""
