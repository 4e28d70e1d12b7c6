"""The loop of a training run, with a model of one layer in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import NotFiniteError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.events import AllRanks, EvalDone, Listener, RankFigures, StepDone
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.training_loop import (
    ExecutedStep,
    LoopHooks,
    LoopSettings,
    PeriodicEvaluation,
    SpanRecorder,
    StepExecutors,
    train_steps,
)
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.models.flops import Positions, Work
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.tables import EvalSettings

NUM_STEPS = 8


class Samples:
    """Epochs of three global batches of four."""

    lengths = np.array([5, 9, 3, 12, 7, 4, 10, 6, 8, 11], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        return TokenSample(index, np.arange(self.lengths[index] + 1) * (index + 1) % 16, 1)


@dataclass
class Run:
    """A model with all that trains it."""

    model: Any = field(default_factory=lambda: torch.nn.Embedding(16, 16))
    lr: float = 0.1

    def __post_init__(self) -> None:
        stage = TorchStage({0: lambda tokens, _: self.model(tokens)}, _loss_sum, parameters=self.model.parameters())
        self.recorder = SpanRecorder()
        transport = InlineHub().transport(0)
        plain, traced = (PipelineExecutor(stage, transport, recorder=seen) for seen in (None, self.recorder))
        self.executors = StepExecutors(plain=plain, traced=traced, recorder=self.recorder)
        planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, format=ActivationFormat(16))
        self.loader = DynaPipeDataLoader(Samples(), planner, batch_size=4, shuffle=True, seed=3)
        self._sgd = torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def step(self, executed: ExecutedStep) -> float:
        self._sgd.step()
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))

    def train(
        self,
        *listeners: Listener,
        log_every: int = 1,
        traced_steps: int = 0,
        between: Any = lambda: None,
        evaluate: Any = lambda step: None,
    ) -> None:
        settings = LoopSettings(num_steps=NUM_STEPS, log_every=log_every, traced_steps=traced_steps)
        for _ in train_steps(self.loader, self.executors, self, settings, listeners, LoopHooks(evaluate=evaluate)):
            between()


def _loss_sum(logits: Any, batch: Any) -> Any:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_weights"].flatten()).sum()


class Kept:
    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def step_done(self, done: StepDone) -> None:
        self.steps.append(done)

    def close(self) -> None: ...


@dataclass
class SavedAt:
    """What a checkpoint would keep of step `number`."""

    run: Run
    number: int
    model: Any = None
    loader: Any = None

    def step_done(self, done: StepDone) -> None:
        if done.number == self.number:
            self.model, self.loader = copy.deepcopy(self.run.model), self.run.loader.state_dict()

    def close(self) -> None: ...


def facts(steps: list[StepDone]) -> list[tuple[Any, ...]]:
    return [(s.step, s.epoch, s.epoch_step, s.loss, s.grad_norm, s.real_tokens, s.num_micro_batches) for s in steps]


@pytest.mark.parametrize("number", [1, 3, 5, NUM_STEPS])  # in mid-epoch, at an epoch's end, and with nothing left
def test_a_loop_goes_on_anywhere_with_the_numbers_and_losses_of_one_that_never_stopped(number: int) -> None:
    whole, run = Kept(), Run()
    saved = SavedAt(run, number)
    run.train(whole, saved)
    assert [(s.step, s.epoch, s.epoch_step) for s in whole.steps] == [(n, n // 3, n % 3) for n in range(NUM_STEPS)]
    resumed, rest = Run(model=saved.model), Kept()
    resumed.loader.load_state_dict(saved.loader)
    resumed.train(rest)
    assert facts(rest.steps) == facts(whole.steps[number:])


def test_figures_are_gathered_every_log_every_steps_at_traced_ones_and_at_the_last() -> None:
    often, seldom = Kept(), Kept()
    Run().train(often)
    Run().train(seldom, log_every=3, traced_steps=1)
    together = [(s.number, s.all_ranks) for s in seldom.steps if s.all_ranks]
    assert [(number, ranks.num_steps) for number, ranks in together] == [(3, 3), (6, 3), (8, 2)]
    assert [ranks.bubble_ratio is None for _, ranks in together] == [True, True, False]
    works = [sum((s.all_ranks.work for s in kept.steps if s.all_ranks), Work()) for kept in (often, seldom)]
    assert works[0] == works[1]
    assert works[0].real.encoder == sum(s.real_tokens for s in often.steps)
    assert [bool(s.spans) for s in seldom.steps] == [False] * 7 + [True]
    assert min(span.start_s for span in seldom.steps[-1].spans) == 0
    for done in often.steps:
        assert done.all_ranks is not None
        assert done.all_ranks.cpu_s == done.cpu_s
        assert 0 < done.executed_s <= done.step_s


def test_evaluations_have_no_dropout_leave_training_alone_and_are_told_with_their_steps() -> None:
    def run(*, evaluated: bool) -> Kept:
        torch.manual_seed(5)
        kept, one = Kept(), Run(torch.nn.Sequential(torch.nn.Embedding(16, 16), torch.nn.Dropout(0.5)))
        planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, format=ActivationFormat(16))
        loader = DynaPipeDataLoader(Samples(), planner.for_forwards(), batch_size=3, shuffle=True)
        every = EvalSettings(every=3, fraction=0.5)
        evaluation = PeriodicEvaluation(one.executors.plain, loader, [one.model], every, num_steps=NUM_STEPS)
        frozen, wanted = one.model[0].eval(), []

        def alone(step: int) -> EvalDone | None:
            done = evaluation(step)
            if done is not None:
                assert one.model.training
                assert not frozen.training
                wanted.append((step, pytest.approx(_loss_of(one.model), rel=1e-5)))
            return done

        for _ in train_steps(
            one.loader,
            one.executors,
            one,
            LoopSettings(num_steps=NUM_STEPS),
            [kept],
            LoopHooks(evaluate=alone) if evaluated else LoopHooks(),
        ):
            pass
        told = [done.evaluation for done in kept.steps if done.evaluation]
        assert [(done.step, done.loss) for done in told] == wanted
        assert {(done.num_samples, done.real_tokens) for done in told} <= {(10, int(Samples.lengths.sum()))}
        assert [done.number for done in told] == ([3, 6, 8] if evaluated else [])
        return kept

    assert [done.loss for done in run(evaluated=True).steps] == [done.loss for done in run(evaluated=False).steps]


def test_what_is_done_between_two_steps_and_an_evaluation_are_in_no_figure_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, kept = [0.0], Kept()
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"dynapipe_ext.executor.training_loop.time.{clock}", lambda: now[0])

    def pause(*_: int) -> EvalDone:
        now[0] += 100.0
        return EvalDone(step=0, loss=0.0, real_tokens=1, num_samples=1, seconds=100.0)

    Run().train(kept, between=pause, evaluate=pause)
    assert len(kept.steps) == NUM_STEPS
    assert {(done.step_s, done.cpu_s) for done in kept.steps} == {(0.0, 0.0)}


def test_every_evaluation_takes_the_same_batches() -> None:
    run = Run()
    planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, format=ActivationFormat(16))
    with DynaPipeDataLoader(Samples(), planner.for_forwards(), batch_size=3, shuffle=True) as loader:
        settings = EvalSettings(every=1, steps=2, fraction=0.5)
        evaluation = PeriodicEvaluation(run.executors.plain, loader, [run.model], settings, num_steps=NUM_STEPS)
        first, again = evaluation(0), evaluation(1)
    assert first is not None
    assert again is not None
    assert (again.loss, again.real_tokens, again.num_samples) == (first.loss, first.real_tokens, 6)


def test_an_evaluation_is_left_out_after_the_batch_in_which_the_run_was_asked_to_end() -> None:
    run, asked = Run(), []
    planner = Planner(Topology(), TokenCosts(num_stages=1), memory_limit_bytes=1e9, format=ActivationFormat(16))

    def is_ending(step: int) -> bool:
        asked.append(step)
        return len(asked) == 2

    with DynaPipeDataLoader(Samples(), planner.for_forwards(), batch_size=2) as loader:
        evaluation = PeriodicEvaluation(
            run.executors.plain, loader, [run.model], EvalSettings(every=1), num_steps=9, is_ending=is_ending
        )
        assert evaluation(4) is None
        assert asked == [4, 4]  # of more batches
        assert run.model.training
        assert evaluation(5) is not None


def test_a_step_that_ends_the_run_says_where_the_loader_was_before_it() -> None:
    kept, stopped = Kept(), []
    run = Run()

    class Ends:
        lr = 0.1

        def step(self, executed: ExecutedStep) -> float:
            if executed.plan.step == 4:
                raise NotFiniteError("step 5 is not finite")
            return run.step(executed)

    hooks = LoopHooks(stops=lambda place, why: stopped.append((place, why)))
    with pytest.raises(NotFiniteError):
        for _ in train_steps(run.loader, run.executors, Ends(), LoopSettings(num_steps=NUM_STEPS), [kept], hooks):
            pass
    assert [done.number for done in kept.steps] == [1, 2, 3, 4]
    other = Run()
    place, why = stopped[0]
    assert why == "step 5 is not finite"
    other.loader.load_state_dict(place)
    assert next(iter(other.loader))[1].step == 4


def _loss_of(model: Any) -> float:
    """Over target tokens, one sample at a time, without dropout."""
    total, samples = 0.0, Samples()
    for sample in map(samples.__getitem__, range(len(samples))):
        tokens = torch.from_numpy(sample.tokens)
        logits = model[0](tokens[:-1]).detach()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return total / int(samples.lengths.sum())


def test_listeners_are_told_in_order_and_one_that_fails_ends_the_run() -> None:
    first, last = Kept(), Kept()

    class Full:
        def step_done(self, done: StepDone) -> None:
            if done.number == 2:
                raise OSError("the disk is full")

        def close(self) -> None: ...

    with pytest.raises(OSError, match="full"):
        Run().train(first, Full(), last)
    assert ([s.number for s in first.steps], [s.number for s in last.steps]) == ([1, 2], [1])


def figures(**changes: Any) -> RankFigures:
    given: dict[str, Any] = {
        "busy_s": 0.5,
        "start_s": 10.0,
        "end_s": 11.0,
        "cpu_s": 0.25,
        "predicted_makespan_s": 1.0,
        "predicted_bubble_ratio": 0.5,
        "predicted_peak_bytes": 2**40 + 1,
        "peak_bytes": 7,
        "exposed_planning_s": 0.125,
        "work": Work(Positions(3, 0, 9), {"full": Positions(8, 0, 64)}),
    }
    return RankFigures(**(given | changes))


def test_figures_that_are_gathered_arrive_as_they_were() -> None:
    mine = figures(start_s=float("inf"), end_s=float("-inf"))
    sent = torch.tensor(mine.numbers(), dtype=torch.float64)
    assert RankFigures.from_numbers(sent.tolist()) == mine


def test_all_ranks_together_are_as_long_as_from_the_first_start_to_the_last_end() -> None:
    idle = figures(busy_s=0.0, start_s=float("inf"), end_s=float("-inf"), predicted_makespan_s=0.0, work=Work())
    ranks = [figures(), figures(start_s=10.5, end_s=12.0, busy_s=1.5, predicted_makespan_s=2.0), idle]
    together = AllRanks.of(ranks, num_steps=4)
    assert (together.makespan_s, together.predicted_makespan_s) == (2.0, 2.0)
    assert together.bubble_ratio == pytest.approx(1 - 2.0 / (3 * 2.0))
    assert together.predicted_bubble_ratio == pytest.approx(1 - 1.5 / (3 * 2.0))
    assert (together.cpu_s, together.work.real.encoder, together.num_steps) == (0.75, 6, 4)
    assert together.peak_bytes == (7, 7, 7)
    unknown = AllRanks.of([figures(busy_s=float("nan")), figures()], num_steps=1)
    assert unknown.bubble_ratio is None
