"""How close the mamba2 window kernels come to the memory roofline, and how they compare with the plain baseline.

    python benchmarks/bench_mamba2_window.py [--batches 256,64,1] [--windows 1,5] [--formats float32]

Run it where `replayssm` is installed and a GPU is present. Results go to benchmarks/results. Beside ours are measured,
where they can be imported and each at its best launch configuration, mamba-ssm, vLLM and flashinfer (one token), the
verification of vLLM, SGLang and flashinfer (windows), and the replay kernels of vLLM and flashinfer.
"""

from __future__ import annotations

from window_suite import main

if __name__ == "__main__":
    main("mamba2_window", "nano4b,super120b", __doc__)
