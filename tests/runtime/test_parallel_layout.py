"""Divided networks: together they compute what the whole one does, every weight is read once, and what cannot be
divided is refused. Ranks are threads here that meet at a barrier."""

from __future__ import annotations

import math
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from replayssm.builders.config import PUBLISHED, published, read_config
from replayssm.builders.models import build_networks
from replayssm.builders.random_checkpoint import TINY_CONFIGS
from replayssm.plugins import cuda_ops, launch, torch_ops
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.network import CALL_INPUTS
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state
from replayssm.runtime.executor import Executor
from replayssm.runtime.operator_check import random_weights
from replayssm.runtime.parallel import OneShotSums
from replayssm.runtime.parallel_layout import shard
from replayssm.runtime.sampling import (
    PLAIN_BLOCK,
    SamplingBatch,
    SamplingParams,
    VocabularyPart,
    likeliest,
    sample_tokens,
)

SETTINGS = ReplaySettings(
    buffer_len=4, max_window=3, max_seq_len=64, activation_dtype="float64", state_dtype="float64", u_format="exact"
)
LAYOUTS = ("nano", "super", "qwen", "qwen_moe")
WIDTH = 128


def formats(name):
    """Module -> format: `name` for all products but routers and gates of one feature; tables cannot be FP8."""

    def of(module):
        leaf = module.rsplit(".", 1)[-1]
        if name == "dense" or leaf in ("gate", "shared_expert_gate"):
            return "dense"
        if leaf in ("embed_tokens", "embeddings", "lm_head"):
            return "w4a16_nvfp4" if name == "nvfp4" else "dense"
        return name

    return of


def networks(layout, module_format="dense", **changes):
    traced = build_networks(read_config({**TINY_CONFIGS[layout], **changes}), formats(module_format), "float64")
    return {"main": traced.main, "mtp": traced.mtp}


def call(lengths, seq_lens, hidden):
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    values = {
        "token_ids": [(61 * i) % 509 for i in range(sum(lengths))],
        "positions": [base + i for base, length in zip(seq_lens, lengths, strict=True) for i in range(length)],
        "seq_lens": seq_lens,
        "window_starts": starts,
        "window_lens": lengths,
        "state_batch_indices": list(range(len(lengths))),
        "logits_indices": list(range(0, sum(lengths), 2)),
    }
    inputs = {n: torch.tensor(values[n], dtype=getattr(torch, dtype)) for n, (dtype, _) in CALL_INPUTS.items()}
    if hidden:
        inputs["hidden_states"] = torch.linspace(-1, 1, sum(lengths) * WIDTH, dtype=torch.float64).view(-1, WIDTH)
    return inputs


CALLS = (([9, 5], [0, 0]), ([3, 1], [9, 5]), ([1, 3], [11, 6]), ([2, 1], [12, 9]))
"""(lengths, seq_lens) of a prefill and of windows that flush."""


