"""How close the mamba2 window kernels come to the memory roofline, and how they compare with the plain baseline.

    python benchmarks/bench_mamba2_window.py [--batches 256,64,1] [--windows 1,5] [--formats float32]

Run it where `replayssm` is installed and a GPU is present. Results go to benchmarks/results. mamba-ssm, vLLM and
flashinfer are measured beside ours if they can be imported, each at its best launch configuration.
"""

from __future__ import annotations

from window_suite import main

if __name__ == "__main__":
    main("mamba2_window", "nano4b,super120b", __doc__)
