"""Where a window kernel spends its time: launches for a profiler, over rows at random fill levels.

    ncu --set full --import-source no -k regex:window -s 2 -c 1 python benchmarks/profile_window.py super120b 1

Prints nothing; the profiler's report is the result.
"""

from __future__ import annotations

import argparse

import torch
from window_layers import GEOMETRIES, Layer

from replayssm.plugins.settings import ReplaySettings

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("window", type=int)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--fill", type=int, help="the same history in every row, instead of random ones")
    parser.add_argument("--launches", type=int, default=3)
    arguments = parser.parse_args()
    settings = ReplaySettings(max_window=arguments.window, state_dtype=arguments.state_dtype)
    layer = Layer(GEOMETRIES[arguments.geometry], settings, arguments.batch, arguments.window)
    history = torch.randint(1, settings.buffer_len + 1, (arguments.batch,))
    layer.set_history(history if arguments.fill is None else torch.tensor([arguments.fill]))
    calls = layer.launches([0])
    for number in range(arguments.launches):
        calls[number % len(calls)]()
    torch.cuda.synchronize()
