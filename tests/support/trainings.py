"""Several `dynapipe train` after one import: `python -m tests.support.trainings`, their arguments on standard input.

Each runs in a fork of its own and prints what it says; the exit status is the first that is not 0.
"""

from __future__ import annotations

import json
import os
import sys

from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.env import limit_threads

if __name__ == "__main__":
    limit_threads()
    import torch  # noqa: F401

    from dynapipe_ext.executor.stages import megatron_cpu
    from dynapipe_ext.launch import variant_run  # noqa: F401
    from dynapipe_ext.launch.commands import train  # noqa: F401

    megatron_cpu.install()
    import transformers  # noqa: F401

    for arguments in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = main(["train", *arguments])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(waited):
            sys.exit(code)
