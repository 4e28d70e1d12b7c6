"""Drift: what a step's actions took beside what its costs predicted, and new costs where that is far off.

spans of each rank ─► MeasuredActions ─► DriftingShape in the step's figures
                           └─ adapts: of all ranks, on rank 0 ─► FittedTimes ─► all ranks, from the next step on
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple

from dynapipe_ext.costs.adjustments import adjust, find_fitted_times, list_times
from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.fitting import MeasuredAction, find_prediction_error, fit_times
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.executor.events import CostsFit
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.timeline import Span

_FIRST_FIT, _OBSERVED_STEPS = 4, 3  # fits are after steps 4, 8, 16 …: each stops the planners for a second
_LARGE = 0.2  # of the measured time: below, plans change little
_MUCH_BETTER = 0.7  # of the error before: what chance varies from step to step, no costs predict
_LABEL = re.compile(r"(\d+)([FBIW])(\d+)")


def measured_actions(
    plan: ExecutionPlan, spans: Sequence[Span], costs: CostModel, *, in_cpu_s: bool
) -> tuple[MeasuredAction, ...]:
    """The spans of a step of one rank beside what `costs`, with which it was planned, say of them."""
    if not spans:
        return ()
    costs = costs.at_width(plan.width)
    predicted = list_times(costs.evaluate(plan.micro_batches))
    fitted_from = adjust(costs, fitted=None)
    before = predicted if fitted_from is costs else list_times(fitted_from.evaluate(plan.micro_batches))
    actions = []
    for span in spans:
        label = _LABEL.fullmatch(span.label)
        assert label is not None, span.label
        stage, letter, m = int(label[1]), label[2], plan.micro_batches[int(label[3])]
        base_ns, predicted_ns = (int(table[letter][stage, int(label[3])]) for table in (before, predicted))
        measured_ns = round(1e9 * (span.cpu_s if in_cpu_s else span.duration_s))
        shape = m.rows, m.encoder_len, m.decoder_len
        tokens, squares = (-(-count // plan.width) for count in count_positions(m))
        actions.append(
            MeasuredAction(stage, letter, m.recompute, shape, tokens, squares, base_ns, predicted_ns, measured_ns)
        )
    return tuple(actions)


class CostWatch:
    """The costs that a run plans with, and how far measured times are from them. All ranks call it alike, each with
    its own spans.

    `in_cpu_s`: on ranks that share cores, actions are measured in CPU seconds. With `adapts`, costs are fitted again
    after steps 4, 8, 16 and so on (never to a process's first step), if measured times differ by more than a fifth and
    fitted costs are much closer. `gather(bytes, name)` gives rank 0 the bytes of all ranks, and the others nothing;
    `share(bytes, name)` gives rank 0's to all; errors have the name. `adopt(step, costs)` takes new costs, from the
    plan of `step` on.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        in_cpu_s: bool = False,
        adapts: bool = False,
        gather: Callable[[bytes, str], list[bytes]] = lambda mine, what: [mine],
        share: Callable[[bytes, str], bytes] = lambda mine, what: mine,
        adopt: Callable[[int, CostModel], None] = lambda step, costs: None,
    ) -> None:
        self.costs = costs
        self._in_cpu_s, self._adapts = in_cpu_s, adapts
        self._gather, self._share, self._adopt = gather, share, adopt
        self._is_warm = False
        self._observed: list[MeasuredAction] = []

    def records(self, step: int) -> bool:
        """Whether it needs the spans of a step, which on accelerators cost time."""
        fit = next_fit(step)
        return self._adapts and fit - _OBSERVED_STEPS <= step

    def seen(self, plan: ExecutionPlan, spans: Sequence[Span]) -> tuple[MeasuredAction, ...]:
        """The actions of a step that has run."""
        actions = measured_actions(plan, spans, self.costs, in_cpu_s=self._in_cpu_s)
        if self._is_warm and self.records(plan.step):
            self._observed += actions
        self._is_warm = True
        return actions

    def fit(self, step: int) -> CostsFit | None:
        """New costs after a step, if it is time for them and they are worth it; the same on all ranks."""
        if not self._adapts or step + 1 != next_fit(step):
            return None
        mine, self._observed = self._observed, []
        measured = json.dumps([astuple(action) for action in mine]).encode()
        ranks = self._gather(measured, f"step {step}, times of actions on all ranks")
        fit = fitted_costs([_action(raw) for rank in ranks for raw in json.loads(rank)], self.costs)
        message = json.dumps(fit and [cost_model_to_json(fit[0]), *astuple(fit[1])])
        shared = json.loads(self._share(message.encode(), f"step {step}, costs that rank 0 has fitted"))
        if shared is None:
            return None
        self.costs = cost_model_from_json(shared[0])
        self._adopt(step + 1, self.costs)
        return CostsFit(*shared[1:])


def next_fit(step: int) -> int:
    """How many steps the run has done when costs may be fitted next, step `step` (from 0) being one of them.

    >>> [next_fit(step) for step in (0, 3, 4, 7, 8, 16)]
    [4, 4, 8, 8, 16, 32]
    """
    return max(_FIRST_FIT, 1 << step.bit_length())


def fitted_costs(actions: Sequence[MeasuredAction], costs: CostModel) -> tuple[CostModel, CostsFit] | None:
    """Costs fitted to actions, where those that these were planned with are far off and the fit is much closer."""
    measured = [action for action in actions if action.measured_ns > 0]
    if not measured:
        return None
    new_costs = fit_times(costs, measured)
    times = find_fitted_times(new_costs)
    assert times is not None
    errors = CostsFit(*find_prediction_error(times, measured))
    worth_it = errors.error_before > _LARGE and errors.error_after < _MUCH_BETTER * errors.error_before
    return (new_costs, errors) if worth_it else None


def _action(raw: list[object]) -> MeasuredAction:
    stage, letter, recompute, shape, *numbers = raw
    return MeasuredAction(stage, letter, recompute, tuple(shape), *numbers)  # type: ignore[arg-type]
