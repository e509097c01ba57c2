"""Speculation with a drafter and its natural acceptance, on a checkpoint's own weights and a data set.

Unlike the forced acceptance of `e2e_spec_decode_throughput`, this is the whole serving path: prompts, continuous
batching, drafts, verification and the host. Every variant generates the same number of tokens for the same prompts,
end tokens ignored.
"""

from __future__ import annotations

import argparse
import time
from itertools import takewhile

import torch
from e2e_model import Model
from e2e_results import E2eResults, device_of, model_fields
from e2e_run import free_memory

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.bench_data import Sample, read_dataset
from replayssm.runtime.generation import generate
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter

SAME_TOKENS = 0.5
"""Least share of a sequence, on average, before its tokens differ from plain decoding's. Greedy texts part where two
tokens are equally likely to within bf16, and do not meet again; a fault would part them at once."""


def samples_of(model: Model, batch: int, options: argparse.Namespace) -> list[Sample]:
    samples = read_dataset(options.dataset, model.tokenizer(), batch)
    if len(samples) < batch:
        raise ValueError(f"{options.dataset} holds {len(samples)} requests, a batch of {batch} needs as many")
    return samples


def generated(
    model: Model, settings: ReplaySettings, samples: list[Sample], drafts: str | None, device: torch.device
) -> tuple[list[list[int]], float, float]:
    """(tokens of every sequence, seconds, mean tokens a call) of one variant, the second time it runs: the first one
    captures a graph for every shape of step that it meets."""
    session = Session(model.engine(settings, len(samples)), device=device)
    prompts, count = [s.input_ids for s in samples], samples[0].output_tokens
    for _ in range(2):
        drafter = {None: lambda: None, "ngram": NgramDrafter, "mtp": lambda: MtpDrafter(session)}[drafts]()
        begin = time.perf_counter()
        results = generate(session, prompts, count, drafter=drafter, eos_token_ids=())
        seconds = time.perf_counter() - begin
    lengths = [result.acceptance_length or 1.0 for result in results]
    return [result.token_ids for result in results], seconds, sum(lengths) / len(lengths)


def common_share(ours: list[list[int]], plain: list[list[int]]) -> float:
    """Mean share of a sequence before its first different token."""
    shares = []
    for a, b in zip(ours, plain, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        shares.append(same / len(b))
    return sum(shares) / len(shares)


def measure_natural(model: Model, batch: int, settings_of, options: argparse.Namespace, results: E2eResults) -> None:
    """One line for each variant. settings_of(variant, options, max_seq_len) as in the calling script."""
    device, samples = device_of(options), samples_of(model, batch, options)
    longest = max(len(sample.input_ids) for sample in samples) + samples[0].output_tokens + 2 + options.draft_len
    rates: dict[str, float] = {}
    plain: list[list[int]] = []
    for variant in options.variants:
        free_memory(device)
        settings = settings_of(variant, options, longest)
        drafts = options.drafts if settings.max_window > 1 else None
        tokens, seconds, length = generated(model, settings, samples, drafts, device)
        plain = plain or tokens
        rates[variant] = sum(map(len, tokens)) / seconds
        share = common_share(tokens, plain)
        results.add(
            op="generate",
            **model_fields(model, settings, batch, options),
            fill="natural",
            variant=variant,
            value=round(rates[variant], 1),
            unit="tokens/s",
            tokens_per_s=round(rates[variant], 1),
            acceptance_length=round(length, 4),
            drafts=drafts,
            draft_len=options.draft_len,
            speedup=round(rates[variant] / next(iter(rates.values())), 4),
            speedup_over_snapshots=round(rates[variant] / rates["snapshots"], 4) if "snapshots" in rates else None,
            same_tokens=round(share, 4),
            correct=share >= SAME_TOKENS,
        )
