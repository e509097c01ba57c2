"""How close the mamba2 window kernels come to the memory roofline, and how they compare with the plain baseline.

    python benchmarks/bench_mamba2_window.py [--batches 1,16,64] [--windows 1,5] [--state-dtypes float32]

Run it where `replayssm` is installed and a GPU is present. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse

from window_layers import run, sweep

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default="nano4b,super120b")
    parser.add_argument("--batches", default="1,16,64,256,512")
    parser.add_argument("--windows", default="1,5")
    parser.add_argument("--state-dtypes", default="float32,float16")
    parser.add_argument("--sweep", action="store_true", help="compare rows per block at the first batch size instead")
    arguments = parser.parse_args()
    names = arguments.geometries.split(",")
    batches = [int(value) for value in arguments.batches.split(",")]
    windows = [int(value) for value in arguments.windows.split(",")]
    if arguments.sweep:
        sweep("mamba2_window", names, batches[0], windows)
    else:
        run("mamba2_window", names, batches, windows, arguments.state_dtypes.split(","))
