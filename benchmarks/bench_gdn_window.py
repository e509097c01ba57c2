"""How close the gdn window kernels come to the memory roofline, and how they compare with the plain baseline.

    python benchmarks/bench_gdn_window.py [--batches 256,64,1] [--windows 1,5] [--formats float32]

Run it where `replayssm` is installed and a GPU is present. Results go to benchmarks/results. Beside ours are measured,
where they can be imported and each at its best launch configuration, flash-linear-attention (one token) and the
verification of vLLM, SGLang and flashinfer (windows).
"""

from __future__ import annotations

from window_suite import main

if __name__ == "__main__":
    main("gdn_window", "qwen4b,qwen122b", __doc__)
