"""The `dynapipe` command. It listens for signals before its slow imports, which take a tenth of a second."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dynapipe_ext.launch.processes.signals import (
    complete_streams,
    ending_signals_raise,
    show_own_stacks,
    show_what_terminals_obey,
)

_INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    show_own_stacks()
    complete_streams()
    show_what_terminals_obey()
    try:
        with ending_signals_raise():
            from dynapipe_ext.launch.subcommands import run_subcommand

            return run_subcommand(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS


if __name__ == "__main__":
    sys.exit(main())
