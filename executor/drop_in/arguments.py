"""The arguments that this package adds to Megatron-LM's, all of them beginning with `OWN_PREFIX`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dynapipe_ext.batch.micro_batches import Layout, Pieces
from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.corpora import DataArguments
from dynapipe_ext.executor.drop_in.entry_shapes import ShapeOf
from dynapipe_ext.executor.drop_in.pipeline import MegatronPlacement
from dynapipe_ext.executor.drop_in.sample_streams import LongSamples
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.store.address import StoreAddress, named_store
from dynapipe_ext.models.megatron_arguments import OWN_PREFIX
from dynapipe_ext.settings.declared import list_settings
from dynapipe_ext.settings.tables import PlanSettings, TopologySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """What a script's own code sets; None leaves it to the command line."""

    costs: CostModel | str | Path | None = None
    memory_limit_gb: float | None = None
    split_backward: bool | None = None
    layout: Layout | None = None
    placement: MegatronPlacement | None = None
    pieces: Pieces | None = None
    width: Literal["auto"] | int | None = None
    data: str | Path | Sequence[str | Path] | None = None
    valid_data: Sequence[str | Path] | None = None
    long_samples: LongSamples | None = None
    tokens_per_batch: int | None = None
    store: str | StoreAddress | None = None
    store_of: Callable[[str | None], StoreAddress | None] = named_store
    shape_of: ShapeOf | None = None

    def value(self, args: Any, name: str) -> Any:
        own_value = getattr(self, name)
        return own_value if own_value is not None else getattr(args, f"{OWN_PREFIX}{name}", None)

    def settings(self, args: Any) -> DropInSettings:
        """With `args`, Megatron-LM's, or None for a script without. Errors: DataError for costs that cannot be read."""

        costs = self.value(args, "costs")
        names = ("memory_limit_gb", "split_backward", "layout", "placement", "pieces", "width")
        values = {name: value for name in names if (value := self.value(args, name)) is not None}
        minutes = getattr(args, "distributed_timeout_minutes", None)
        if minutes is not None:
            values["timeout_s"] = 60.0 * minutes
        return DropInSettings(
            costs=read_cost_file(costs) if isinstance(costs, str | Path) else costs,
            store=self._store(args),
            shape_of=self.shape_of,
            **values,
        )

    def data_arguments(self, args: Any) -> DataArguments:
        """What planned data are to be."""
        names = {name: self.value(args, name) for name in ("data", "valid_data")}
        lists = {name: (value,) if isinstance(value, str | Path) else value or () for name, value in names.items()}
        return DataArguments(
            **{name: tuple(map(str, values)) for name, values in lists.items()},
            long_samples=self.value(args, "long_samples"),
            tokens_per_batch=self.value(args, "tokens_per_batch"),
        )

    def _store(self, args: Any) -> StoreAddress | None:
        if self.store is None:
            return self.store_of(getattr(args, f"{OWN_PREFIX}store", None))
        return StoreAddress.parse(self.store) if isinstance(self.store, str) else self.store

    def check_unplanned(self, args: Any) -> None:
        """Refuse what data of one length would silently ignore. Errors: ConfigError."""
        values = {name: self.value(args, name) for name in ("layout", "pieces", "width")}
        values |= {name: self.value(args, name) for name in ("valid_data", "long_samples", "tokens_per_batch")}
        ignored = [f"{name} is {value!r}" for name, value in values.items() if value not in (None, "padded", "off", 1)]
        has_store = self.store is not None or getattr(args, f"{OWN_PREFIX}store", None) is not None
        ignored += ["store was given"] * has_store
        if ignored:
            raise ConfigError(
                f"{' and '.join(ignored)}, but no data are planned: give --dynapipe-data or a datasets_provider, or"
                " leave it out"
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --dynapipe-*, once; an `extra_args_provider` of Megatron-LM."""
    if _flag("costs") in parser._option_string_actions:
        return parser
    plan, group = list_settings(PlanSettings), parser.add_argument_group(title="dynapipe-ext")

    def add_rule(name: str, help: str) -> None:
        group.add_argument(_flag(name), **plan[name].flag_options, help=help)

    add_rule("costs", "costs of the model (`dynapipe profile`); counted from its description without")
    add_rule("memory_limit_gb", "most 1e9 bytes of a rank; without, what Megatron's own schedule would hold")
    add_rule(
        "split_backward",
        "run backwards in two parts: input gradients first, weight gradients where a rank would wait",
    )
    _add_data(group)
    add_rule(
        "layout",
        "of the rows of planned data: padded to the longest of a micro-batch (default), or packed end to end",
    )
    group.add_argument(
        _flag("placement"),
        choices=get_args(MegatronPlacement),
        help="of the stages where ranks hold several: interleaved as in Megatron-LM (default), or v, down the ranks and"
        " back up, for two a rank whose layers --pipeline-model-parallel-layout says",
    )
    add_rule(
        "pieces",
        "run packed samples of more than N tokens in pieces; auto: where that is faster (default: off)",
    )
    group.add_argument(
        _flag("width"),
        **list_settings(TopologySettings)["context_parallel"].flag_options,
        help="data parallel ranks that join into one replica of planned data, each with a slice of every row; auto: as"
        " many as are fastest for each step (default: 1)",
    )
    return parser


def _flag(name: str) -> str:
    """
    >>> _flag("memory_limit_gb")
    '--dynapipe-memory-limit-gb'
    """
    return f"--{OWN_PREFIX}{name}".replace("_", "-")


def _add_data(group: argparse._ArgumentGroup) -> None:
    """Which data are planned, and who plans them."""
    group.add_argument(
        _flag("data"),
        nargs="+",
        metavar="PATH",
        help="samples of uneven length, cut into planned micro-batches: a folder that `dynapipe preprocess` wrote,"
        " Megatron's .bin/.idx (a sample a document), or with --sft JSON lines of messages; divided by --split;"
        " several are mixed, by the weights before them (0.5 A 0.5 B) or by their numbers of samples",
    )
    group.add_argument(
        _flag("valid_data"),
        nargs="+",
        metavar="PATH",
        help="to validate on instead of a part by --split; with --multiple-validation-sets each is a set",
    )
    group.add_argument(
        _flag("long_samples"),
        choices=get_args(LongSamples),
        help="what becomes of samples of more than --seq-length positions: refused (default), truncated (default of"
        " --sft), or cut into chunks that are samples of their own",
    )
    group.add_argument(
        _flag("tokens_per_batch"),
        type=int,
        metavar="N",
        help="steps of at most N tokens instead of --global-batch-size samples, which is what the loop still counts",
    )
    group.add_argument(
        _flag("store"),
        metavar="FILE",
        help="a file of mode 600 with the address of a Redis-compatible store and its password: plans are then made"
        " by a process beside the training (or DYNAPIPE_KV_HOST, DYNAPIPE_KV_PORT and DYNAPIPE_STORE_PASSWORD)",
    )
