"""How close the mamba2 window kernels come to the memory roofline, and how they compare with the plain baseline.

    python benchmarks/bench_mamba2_window.py [--batches 256,64,1] [--windows 1,5] [--formats float32]

Run it where `replayssm` is installed and a GPU is present. Results go to benchmarks/results. mamba-ssm and
flash-linear-attention are measured beside ours if they can be imported, each at its best launch configuration.
"""

from __future__ import annotations

import argparse

from window_suite import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default="nano4b,super120b")
    parser.add_argument("--batches", default="256,64,1,16,512")
    parser.add_argument("--windows", default="1,5")
    parser.add_argument(
        "--formats",
        default="float32,float16,float16:stochastic:nvfp4",
        help="state_dtype, or state_dtype:state_rounding:readout_dtype",
    )
    parser.add_argument("--tune", action="store_true", help="try all rows per block, to choose the launch tables")
    arguments = parser.parse_args()
    run(
        "mamba2_window",
        arguments.geometries.split(","),
        [int(value) for value in arguments.batches.split(",")],
        [int(value) for value in arguments.windows.split(",")],
        arguments.formats.split(","),
        arguments.tune,
    )
