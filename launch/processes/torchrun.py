"""torchrun's agent as `dynapipe launch` starts it: `python -m dynapipe_ext.launch.processes.torchrun`, with its words.

The agent prints nothing about ranks that fail: the first failed rank has printed its error, or the launcher will. An
error of the agent itself is one line, left to the launcher to print, since another node's error may be its cause.
SIGUSR2 is ignored, also by its ranks until they listen.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from dynapipe_ext.errors import ConfigError, DynaPipeError, in_one_line
from dynapipe_ext.launch.processes.agent import leave_words_of_agent
from dynapipe_ext.launch.processes.cluster import BUG_STATUS, USER_ERROR_STATUS, say_at_once
from dynapipe_ext.launch.processes.env import launcher
from dynapipe_ext.launch.processes.scratch import ScratchDirectory


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from dynapipe_ext.launch.processes.rendezvous import register_rendezvous

    logging.disable(logging.ERROR)  # of which ranks it ends, and how they did
    try:
        with ScratchDirectory() as scratch:
            register_rendezvous(scratch.path)
            run.main(words)
    except ChildFailedError:
        return BUG_STATUS
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher may start again
        is_own = isinstance(error, DynaPipeError)
        words_of_agent = in_one_line(error) if is_own else f"torchrun: {in_one_line(error)}"
        if (own := launcher()) is None:
            say_at_once(words_of_agent)
        else:
            leave_words_of_agent(own.records, words_of_agent)
        return USER_ERROR_STATUS if isinstance(error, ConfigError) else BUG_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
