"""The arguments that this package adds to Megatron-LM's, all beginning with --dynapipe-."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.executor.megatron.drop_in import DropInSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a script's own code asks for; where it is silent (None), the command line speaks."""

    costs: CostModel | str | Path | None = None
    memory_limit_gb: float | None = None
    split_backward: bool | None = None

    def settings(self, args: Any) -> DropInSettings:
        """With `args`, Megatron-LM's, or None for a script without. Errors: DataError for costs that cannot be read."""

        def wish(name: str) -> Any:
            own = getattr(self, name)
            return own if own is not None else getattr(args, f"dynapipe_{name}", None)

        costs = wish("costs")
        minutes = getattr(args, "distributed_timeout_minutes", None)
        settings = DropInSettings(
            costs=read_cost_file(costs) if isinstance(costs, str | Path) else costs,
            memory_limit_gb=wish("memory_limit_gb"),
            split_backward=bool(wish("split_backward")),
        )
        return settings if minutes is None else replace(settings, timeout_s=60.0 * minutes)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --dynapipe-*, once; an `extra_args_provider` of Megatron-LM."""
    if "--dynapipe-costs" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="dynapipe-ext")
    group.add_argument(
        "--dynapipe-costs",
        metavar="FILE",
        help="costs of the model (`dynapipe profile`); counted from its description without",
    )
    group.add_argument(
        "--dynapipe-memory-limit-gb",
        type=float,
        metavar="X",
        help="most 1e9 bytes of a rank; without, what Megatron's own schedule would hold",
    )
    group.add_argument(
        "--dynapipe-split-backward",
        action="store_true",
        default=None,
        help="run backwards in two parts: input gradients first, weight gradients where a rank would wait",
    )
    return parser
