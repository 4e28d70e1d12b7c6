"""Schedules as CSV in torch.distributed.pipelining's compute-only form: a row a pipeline rank, a cell an action."""

from __future__ import annotations

import csv
import io

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, PipelineSchedule

_LONGEST_CELL = 32  # characters; far above any action


def to_csv(schedule: PipelineSchedule) -> str:
    """The schedule as torch's `_load_csv` reads it. Where stages lie follows from the actions; the name is left out.

    >>> from dynapipe_ext.schedules.tables.zero_bubble import zb_h1
    >>> print(to_csv(zb_h1(2, 1)), end="")
    0F0,0I0,0W0
    1F0,1I0,1W0
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str, name: str = "schedule") -> PipelineSchedule:
    """The schedule of `to_csv`, or of torch's `_dump_csv`, whose empty cells (steps without work) are passed over.

    Stages lie on the ranks whose rows name them. The order is not proven to run: see validate.

    Errors: PlanError naming row and cell (both from 1): no action, one that occurs twice, a stage on two ranks; or the
    stages that no row names.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n").lines()
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    ranks = []
    seen: dict[Action, str] = {}
    stage_ranks: dict[int, tuple[int, str]] = {}
    for rank, row in enumerate(_rows(text)):
        actions = []
        for column, cell in enumerate(row, 1):
            if not (word := cell.strip()):
                continue
            where = f"row {rank + 1}, cell {column}"
            action = _action(word, where)
            if action in seen:
                raise PlanError(f"{where}: action {action} stands in {seen[action]} already")
            seen[action] = where
            first_rank, first = stage_ranks.setdefault(action.stage, (rank, where))
            if first_rank != rank:
                raise PlanError(f"{where}: {action} puts stage {action.stage} on a second rank, after that of {first}")
            actions.append(action)
        ranks.append(tuple(actions))
    if not stage_ranks:
        raise PlanError("the text has no action: give a row for each pipeline rank, such as '0F0,0B0'")
    num_stages = max(stage_ranks) + 1
    if len(stage_ranks) < num_stages:
        missing = next(stage for stage in range(num_stages) if stage not in stage_ranks)
        highest = stage_ranks[num_stages - 1][1]
        raise PlanError(
            f"{highest} names stage {num_stages - 1} but no row has an action of stage {missing}: number stages from 0"
            " without gaps"
        )
    return PipelineSchedule(name, tuple(ranks), tuple(stage_ranks[stage][0] for stage in range(num_stages)))


def _rows(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        rows += reader
    except csv.Error as error:
        raise PlanError(f"row {len(rows) + 1}: {error}: cells are actions such as 2F0 with commas between") from error
    return rows


def _action(word: str, where: str) -> Action:
    if len(word) > _LONGEST_CELL:
        raise PlanError(f"{where}: {word[:_LONGEST_CELL]!r}… is no action: give one such as 2F0")
    try:
        return Action.parse(word)
    except PlanError as error:
        raise PlanError(f"{where}: {error}; communication (SEND_F, RECV_B, UNSHARD, …) is worked out here") from error
