"""A language model's head in parts, one a stage: rows of the vocabulary that a chain of stages goes through.

A part adds its logits to two numbers of every position: the log of the sum of exponentials over all parts so far, and
the target's logit (0 before the part that has it). Hidden states go on as they came. The last part's loss is their
difference. Backwards are gradients of these numbers, so that each part's weight is a stage's own, and no sum goes over
ranks: each later part multiplies the gradient by exp(lse before it - lse behind it), and the product of these factors
is this part's share of the softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.chunk_runner import HEAD_SLICE_KEY, HeadSlices
from dynapipe_ext.executor.stages.sliced_head import Head, head_stats_in_slices, stats_of_logits

Message = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states; lse and target, of the shape of labels
Logits = Callable[[torch.Tensor], torch.Tensor]  # of hidden states, in float32 or float64 and not used again
_IGNORED = -100  # as torch's cross-entropy has it


def head_part(
    x: torch.Tensor,
    before: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    head: Head,
    *,
    slice_len: int | None = None,
    logits: Logits | None = None,
) -> Message:
    """What stages behind are sent: `x` itself, (*labels.shape, hidden size), and its two numbers of every position.

    `before`: lse and target of the parts before; nothing for the first. With `slice_len` at most a slice of the logits
    exists; without, those that `logits` makes (None: the head itself), which backwards keep. Where ranks of the head's
    group divide the sequence, numbers are of all of its positions.
    """
    if slice_len is not None:
        stats = head_stats_in_slices(x, labels, head, slice_len=slice_len)
    else:
        whole = (logits or head.logits)(x).flatten(0, -2)
        most, log_sums, target = (one.view(labels.shape) for one in stats_of_logits(whole, labels.reshape(-1), head))
        stats = most, log_sums, target
    most, log_sums, target = stats
    lse = most + log_sums
    if before:
        lse_before, target_before = before
        lse, target = torch.logaddexp(lse_before, lse), target_before + target
    return x, lse, target


def spread_losses(message: Message, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every position, of the last part's message; 0 of a label -100."""
    _, lse, target = message
    return (lse - target).masked_fill(labels == _IGNORED, 0.0)


def spread_loss_sum(message: Message, batch: Batch) -> torch.Tensor:
    """The weighted sum of cross-entropies: the loss of a TorchStage whose modules end in VocabularyPart."""
    total: torch.Tensor = (spread_losses(message, batch["labels"]) * batch["loss_weights"]).sum()
    return total


class VocabularyPart(torch.nn.Module):
    """One of `num_parts` equal parts of a head of `vocab_size` rows; the last parts may be padding, in part or all.

    A stage of TorchStage, or the end of one: maps hidden states (rows, length, hidden size), and what the part before
    says of them, to what the next part takes. Logits are whole, or in slices where the plan says so.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, part: int, num_parts: int, bias: bool = False, softcap: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= part < num_parts:
            raise ConfigError(f"part {part} of a vocabulary in {num_parts} parts: give one of 0..{num_parts - 1}")
        num_rows = -(-vocab_size // num_parts)
        self.linear = torch.nn.Linear(hidden_size, num_rows, bias=bias)
        self.first_id, self.num_ids = part * num_rows, min(num_rows, max(0, vocab_size - part * num_rows))
        self.softcap = softcap

    def forward(
        self, x: torch.Tensor, lse: torch.Tensor | None = None, target: torch.Tensor | None = None, *, batch: Batch
    ) -> Message:
        head = Head(
            weight=self.linear.weight,
            bias=self.linear.bias,
            softcap=self.softcap,
            first_id=self.first_id,
            num_ids=self.num_ids,
            is_part=True,
        )
        slices: HeadSlices | None = batch.get(HEAD_SLICE_KEY)
        return head_part(
            x,
            () if lse is None or target is None else (lse, target),
            batch["labels"],
            head,
            slice_len=None if slices is None else slices.take(),
            logits=lambda x: head.logits_of(self.linear(x).flatten(0, -2)),  # its weight gradient may be put off
        )
