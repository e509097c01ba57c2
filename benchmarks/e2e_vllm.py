"""Decode steps of an installed vLLM with dummy weights of a published shape, for a line beside `e2e_decode_speedup`.

    python benchmarks/e2e_vllm.py --model nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16 --batch-size 256
    python benchmarks/e2e_vllm.py --model nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16 --replay

A step's time is the difference of two generations of different lengths, so that prompts and start-up cancel. vLLM keeps
its own best settings: compiled, CUDA graphs, asynchronous scheduling; prefix caching is off because no prompt repeats.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from e2e_results import E2eResults, device_of

from replayssm.builders.config import PUBLISHED, published, published_config


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="published name")
    parser.add_argument("--batch-size", type=int, action="append", help="may be given several times; default 256")
    parser.add_argument("--num-steps", type=int, default=256, help="steps that are timed; default 256")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--state-dtype", default="float32", help="vLLM's mamba_ssm_cache_dtype; default float32")
    parser.add_argument("--replay", action="store_true", help="vLLM's own replay decode (Nemotron-H, 0.27 and later)")
    parser.add_argument("--buffer-len", type=int, default=16, help="L of --replay; default 16")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="also draw the run's lines, as SVG")
    parser.add_argument("--output", type=Path)
    parser.set_defaults(default_batch_sizes=[256])
    return parser.parse_args(arguments)


def text_config(name: str) -> dict:
    """The published configuration without a wrapper for images, which the text model runs without."""
    config = published_config(name)
    if "text_config" not in config:
        return config
    architectures = [one.replace("ForConditionalGeneration", "ForCausalLM") for one in config["architectures"]]
    return {**config["text_config"], "architectures": architectures}


def engine_arguments(options: argparse.Namespace) -> dict:
    """Arguments of vllm.LLM but for the model; also sets what vLLM reads from the environment."""
    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": options.state_dtype,
        "max_model_len": options.prompt_len + options.num_steps + 16,
        "max_num_seqs": max(options.batch_size),
        "enable_prefix_caching": False,
        "seed": options.seed,
    }
    if options.replay:
        arguments |= {"use_replayssm": True, "replayssm_buffer_len": options.buffer_len, "mamba_backend": "triton"}
        # The second model runner of 0.3x refuses the replay kernel that is written in Triton.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    return arguments | options.engine_args


def step_seconds(llm, sampling_params, prompts: list[dict], options: argparse.Namespace) -> list[float]:
    """Seconds per decode step of every repeat."""

    def generation(count: int) -> float:
        params = sampling_params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {count}:
            raise RuntimeError(f"vLLM generated {sorted(lengths)} tokens instead of {count}")
        return seconds

    generation(8)
    return [(generation(8 + options.num_steps) - generation(8)) / options.num_steps for _ in range(options.repeats)]


def main(arguments: list[str] | None = None) -> Path:
    options = parse(arguments)
    device_of(options)
    engine = engine_arguments(options)
    import vllm

    config = published(options.model)
    short = {value: key for key, value in PUBLISHED.items()}.get(options.model, options.model)
    results = E2eResults("e2e_decode_speedup", options)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(text_config(options.model)), encoding="utf-8")
        llm = vllm.LLM(model=folder, **engine)
        generator = torch.Generator().manual_seed(options.seed)
        for batch in options.batch_size:
            shape = (batch, options.prompt_len)
            tokens = torch.randint(config.vocab_size, shape, generator=generator).tolist()
            prompts = [{"prompt_token_ids": row} for row in tokens]
            times = sorted(step_seconds(llm, vllm.SamplingParams, prompts, options))
            median = times[len(times) // 2]
            results.add(
                op="decode_step",
                geometry=short,
                batch=batch,
                window=1,
                state_dtype=options.state_dtype,
                readout_dtype="same",
                L=options.buffer_len if options.replay else 0,
                fill="natural",
                variant=f"vllm {vllm.__version__}{' replay' if options.replay else ''}",
                random_weights=True,
                layers=len(config.layers),
                layers_total=len(config.layers),
                median_us=round(1e6 * median, 1),
                p10_us=round(1e6 * times[0], 1),
                p90_us=round(1e6 * times[-1], 1),
                tokens_per_s=round(batch / median, 1),
                speedup=1.0,
                context=[options.prompt_len, options.prompt_len + options.num_steps + 8],
                correct=True,  # the number of tokens (step_seconds): of random weights there is no right text
            )
    return results.close()


if __name__ == "__main__":
    main()
