"""`python -m dynapipe_ext.megatron SCRIPT ARGUMENTS`: a training script as it is, under planned schedules."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dynapipe_ext.errors import DynaPipeError, in_one_line
from dynapipe_ext.executor.store.address import StoreAddress, named_store
from dynapipe_ext.visible_text import visible

_USAGE = """usage: torchrun ... -m dynapipe_ext.megatron SCRIPT ARGUMENTS

Runs SCRIPT, such as Megatron-LM's pretrain_gpt.py, with ARGUMENTS: the script's own, and --dynapipe-*, which appear in
the --help of scripts that use Megatron-LM's parser.
"""


def main(arguments: Sequence[str], store_of: Callable[[str | None], StoreAddress | None] = named_store) -> int:
    """Exit status 2, and one line, for what this package refuses. `store_of` makes an address of what
    --dynapipe-store says, or of the environment."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr, end="")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    script = Path(arguments[0])
    if not script.is_file():
        print(visible(f"{script} is not there: give the path of a training script\n{_USAGE}"), file=sys.stderr, end="")
        return 2
    from dynapipe_ext.executor.drop_in.installed import installed

    sys.argv = [str(script), *arguments[1:]]
    sys.path.insert(0, str(script.resolve().parent))  # as python itself does for a script
    try:
        with installed(store_of=store_of):
            runpy.run_path(str(script), run_name="__main__")
    except DynaPipeError as error:
        print(visible(f"dynapipe: {in_one_line(error)}"), file=sys.stderr)
        return 2
    return 0
