"""Megatron-LM's pretrain_gpt.py on samples of uneven length as it knows them: every row padded to --seq-length.

Run where Megatron-LM is first on the path. Samples come in the order of planned global batches, so that each step of
Megatron's own schedule takes the samples of a planned step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pretrain_gpt as stock
import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain

from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.executor.drop_in.samples import LabelledSample, SampleSource, open_samples, split_source


class Padded(torch.utils.data.Dataset[Any]):
    """`source` in the order of its global batches, epoch after epoch, as rows of one length."""

    def __init__(self, source: SampleSource, batch_size: int, length: int, seed: int) -> None:
        self.source, self.length = source, length
        batches = [
            GlobalBatches(source.lengths, batch_size=batch_size, seed=seed, epoch=epoch, drop_last=True)
            for epoch in range(4)
        ]
        self.order = [i for epoch in batches for step in range(len(epoch)) for i in epoch[step]]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Any]:
        sample = LabelledSample.of(self.source[self.order[place]])

        def padded(values: Any) -> Any:
            return np.pad(values, (0, self.length - len(values)))

        mask = np.tril(np.ones((1, self.length, self.length), bool))
        return {
            "tokens": padded(sample.tokens),
            "labels": padded(sample.labels),
            "loss_mask": padded(sample.loss_mask),
            "position_ids": np.arange(self.length),
            "attention_mask": ~mask,
        }


def add_data(parser: Any) -> Any:
    parser.add_argument("--padded-data", type=Path)
    return parser


def provide(_num_samples: Any, vp_stage: int | None = None) -> list[Padded | None]:
    args = get_args()
    source = open_samples(args.padded_data)
    parts = split_source(source, args.split)
    return [part and Padded(part, args.global_batch_size, args.seq_length, args.seed) for part in parts]


def pretrain_with(provider: Any, forward_step: Any = stock.forward_step) -> None:
    """By whichever `pretrain` this Megatron-LM has: from 0.18 on the script parses, from 0.19 on it names a model."""
    model: Any = {"get_embedding_ranks": stock.get_embedding_ranks}
    arguments: dict[str, Any] = {
        "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"},
        "extra_args_provider": add_data,
    }
    if hasattr(stock, "gpt_config_from_args"):
        args = stock.parse_and_validate_args(**arguments)
        settings = stock.pretrain_cfg_container_from_args(args, stock.gpt_config_from_args(args))
        pretrain(settings, provider, ModelType.encoder_or_decoder, forward_step, **model)
        return
    build = partial(stock.model_provider, stock.gpt_builder)
    if hasattr(stock, "parse_and_validate_args"):
        settings = stock.pretrain_cfg_container_from_args(stock.parse_and_validate_args(**arguments))
        pretrain(settings, provider, build, ModelType.encoder_or_decoder, forward_step, **model)
    else:
        pretrain(provider, build, ModelType.encoder_or_decoder, forward_step, **arguments, **model)


if __name__ == "__main__":
    provide.is_distributed = True  # type: ignore[attr-defined]
    pretrain_with(provide)
