"""Folders as people have them: a tiny model with a tokenizer and chat template of its own, and data for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support.checkpoints import saved, tiny

VOCABULARY = 320
WORDS = ("hello", "there", "how", "are", "you", "I", "am", "fine", "two", "and", "three", "is", "five")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Message = Mapping[str, str]


def write_model_tokenizer(folder: Path, *, template: str | None = CHATML, starts: bool = True) -> Any:
    """A byte-level BPE of the words above, which puts <s> before a text where it `starts` one; what it is."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    if starts:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def model_folder(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny model of a family, with its tokenizer."""
    lengths = {"n_positions": 128} if family == "gpt2" else {"max_position_embeddings": 128}
    saved(tiny(family, vocab_size=VOCABULARY, **lengths, **changes), folder)
    write_model_tokenizer(folder)
    return folder


def write_chats(path: Path, count: int, *, seed: int = 0) -> Path:
    """Chats of one or two answers, some with a system message."""
    say = _speaker(seed)

    def chat(number: int) -> dict[str, Any]:
        messages: list[Message] = [{"role": "system", "content": say()}] if number % 3 == 0 else []
        for _ in range(1 + number % 2):
            messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
        return {"messages": messages}

    return write_lines(path, [chat(number) for number in range(count)])


def write_pairs(path: Path, count: int, *, seed: int = 0) -> Path:
    say = _speaker(seed)
    return write_lines(path, [{"prompt": say() + " ", "response": say()} for _ in range(count)])


def write_preferences(path: Path, count: int, *, seed: int = 0) -> Path:
    """Pairs of answers to one prompt, whose lengths differ much."""
    say = _speaker(seed)
    return write_lines(
        path,
        [
            {"prompt": say() + " ", "chosen": say(), "rejected": " ".join(say() for _ in range(1 + number % 4))}
            for number in range(count)
        ],
    )


def write_chat_preferences(path: Path, count: int, *, seed: int = 0) -> Path:
    """The same as chats: with the prompt apart, and with a prompt that both begin with."""
    say, records = _speaker(seed), []
    for number in range(count):
        prompt = [{"role": "user", "content": say()}]
        chosen, rejected = ([{"role": "assistant", "content": " ".join(say() for _ in range(n))}] for n in (2, 1))
        apart = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        records.append(apart if number % 2 else {"chosen": prompt + chosen, "rejected": prompt + rejected})
    return write_lines(path, records)


def write_texts(path: Path, count: int, *, seed: int = 0) -> Path:
    say = _speaker(seed)
    return write_lines(path, [{"text": say()} for _ in range(count)])


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _speaker(seed: int) -> Callable[[], str]:
    draw = random.Random(seed)
    return lambda: " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 12)))
