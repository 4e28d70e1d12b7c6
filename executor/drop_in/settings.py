"""How the drop-in plans steps: what `dynapipe_ext.megatron.DropInSettings` is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, get_args

from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.entry_shapes import ShapeOf
from dynapipe_ext.executor.drop_in.pipeline import MegatronPlacement
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.settings.declared import list_settings
from dynapipe_ext.settings.plan_rules import PlanRules, check_rules
from dynapipe_ext.settings.tables import PlanSettings

_TIMEOUT_S = 600.0  # torch's own for process groups: first steps and saves may keep a neighbour waiting
_OF_MEGATRON = ("schedule", "loss_norm", "recompute", "replica_counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DropInSettings(PlanRules):
    """The rules of plans, with what else the drop-in needs; `layout` and `pieces` are those of planned data. Megatron's
    own arguments decide the schedule, recomputation, the loss and whether counts are equal.

    `costs` are counted from the model where none are given. Without `memory_limit_gb` (1e9 bytes) steps of equal
    micro-batches hold no more than under Megatron's schedules, and planned data fill the device, as all steps do in a
    V. `width` data parallel ranks join into one replica of planned data, each with a slice of every row's positions;
    "auto" lets each step take the width whose plan ends first. `placement` is that of the chunks of ranks with several.
    With a `store` a planner process makes the plans of training, without one each rank makes them itself. Under
    `variable_seq_lengths` the first stage asks the loop's `forward_step` for shapes, or `shape_of`. No rank waits for
    another longer than `timeout_s`.
    """

    costs: CostModel | None = None
    memory_limit_gb: float | None = None
    width: Literal["auto"] | int = 1
    placement: MegatronPlacement = "interleaved"
    store: StoreAddress | None = None
    shape_of: ShapeOf | None = None
    timeout_s: float = _TIMEOUT_S

    def __post_init__(self) -> None:
        if (limit := self.memory_limit_gb) is not None:
            list_settings(PlanSettings)["memory_limit_gb"].check_value(
                float(limit) if isinstance(limit, Real) else limit
            )
        if self.placement not in get_args(MegatronPlacement):
            choices = ", ".join(get_args(MegatronPlacement))
            raise ConfigError(f"placement is {self.placement!r}: choose from {choices}")
        if self.width != "auto" and (type(self.width) is not int or self.width < 1):
            raise ConfigError(f"width is {self.width!r}: give how many data parallel ranks join, like 2, or auto")
        check_rules(self)
        for rule in fields(PlanRules):
            if rule.name in _OF_MEGATRON and getattr(self, rule.name) != rule.default:
                raise ConfigError(
                    f"{rule.name} is {getattr(self, rule.name)!r}, but Megatron's arguments decide it: leave it out"
                )

    @property
    def limit_bytes(self) -> int | None:
        return None if self.memory_limit_gb is None else int(self.memory_limit_gb * 1e9)
