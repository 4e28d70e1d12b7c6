"""Models of families that are not known here, counted by the modules that transformers builds of their config.json."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import flag_of
from dynapipe_ext.launch.commands.plan_inputs import read_lengths
from dynapipe_ext.models.counted import CountedModel
from dynapipe_ext.models.named_models import config_file, raw_config, read_model
from dynapipe_ext.tools.account.flops import Account, flops_account
from dynapipe_ext.tools.console import say_loading


def counted_model(model: str) -> tuple[CountedModel, str] | None:
    """The counts of a model whose family is not known here, and the error that says so; None for a known family.

    Errors: ConfigError where transformers cannot build it either; DataError.
    """
    try:
        read_model(model)
    except ConfigError as error:
        raw = raw_config(model)
        if not isinstance(raw.get("model_type"), str):
            return None
        say_loading("torch", "transformers")
        from dynapipe_ext.executor.stages.transformers.counting import count_model

        try:
            return count_model(raw, str(config_file(model))), str(error)
        except ConfigError as unbuilt:
            raise ConfigError(f"{error}; nor can it be counted: {unbuilt}") from error
    return None


def counted_account(counted: CountedModel, args: argparse.Namespace, peak: float) -> Account:
    """FLOPs of the step that the flags describe. Errors: ConfigError for flags that need a known family."""
    if counted.uncounted and any("encoder" in what or "decoder" in what for what in counted.uncounted):
        raise ConfigError(f"{args.model} has an encoder and a decoder: FLOPs of these are counted for t5 alone")
    for name in ("log", "decoder_len", "padded_tokens", "recompute"):
        if getattr(args, name):
            raise ConfigError(
                f"{flag_of(name)} is for families that are known here, not {counted.model_type}: leave it out"
            )
    if (args.lengths is None) == (args.seq_len is None):
        raise ConfigError("give the step's samples as --lengths FILE, or as --seq-len with --batch-size: one of them")
    if (args.seconds_per_step is None) != (args.gpus is None):
        raise ConfigError("--gpus and --seconds-per-step go together: give both, or leave both out")
    if args.lengths is not None:
        lengths: Sequence[int] = read_lengths(args.lengths)[:, 0].tolist()
    else:
        lengths = [args.seq_len] * (args.batch_size or 0)
    if not lengths:
        raise ConfigError("a step needs samples: give --batch-size with --seq-len, or --lengths that are not empty")
    return flops_account(
        Path(args.model).name,
        counted.step_flops(lengths, causal=args.causal),
        sum(lengths),
        seconds=args.seconds_per_step,
        gpus=args.gpus or 1,
        peak_flops_per_s=peak,
    )


def counted_notes(counted: CountedModel, why: str) -> list[str]:
    """Lines that say what was counted, what was not, and how such a model can be trained."""
    lines = [f"counted by the modules that transformers builds, since no plan here knows the model ({why})."]
    if counted.uncounted:
        lines.append(f"Not in these FLOPs: {'; '.join(counted.uncounted)}.")
    lines.append(
        "dynapipe train --backend transformers trains it, over pipeline stages and replicas, with tp 1, where it can"
        " prove its cut into stages."
    )
    return lines


def counted_table(counted: CountedModel) -> Table:
    """Parameters by module."""
    table = Table(title=f"{counted.model_type}, {counted.parameters:,} parameters", title_justify="left")
    for name in ("module", "parameters", "share"):
        table.add_column(name, justify="left" if name == "module" else "right")
    rows = {
        "embedding": counted.embedding,
        f"{len(counted.layers)} layers": sum(counted.layers),
        "head": counted.head,
        "others": counted.others,
        "met by a token": counted.active,
    }
    for name, number in rows.items():
        table.add_row(name, f"{number:,}", f"{number / max(1, counted.parameters):.1%}")
    return table


def counted_json(counted: CountedModel, notes: Sequence[str]) -> dict[str, Any]:
    return {"counted": counted.to_json(), "notes": list(notes)}
