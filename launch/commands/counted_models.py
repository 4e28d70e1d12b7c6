"""Models of families that are not known here, counted by the modules that transformers builds of their config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.counted import CountedModel
from dynapipe_ext.models.named_models import config_file, raw_config, read_model
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
