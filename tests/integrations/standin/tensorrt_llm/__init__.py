"""A stand-in for TensorRT-LLM: the symbols that integrations/replayssm_trtllm uses, with their signatures and
behaviours, in a few hundred lines of plain PyTorch that run anywhere.

Each symbol names the upstream file that it mirrors and the versions in which it looks so: "1.0" to "1.2" are releases,
"1.3" the release candidates of April to August 2026, "1.4" the sources of September 2026 and later. The code
is our own.
"""

import os

__version__ = os.environ.get("TRTLLM_STANDIN_VERSION", "1.3.0rc15")
"""tensorrt_llm/version.py. The variable is for tests of workers."""

DEVICE = "cpu"
"""Where the stand-in allocates; upstream says "cuda" everywhere."""