class Meeting:
    """The collectives of ranks that are threads. A rank that fails takes the others with it."""

    def __init__(self, ranks):
        self.barrier, self.values = threading.Barrier(ranks, timeout=30), [None] * ranks

    def operators(self, rank):
        def together(x, join):
            self.values[rank] = x
            self.barrier.wait()
            result = join(self.values)
            self.barrier.wait()
            return result

        return {
            # In place, as the real one is: terms are gone afterwards.
            "all_reduce": lambda x: x.copy_(together(x, lambda values: torch.stack(values).sum(0))),
            "all_gather": lambda x: together(x, lambda values: torch.cat(values, -1)),
        }

    def run(self, function):
        """[function(rank) for all ranks], each in a thread."""
        results, errors = [None] * len(self.values), []

        def body(rank):
            try:
                with torch.no_grad():
                    results[rank] = function(rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def outputs(network, weights, operators=None, **options):
    """(outputs of CALLS, bytes of state)."""
    states = {name: allocate_state(spec.geometry, SETTINGS, 2) for name, spec in network.states.items()}
    executor = Executor(network, weights, states, operators=operators, **options)
    results = [executor(call(*sizes, "hidden_states" in network.inputs)) for sizes in CALLS]
    return results, sum(state.nbytes for state in states.values())


def divided(network, weights, ranks, **options):
    meeting = Meeting(ranks)

    def body(rank):
        part = shard(network, rank, ranks)
        own = {name: weights[name] if cut is None else cut(weights[name]) for name, cut in part.cuts.items()}
        operators = meeting.operators(rank)
        results, state_bytes = outputs(part.network, own, operators, **options)
        if part.first_token is not None:
            assert part.first_token == rank * results[0]["logits"].shape[1]
            results = [{**result, "logits": operators["all_gather"](result["logits"])} for result in results]
        return results, state_bytes

    return meeting.run(body)


@pytest.mark.parametrize(
    ("layout", "module_format", "ranks", "options"),
    [
        *((layout, "dense", 2, {"fuse": layout in ("super", "qwen")}) for layout in LAYOUTS),
        *((layout, "nvfp4", 2, {"emulate_activation_quantization": layout == "super"}) for layout in LAYOUTS),
        ("super", "fp8", 2, {"emulate_activation_quantization": True}),
        ("qwen_moe", "fp8", 2, {"unpack_weights": False}),
        ("qwen_moe", "nvfp4", 4, {"unpack_weights": False}),
        ("qwen", "dense", 4, {}),
    ],
)
def test_ranks_together_compute_what_one_does(layout, module_format, ranks, options):
    """In float64 sums in another order differ by some 1e-15 of values near 1, and rounding of activations to blocks of
    4 bits hides that or, at a tie, would show as 1e-2."""
    for name, network in networks(layout, module_format).items():
        weights = random_weights(network, 1)
        expected, state_bytes = outputs(network, weights, **options)
        parts = divided(network, weights, ranks, **options)
        for results, own_bytes in parts:
            for result, wanted in zip(results, expected, strict=True):
                assert wanted["logits"].abs().max() > 1e-2
                for output in ("logits", "hidden_states"):
                    torch.testing.assert_close(result[output], wanted[output], rtol=1e-10, atol=1e-10)
            if ranks == 2:
                assert 2 * own_bytes == state_bytes, f"{name}: a rank holds its heads' state only"


def test_a_vocabulary_that_does_not_divide_stays_whole():
    network = networks("qwen", vocab_size=511)["main"]
    weights = random_weights(network, 1)
    expected, _ = outputs(network, weights)
    (results, _), _ = divided(network, weights, 2)
    # float64, as above: sums of two parts instead of whole ones.
    torch.testing.assert_close(results[-1]["logits"], expected[-1]["logits"], rtol=1e-10, atol=1e-10)
    assert shard(network, 0, 2).cuts["embed_tokens.weight"] is None


@pytest.mark.parametrize(("vocab", "ranks"), [(4 * PLAIN_BLOCK, 2), (4 * PLAIN_BLOCK, 4), (1500, 2), (1500, 3)])
def test_ranks_choose_as_one_does(vocab, ranks):
    """Rows of every kind, with likeliest tokens that are equal in two parts. Blocks that end at other tokens change
    sums of probabilities in the last of 53 bits, and a draw with them in one of some 10^13."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(256, vocab, generator=generator)
    logits[:, 7] = logits[:, vocab - 3] = torch.where(torch.arange(256) % 2 == 0, 20.0, 2.0)
    kinds = [SamplingParams(), SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.7, min_p=0.1)]
    kinds += [SamplingParams(temperature=1.2, top_k=40, seed=2**63 + 1), SamplingParams(temperature=0.9, top_p=0.8)]

    def chosen(logits, part=None):
        found = [torch.stack(likeliest(logits, part))]
        for count in (1, 3, len(kinds)):
            params = [kinds[row % count] for row in range(256)]
            found.append(sample_tokens(logits, SamplingBatch(params, range(256)), part))
        return found

    meeting, width = Meeting(ranks), vocab // ranks

    def body(rank):
        part = VocabularyPart(rank * width, meeting.operators(rank)["all_gather"])
        return chosen(logits[:, part.start : part.start + width], part)

    expected = chosen(logits)
    assert len(set(expected[-1].tolist())) > 50
    for ours in meeting.run(body):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_one_shot_sums_are_for_small_aligned_tensors_of_gpus(monkeypatch):
    """All ranks must judge alike, so by nothing but the tensor's kind and place; the buffer is asked for once."""
    asked = []
    monkeypatch.setattr(OneShotSums, "_agreed_buffer", lambda self, device: asked.append(device) or "memory")
    sums = OneShotSums(None, 1024)

    def tensor(count, dtype=torch.bfloat16, offset=0, is_cuda=True):
        size = dtype.itemsize
        place = {"is_cuda": is_cuda, "device": "cuda:0", "storage_offset": lambda: offset}
        return SimpleNamespace(dtype=dtype, nbytes=count * size, itemsize=size, **place)

    refused = [
        tensor(520),
        tensor(0),
        tensor(4),
        tensor(8, offset=4),
        tensor(8, torch.float32),
        tensor(8, is_cuda=False),
    ]
    assert not any(map(sums.take, refused))
    assert not asked
    assert all(map(sums.take, [tensor(512), tensor(8), tensor(8, offset=8)]))
    assert asked == ["cuda:0"]
    assert not OneShotSums(None, 0).take(tensor(8))


def test_a_rank_that_has_a_logit_that_is_not_finite_tells_the_others():
    logits = torch.zeros(3, 8)
    logits[0, 1], logits[1, 6] = math.nan, math.inf

    def body(rank):
        part = VocabularyPart(rank * 4, meeting.operators(rank)["all_gather"])
        return likeliest(logits[:, part.start : part.start + 4], part)[0].isfinite().tolist()

    meeting = Meeting(2)
    assert meeting.run(body) == [[False, False, True]] * 2


@pytest.mark.parametrize(
    ("layout", "ranks"), [*((layout, ranks) for layout in LAYOUTS for ranks in (1, 2)), ("qwen", 4), ("qwen_moe", 4)]
)
def test_kernels_are_given_what_they_can_read(layout, ranks, monkeypatch):
    """Arguments of every launch of state kernels, for one token and for more: a rank's projections may be of odd width,
    so that slices of them lie where kernels cannot read them. Only the launch itself is left out."""
    launched = Counter()
    monkeypatch.setattr(launch, "device_arch", lambda device: 90)
    monkeypatch.setattr(launch, "launch", lambda config, *arguments, **options: launched.update([config.kernel]))
    for name in ("mamba2_window", "gdn_window", "causal_conv1d_window", "attention_window"):
        monkeypatch.setattr(torch_ops, name, getattr(cuda_ops, name))
    config = read_config(TINY_CONFIGS[layout])
    network = shard(build_networks(config, formats("dense"), "bfloat16").main, ranks - 1, ranks).network
    settings = ReplaySettings(buffer_len=4, max_window=3, max_seq_len=64)
    states = {name: allocate_state(spec.geometry, settings, 2) for name, spec in network.states.items()}
    operators = {"all_reduce": lambda x: x}
    executor = Executor(network, random_weights(network, 1), states, operators=operators, fuse=True)
    calls = [([1], [0]), ([3, 1], [0, 0])]
    for lengths, seq_lens in calls:
        executor(call(lengths, seq_lens, False))
    attention = sum(node.op == "attention_window" for node in network.nodes)
    expected = len(calls) * sum(node.state is not None for node in network.nodes)
    assert sum(launched.values()) == expected
    assert launched["attention_window"] == len(calls) * attention


WHOLE = {
    *("norm", "norm_f", "enorm", "hnorm", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
    *("q_norm", "k_norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    *("gate", "shared_expert_gate", "fc1_latent_proj", "fc2_latent_proj", "eh_proj", "fc"),
}
"""Modules that stand on every rank: norms, routers, gates, latent projections of experts, the draft head's input."""


@pytest.mark.parametrize("module_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_read_once_over_the_ranks_or_is_whole(layout, module_format):
    for network in networks(layout, module_format).values():
        parts = [shard(network, rank, 2) for rank in range(2)]
        for name, spec in network.weights.items():
            cuts = [part.cuts[name] for part in parts]
            if cuts == [None, None]:
                module, _, tensor = name.rpartition(".")
                assert module.rsplit(".", 1)[-1] in WHOLE or tensor in ("weight_scale_2", "input_scale"), name
                continue
            numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
            read = Counter(torch.cat([cut(numbers).flatten() for cut in cuts]).tolist())
            assert read == Counter(range(numbers.numel())), name
            for part, cut in zip(parts, cuts, strict=True):
                assert cut(numbers).shape == part.network.weights[name].shape == cut.shape(spec.shape)
                assert cut(numbers).is_contiguous()


def test_gated_norm_of_all_heads_is_divided_and_that_of_one_is_not():
    assert shard(networks("nano")["main"], 0, 2).cuts["layers.0.mixer.norm.weight"].ranges == ((0, 64),)
    assert shard(networks("qwen")["main"], 0, 2).cuts["layers.0.linear_attn.norm.weight"] is None


def test_projections_of_several_parts_keep_their_share_of_each():
    """z, x, B, C and dt of Mamba2 (inner width 128, 2 groups of 16, 8 heads) stand one after the other."""
    cut = shard(networks("nano")["main"], 1, 2).cuts["layers.0.mixer.in_proj.weight"]
    assert cut.ranges == ((64, 128), (192, 256), (272, 288), (304, 320), (324, 328))


@pytest.mark.parametrize(("layout", "sums"), [("nano", 7), ("super", 7), ("qwen", 9), ("qwen_moe", 9)])
def test_one_sum_for_each_mixer_and_feed_forward(layout, sums):
    """And one for the embedding; experts, their latent projection and the shared expert share theirs."""
    ops = Counter(node.op for node in shard(networks(layout)["main"], 0, 2).network.nodes)
    assert ops["all_reduce"] == sums


def test_random_bits_of_a_layer_differ_between_ranks():
    network = networks("nano")["main"]
    layers = [spec.layer for rank in range(2) for spec in shard(network, rank, 2).network.states.values()]
    assert len(set(layers[: len(layers) // 2]) & set(layers[len(layers) // 2 :])) == 0
    assert [spec.layer for spec in shard(network, 0, 2).network.states.values()] == layers[: len(layers) // 2]
    numbers = [spec.number for spec in network.states.values()]
    assert [spec.number for spec in shard(network, 1, 2).network.states.values()] == numbers, "settings go by these"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_divide(name):
    """The last rank of 2, 4 and 8; beside what is whole (Super: latent projections, key heads), it has its share."""
    traced = build_networks(published(name), None)
    for ranks in (2, 4, 8):
        sizes = []
        for network in (traced.main, shard(traced.main, ranks - 1, ranks).network):
            specs = network.weights.values()
            sizes.append(sum(math.prod(spec.shape) * ELEMENT_BITS[spec.dtype] for spec in specs))
        assert 1 / ranks <= sizes[1] / sizes[0] < 1 / ranks + 0.02


@pytest.mark.parametrize(
    ("layout", "module_format", "ranks", "changes", "message"),
    [
        ("nano", "dense", 3, {}, "'main' cannot be divided over 3 ranks: the heads of 'layers.0.ssm' must be"),
        ("nano", "dense", 4, {}, "gated norm 'layers.0.mixer.norm.weight' comes in pieces of 64, .* get 32 elements"),
        ("nano", "dense", 2, {"intermediate_size": 255}, "width of the MLP at .*up_proj.* 2 ranks, got 255"),
        ("nano", "dense", 2, {"num_attention_heads": 3, "num_key_value_heads": 3}, "query heads of .* ranks, got 3"),
        ("qwen", "dense", 4, {"linear_num_key_heads": 3, "linear_num_value_heads": 12}, "must divide, or be"),
        ("qwen_moe", "dense", 2, {"moe_intermediate_size": 33}, "width of .*experts.gate_proj.* multiple .* got 33"),
        ("super", "nvfp4", 2, {"moe_intermediate_size": 48}, "NVFP4 .*down_proj.* pieces of 16, .* get 24 elements"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused(layout, module_format, ranks, changes, message):
    with pytest.raises(ValueError, match=message):
        shard(networks(layout, module_format, **changes)["main"], 0, ranks)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        shard(networks("nano")["main"], 2, 2)
