"""Losses of preferences: from the log probabilities of a chosen and a rejected answer to one loss of their pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

import torch
from torch.nn.functional import logsigmoid

from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.joined_ranks import JOINED_KEY, JoinedRanks
from dynapipe_ext.executor.stages.position_losses import LossOfPairs
from dynapipe_ext.settings.tables import PreferenceSettings


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Of n pairs, float64 (n, 2), chosen and rejected: the log probabilities of the answers, summed over their tokens,
    and how many tokens these are."""

    log_probabilities: torch.Tensor
    num_tokens: torch.Tensor

    @classmethod
    def of(cls, losses: torch.Tensor, batch: Batch) -> AnswerSums:
        """Of a micro-batch by its positions' losses; each document is summed alone, so its neighbours change no bit."""
        weights, lengths = batch["loss_weights"].flatten().double(), list(batch["document_lengths"])
        joined: JoinedRanks | None = batch.get(JOINED_KEY)
        if joined is not None:
            lengths = joined.parts_of(lengths, num_rows=len(losses))
        num_documents = 2 * len(batch["pairs"])
        of_document = (losses.flatten().double() * weights).split(lengths)[:num_documents]
        sums = torch.stack([part.sum() for part in of_document])
        counts = torch.stack([part.sum() for part in weights.split(lengths)[:num_documents]])
        if joined is not None:
            sums, counts = joined.summed(torch.stack([sums, counts])).unbind(0)
        return cls(-sums.view(-1, 2), counts.view(-1, 2))

    @property
    def means(self) -> torch.Tensor:
        """Mean log probabilities of a token."""
        return self.log_probabilities / self.num_tokens


class PreferenceLoss:
    """A PositionLoss of pairs of answers: the sum of their losses, to be divided by the number of all pairs.

    With p the log probability of an answer, r that of the reference (the model that the run began with), and m and n
    their means over tokens; sigma is the logistic function, d the difference of chosen and rejected:
    dpo: -(1 - s) log sigma(x) - s log sigma(-x), x = beta d(p - r), s label_smoothing (eq. 7; Mitchell 2023);
    ipo: (d(m - n) - 1 / (2 beta))^2 (eq. 17, with means over tokens as TRL);
    orpo: -m of the chosen answer - beta log sigma(d log odds), odds = e^m / (1 - e^m) (eq. 6 and 7);
    simpo: -log sigma(beta d(m) - gamma) (eq. 6).
    An answer's reward is beta (p - r) for dpo and ipo, and beta m for the others.
    """

    def __init__(self, settings: PreferenceSettings) -> None:
        self.settings = settings
        self._recorded: dict[int, torch.Tensor] | None = None

    @contextmanager
    def recording(self) -> Iterator[dict[int, torch.Tensor]]:
        """Within: forwards put the log probabilities of each pair's answers, (2,), under its index, and the loss is
        minus their sum."""
        recorded: dict[int, torch.Tensor] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def __call__(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor | LossOfPairs:
        sums = AnswerSums.of(losses, batch)
        joined: JoinedRanks | None = batch.get(JOINED_KEY)
        share = float(joined is None or joined.number == 0)  # joined ranks have all of it alike: the first one counts
        if self._recorded is not None:
            if share:
                self._recorded.update(zip(batch["pairs"].tolist(), sums.log_probabilities.detach(), strict=True))
            return -sums.log_probabilities.sum() * share
        of_pairs, rewards = self._of_pairs(sums, batch)
        chosen, rejected = rewards.detach().unbind(1)
        figures = [torch.ones_like(chosen), chosen, rejected, (chosen > rejected).double()]
        return LossOfPairs(of_pairs.sum() * share, torch.stack(figures).sum(1) * share)

    def _of_pairs(self, sums: AnswerSums, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses (n,), and rewards (n, 2) of chosen and rejected answers."""
        settings, beta = self.settings, self.settings.used_beta
        match settings.loss:
            case "dpo":
                rewards = beta * (sums.log_probabilities - _references(batch))
                margin, smoothing = _difference(rewards), settings.label_smoothing
                return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin), rewards
            case "ipo":
                ratios = sums.log_probabilities - _references(batch)
                return (_difference(ratios / sums.num_tokens) - 1 / (2 * beta)) ** 2, beta * ratios
            case "orpo":
                means = sums.means
                log_odds = means - torch.log(-torch.expm1(means))
                return -means[:, 0] - beta * logsigmoid(_difference(log_odds)), beta * means
            case "simpo":
                rewards = beta * sums.means
                return -logsigmoid(_difference(rewards) - settings.gamma), rewards
            case "":
                raise AssertionError("a run without preferences has another loss")
            case _:
                assert_never(settings.loss)


def _difference(of_answers: torch.Tensor) -> torch.Tensor:
    return of_answers[:, 0] - of_answers[:, 1]


def _references(batch: Batch) -> torch.Tensor:
    if "references" not in batch:
        raise DataError(
            "a loss that compares with a reference has none for these pairs: give samples with `references`, the log"
            " probabilities that the first model gives their answers"
        )
    references: torch.Tensor = batch["references"]
    return references
