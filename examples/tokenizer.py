"""A byte-level BPE tokenizer for the tasks: every digit is its own token."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples import tasks

VOCAB_SIZE = 768
PAD, BEGIN, END, USER, ASSISTANT = 0, 1, 2, 3, 4
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")

# A system message is accepted and dropped: the models never saw one.
CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- '<|user|>' + message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' + message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(problems_per_tier: int = 1500) -> Tokenizer:
    """Learn the merges on training problems; the result depends on this file and tasks.py alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = (
        text
        for tier in tasks.TIERS
        for seed in range(problems_per_tier)
        for problem in [tasks.generate(tier, "train", seed)]
        for text in (problem.question[:600], problem.working)
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The files of an ordinary Hugging Face tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BEGIN],
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[PAD],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")


def prompt_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The chat template of one user turn, as token ids."""
    return [BEGIN, USER, *tokenizer.encode(question, add_special_tokens=False).ids, ASSISTANT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    save_tokenizer(train_tokenizer(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
