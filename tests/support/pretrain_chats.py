"""Megatron-LM's pretrain_gpt.py with --sft, by a tokenizer that needs no package: a token a byte, prompts masked.

Run where Megatron-LM is first on the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

IGNORED = -100


class ByteChats:
    """As Megatron-LM's SFT tokenizers are asked."""

    eod = 256

    def tokenize_conversation(
        self, messages: Sequence[Mapping[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[Any, Any]:
        assert return_target
        assert not add_generation_prompt
        texts = [message["content"].encode() for message in messages]
        targets = [
            np.full(len(text), IGNORED) if message["role"] != "assistant" else np.frombuffer(text, np.uint8)
            for message, text in zip(messages, texts, strict=True)
        ]
        return np.frombuffer(b"".join(texts), np.uint8), np.concatenate(targets)


if __name__ == "__main__":
    import pretrain_gpt as stock
    from megatron.training import training

    from tests.support.pretrain_padded import pretrain_with

    training.get_tokenizer = ByteChats
    stock.train_valid_test_datasets_provider.is_distributed = True
    pretrain_with(stock.train_valid_test_datasets_provider)
