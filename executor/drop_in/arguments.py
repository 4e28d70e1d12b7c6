"""The arguments that this package adds to Megatron-LM's, all beginning with --dynapipe-."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dynapipe_ext.batch.micro_batches import Layout, Pieces
from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.entry_shapes import ShapeOf
from dynapipe_ext.executor.drop_in.pipeline import MegatronPlacement
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.settings.declared import declared
from dynapipe_ext.settings.tables import PlanSettings, TopologySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a script's own code sets; None leaves it to the command line."""

    costs: CostModel | str | Path | None = None
    memory_limit_gb: float | None = None
    split_backward: bool | None = None
    layout: Layout | None = None
    placement: MegatronPlacement | None = None
    pieces: Pieces | None = None
    width: Literal["auto"] | int | None = None
    data: str | Path | None = None
    store: str | StoreAddress | None = None  # no argument has it: its password would be seen by all
    shape_of: ShapeOf | None = None

    def wish(self, args: Any, name: str) -> Any:
        wish = getattr(self, name)
        return wish if wish is not None else getattr(args, f"dynapipe_{name}", None)

    def settings(self, args: Any) -> DropInSettings:
        """With `args`, Megatron-LM's, or None for a script without. Errors: DataError for costs that cannot be read."""

        costs = self.wish(args, "costs")
        names = ("memory_limit_gb", "split_backward", "layout", "placement", "pieces", "width")
        wishes = {name: value for name in names if (value := self.wish(args, name)) is not None}
        minutes = getattr(args, "distributed_timeout_minutes", None)
        if minutes is not None:
            wishes["timeout_s"] = 60.0 * minutes
        return DropInSettings(
            costs=read_cost_file(costs) if isinstance(costs, str | Path) else costs,
            store=StoreAddress.parse(self.store) if isinstance(self.store, str) else self.store,
            shape_of=self.shape_of,
            **wishes,
        )

    def check_unplanned(self, args: Any) -> None:
        """Refuse what data of one length would silently ignore. Errors: ConfigError."""
        wishes = {name: self.wish(args, name) for name in ("layout", "pieces", "width")}
        ignored = [f"{name} is {value!r}" for name, value in wishes.items() if value not in (None, "padded", "off", 1)]
        ignored += ["store was given"] * (self.store is not None)
        if ignored:
            raise ConfigError(
                f"{' and '.join(ignored)}, but no data are planned: give --dynapipe-data or a datasets_provider, or"
                " leave it out"
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --dynapipe-*, once; an `extra_args_provider` of Megatron-LM."""
    if "--dynapipe-costs" in parser._option_string_actions:
        return parser
    plan, group = declared(PlanSettings), parser.add_argument_group(title="dynapipe-ext")

    def add_rule(name: str, help: str) -> None:
        group.add_argument(f"--dynapipe-{name.replace('_', '-')}", **plan[name].flag_options, help=help)

    add_rule("costs", "costs of the model (`dynapipe profile`); counted from its description without")
    add_rule("memory_limit_gb", "most 1e9 bytes of a rank; without, what Megatron's own schedule would hold")
    add_rule(
        "split_backward",
        "run backwards in two parts: input gradients first, weight gradients where a rank would wait",
    )
    group.add_argument(
        "--dynapipe-data",
        metavar="PATH",
        help="samples of uneven length, cut into planned micro-batches: a folder that `dynapipe preprocess` wrote,"
        " Megatron's .bin/.idx (a sample a document), or with --sft JSON lines of messages; divided by --split",
    )
    add_rule(
        "layout",
        "of the rows of planned data: padded to the longest of a micro-batch (default), or packed end to end",
    )
    group.add_argument(
        "--dynapipe-placement",
        choices=get_args(MegatronPlacement),
        help="of the stages where ranks hold several: interleaved as in Megatron-LM (default), or v, down the ranks and"
        " back up, for two a rank whose layers --pipeline-model-parallel-layout says",
    )
    add_rule(
        "pieces",
        "run packed samples of more than N tokens in pieces; auto: where that is faster (default: off)",
    )
    group.add_argument(
        "--dynapipe-width",
        **declared(TopologySettings)["width"].flag_options,
        help="data parallel ranks that join into one replica of planned data, each with a slice of every row; auto: as"
        " many as are fastest for each step (default: 1)",
    )
    return parser
