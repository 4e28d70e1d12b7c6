"""What to try next: other settings, planned on the last batches of a run that has ended, with the gain of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynapipe_ext.batch.micro_batches import LengthArray, SampleLength, sample_lengths
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch.job.configured import architecture_of, global_batches, make_planner
from dynapipe_ext.launch.job.requested import refuse_settings
from dynapipe_ext.launch.job.run_costs import costs_of_settings
from dynapipe_ext.launch.job.run_data import refuse_pieces
from dynapipe_ext.launch.job.settled import SettledJob
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.run_words import NextMove

_CPU_S = 2.0  # for all trials; the first one decides how many others there is time for
_MOST_BATCHES = 2
_EFFORT = 500
_LEAST_GAIN = 0.01

_Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings to try, and `num_batches` of the run's that a step then takes."""

    flags: str
    words: str
    tables: _Tables
    num_batches: int = 1


def _changes(config: TrainConfig, *, tied_embeddings: bool) -> Iterator[_Change]:
    """Those that the run does not have already, the likeliest to help first."""
    plan, topology = config.plan, config.topology
    if plan.schedule != "adaptive":
        yield _Change(
            "--schedule adaptive", "a searched order instead of a table's", {"plan": {"schedule": "adaptive"}}
        )
    elif topology.pp > 1:
        for name in ("v", "interleaved"):
            if topology.placement != name:
                placed: dict[str, Any] = {"placement": name, "layers_per_stage": []}
                yield _Change(f"--placement {name}", "two stages a rank, so less waiting", {"topology": placed})
    if not plan.split_backward and topology.pp > 1 and plan.schedule == "adaptive":
        yield _Change("--split-backward", "weight gradients fill waits", {"plan": {"split_backward": True}})
    if topology.pp > 1 and topology.vocabulary_parallel == "whole":
        spread = "both" if tied_embeddings else "head"
        words = "the head's rows over all pipeline ranks, so stages are even"
        yield _Change(f"--vocabulary-parallel {spread}", words, {"topology": {"vocabulary_parallel": spread}})
    if plan.layout == "padded":
        yield _Change("--layout packed", "documents end to end, almost no padding", {"plan": {"layout": "packed"}})
    if plan.pieces == "off":
        yield _Change("--pieces auto", "long samples in parts, one after the other", {"plan": {"pieces": "auto"}})
    if plan.max_tokens:
        longer = {"max_tokens": 2 * plan.max_tokens}
        yield _Change(f"--max-tokens {2 * plan.max_tokens}", "a longer row", {"plan": longer})
    more_gb = 2 * plan.memory_limit_gb
    yield _Change(f"--memory-limit-gb {more_gb:g}", "room for more at once", {"plan": {"memory_limit_gb": more_gb}})
    if tokens := config.data.tokens_per_batch:
        words = "more micro-batches a step; it also changes what is learned"
        yield _Change(f"--tokens-per-batch {2 * tokens}", words, {"data": {"tokens_per_batch": 2 * tokens}}, 2)


def next_moves(
    job: SettledJob, costs: CostModel, steps: Sequence[StepDone], *, cpu_s: Callable[[], float] = time.process_time
) -> tuple[list[NextMove], int]:
    """The changes that are predicted to be faster, the best first, and how many were tried within _CPU_S.

    All are planned alike, by a short search on the last batches of the run, with the costs before any fit, and proven.
    What settings, data or memory do not allow is left out.
    """
    batches = _batches(job.config, job.data.train.lengths, steps)
    begun_s, longest_s, num_tried = cpu_s(), 0.0, 0
    base_s = _seconds_a_token(job, costs, _Change("", "", {}), batches)
    moves = []
    tied_embeddings = architecture_of(job.config, job.data.whole.vocab_size).tied_embeddings
    for change in _changes(job.config, tied_embeddings=tied_embeddings) if base_s else ():
        start_s = cpu_s()
        longest_s = max(longest_s, (start_s - begun_s) / (num_tried + 1))
        if start_s - begun_s + longest_s > _CPU_S:
            break
        trial_s = _seconds_a_token(job, costs, change, batches)
        longest_s, num_tried = max(longest_s, cpu_s() - start_s), num_tried + 1
        if base_s and trial_s and base_s / trial_s - 1 >= _LEAST_GAIN:
            moves.append(NextMove(change.flags, change.words, base_s / trial_s - 1))
    return sorted(moves, key=lambda move: -move.gain), num_tried


def _batches(config: TrainConfig, lengths: LengthArray, steps: Sequence[StepDone]) -> list[list[SampleLength]]:
    """The samples of the last steps, all of one epoch."""
    last = [done for done in steps[-_MOST_BATCHES:] if done.epoch == steps[-1].epoch]
    of_epoch = global_batches(config, lengths, last[0].epoch, drop_last=config.data.drop_last) if last else ()
    return [list(sample_lengths(lengths, of_epoch[done.epoch_step])) for done in last]


def _seconds_a_token(
    job: SettledJob, costs: CostModel, change: _Change, batches: Sequence[Sequence[SampleLength]]
) -> float | None:
    """Predicted seconds a token under changed settings; None where they cannot be."""
    if len(batches) < change.num_batches:
        return None
    joined = [[s for batch in batches for s in batch]] if change.num_batches > 1 else batches
    try:
        config = job.config.with_values(**change.tables)
        config = replace(config, plan=replace(config.plan, effort=min(_EFFORT, config.plan.effort)))
        refuse_settings(config, compare=False)
        refuse_pieces(config, job.data, compare=False)
        priced = costs_of_settings(
            config, adjust(costs, fitted=None), "the run", vocab_size=job.data.whole.vocab_size, on_host=False
        )
        planner = make_planner(config, priced, job.planning.num_cores)
        makespans_s = [prove_step(planner, samples, step=0).step_plan.makespan_s for samples in joined]
    except DynaPipeError:
        return None
    return sum(makespans_s) / sum(sample.tokens for samples in joined for sample in samples)
