"""Processes of the benchmarks that divide a model over several GPUs, and a rank's part of it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from e2e_model import Model, random_tiles
from e2e_results import device_of

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.engine import Engine
from replayssm.runtime.parallel import ONE_SHOT_BYTES, collectives, rank_engine
from replayssm.runtime.parallel_layout import shard
from replayssm.runtime.parallel_processes import Place, end_with_parent


@dataclass(frozen=True)
class RankModel(Model):
    """A rank's part of a model; its engines share their weights. one_shot_bytes: as `runtime.parallel.collectives`."""

    rank: int = 0
    ranks: int = 1
    one_shot_bytes: int = ONE_SHOT_BYTES

    def engine(self, settings: ReplaySettings, batch: int) -> Engine:
        operators = collectives(one_shot_bytes=self.one_shot_bytes)
        engine = rank_engine(super().engine(settings, batch), self.rank, self.ranks, operators)
        engine.resident_weights = self.resident
        return engine


def rank_model(model: Model, place: Place, tiles: bool = False) -> RankModel:
    """The part of `model` at `place`. tiles: draw random experts of its own sizes as kernels hold them, which takes no
    memory beside them: other ones than the whole model's."""
    values = {item.name: getattr(model, item.name) for item in fields(Model)}
    resident: dict[torch.device, dict[str, torch.Tensor]] = {}
    if tiles and model.random and place.torch_device.type == "cuda":
        network = shard(model.networks["main"], place.rank, place.ranks).network
        resident[place.torch_device] = random_tiles(network, place.torch_device, model.fp8_experts)
    return RankModel(**{**values, "resident": resident}, rank=place.rank, ranks=place.ranks)


def rank_networks(model: Model) -> dict[str, Any]:
    """The networks that a step of `model` runs here."""
    if not isinstance(model, RankModel) or model.ranks == 1:
        return dict(model.networks)
    return {name: shard(network, model.rank, model.ranks).network for name, network in model.networks.items()}


Body = Callable[[Place, Any, argparse.Namespace], None]
"""What a rank does, a function of a module: place, a barrier of all ranks' processes, options."""


def run_ranks(body: Body, options: argparse.Namespace) -> int:
    """Run `body` in `options.ranks` processes, each with a device; returns an exit code."""
    kind = device_of(options).type
    if kind == "cuda" and torch.cuda.device_count() < options.ranks:
        raise SystemExit(f"{options.ranks} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    # A fresh interpreter: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        places = [
            Place(rank, options.ranks, kind, str(Path(folder) / "store"), torch.get_num_threads())
            for rank in range(options.ranks)
        ]
        processes = [context.Process(target=_rank_main, args=(body, place, meeting, options)) for place in places]
        for process in processes:
            process.start()
        running = list(processes)
        while running and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in running])
            running = [process for process in processes if process.exitcode is None]
        for process in running:
            # Its partner has failed, so it would wait for ever.
            process.kill()
        for process in processes:
            process.join()
    return max(abs(process.exitcode) for process in processes)


def _rank_main(body: Body, place: Place, meeting, options: argparse.Namespace) -> None:
    """The process of one rank. Ends without exit handlers, which could wait for a rank that is gone."""
    code = 0
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(place.threads)
        body(place, meeting, options)
    except BaseException:
        print(f"rank {place.rank}:", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
