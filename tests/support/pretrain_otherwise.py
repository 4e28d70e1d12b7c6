"""A user's training script that does what pretrain_gpt.py does not: iterators of its own, a loss of the older kind.

Run where Megatron-LM is first on the path. Its loss function returns (mean, report), with metrics of one value and of
two (a sum and what it is divided by), and its forward step knows no virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args

from tests.support import pretrain_padded

Batch = dict[str, torch.Tensor]


class Numbers:
    """An endless iterator of micro-batches that is no DataLoader; those of a replica differ from another's."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(100 * seed + mpu.get_data_parallel_rank())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        args = get_args()
        shape = (args.micro_batch_size, args.seq_length + 1)
        tokens = torch.randint(0, args.vocab_size, shape, generator=self._generator)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def provide(_num_samples: Any, vp_stage: int | None = None) -> tuple[Numbers, Numbers, None]:
    return Numbers(1), Numbers(2), None


def loss_func(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = losses.float().mean()
    is_even = (labels % 2 == 0).float()
    even = torch.stack([(losses.float() * is_even).sum(), is_even.sum()]).detach()
    report = {
        "lm loss": loss.detach().clone(),
        "largest": losses.detach().max().reshape(1),
        "loss of even tokens": even,
    }
    return loss, report


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    rows, length = batch["tokens"].shape
    positions = torch.arange(length).expand(rows, length)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(loss_func, batch["labels"])


if __name__ == "__main__":
    provide.is_distributed = True  # type: ignore[attr-defined]
    pretrain_padded.pretrain_with(provide, forward_step)
