"""`dynapipe replay`: a step's plan that a run has dumped, planned again from the same lengths, settings and costs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.text import Text

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.errors import DataError, DynaPipeError, short
from dynapipe_ext.executor.plans.dump import DUMP_FORMAT, DUMPED_PLANNER_FORMAT, planner_file, replicas_json
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.launch.command_parser import ending
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.tools.console import output
from dynapipe_ext.tools.files import Fields, read_json
from dynapipe_ext.tools.show.plan import of_proven_step, rendered_plan

_PIPE_COLUMNS = 140
_DIFFERS_STATUS = 1
_MOST_SHOWN = 20

_EPILOG = """examples:
  dynapipe replay plans/step-000012.json

A run with --plan-dir DIR has written the file, and beside it the settings and costs of its planner.
"""
_MISSING = object()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG, {_DIFFERS_STATUS: "the plan is another one, or a defect of dynapipe"})
    parser.add_argument("dump", metavar="DUMP", help="a step's file in the --plan-dir of a run")


def run(args: argparse.Namespace) -> int:
    path = Path(args.dump)
    raw = read_json(path, DUMP_FORMAT, "a step's dump")
    dump = Fields(raw, str(path))
    planner, is_as_dumped = _planner(path, dump.one("planner", str))
    samples = _samples(dump.many("samples", list), path)
    step, reserve_bytes = dump.one("step", int), dump.one("reserve_bytes", int)
    replicas = dump.one("replicas", list)
    step_plan = planner.plan(samples, step=step)
    if reserve_bytes:
        step_plan = planner.replan(step_plan, samples, reserve_bytes=reserve_bytes)
    proven = prove(step_plan, planner.activation_format, planner.replica_collectives)
    console = output(_PIPE_COLUMNS)
    console.print(rendered_plan(of_proven_step(proven, planner.topology), width=console.width))
    if not is_as_dumped:
        console.print("the planner's settings or costs were changed since the run")
    differences = list(json_differences(replicas, replicas_json(step_plan), "replicas"))
    for line in differences[:_MOST_SHOWN]:
        console.print(Text(line), soft_wrap=True)
    if len(differences) > _MOST_SHOWN:
        console.print(f"and {len(differences) - _MOST_SHOWN:,} more differences")
    console.print(f"plan {step} is {'another one now' if differences else 'the same, bit for bit'}")
    return _DIFFERS_STATUS if differences else 0


def json_differences(dumped: Any, now: Any, where: str) -> Iterator[str]:
    """A line for each value that differs between two JSON values, by where it stands.

    >>> list(json_differences({"rows": [1, 2]}, {"rows": [1, 3, 4]}, "m"))
    ['m.rows[1]: dumped 2, now 3', 'm.rows[2]: dumped nothing, now 4']
    """
    if isinstance(dumped, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*dumped, *now)):
            yield from json_differences(dumped.get(key, _MISSING), now.get(key, _MISSING), f"{where}.{key}")
    elif isinstance(dumped, list) and isinstance(now, list):
        for i, pair in enumerate(zip_longest(dumped, now, fillvalue=_MISSING)):
            yield from json_differences(*pair, f"{where}[{i}]")
    elif dumped != now:
        texts = ["nothing" if value is _MISSING else short(value) for value in (dumped, now)]
        yield f"{where}: dumped {texts[0]}, now {texts[1]}"


def _planner(dump: Path, name: str) -> tuple[Planner, bool]:
    """The planner whose file, named in a dump, lies beside it, and whether that file is as the run wrote it.

    Errors: DataError.
    """
    if Path(name).name != name:
        raise DataError(f"{dump}: planner is {short(name)} but must be the name of a file beside it")
    path = dump.parent / name
    described = Fields(read_json(path, DUMPED_PLANNER_FORMAT, "a planner's dump"), str(path)).one("planner", dict)
    is_as_dumped = name == planner_file(described)
    try:
        return Planner.from_json(described), is_as_dumped
    except DynaPipeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} describes no planner of this version ({type(error).__name__} {error}): dump the run again"
        ) from error


def _samples(rows: tuple[list[Any], ...], path: Path) -> list[SampleLength]:
    for i, row in enumerate(rows):
        if len(row) not in (4, 5) or any(type(value) is not int for value in row):
            raise DataError(
                f"{path}: samples[{i}] is {short(row)} but must be index, encoder, decoder and target tokens, and of a"
                " pair the first document's"
            )
    return [
        SampleLength(index, encoder, decoder, target, first=rest[0] if rest else 0)
        for index, encoder, decoder, target, *rest in rows
    ]
