"""A process that encodes blocks: `python -m dynapipe_ext.data.preprocessing.worker FD`, for `ProcessWorkers` alone.

FD is a socket. The process receives the job from it and then blocks, and sends back one result for each block.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json
from dynapipe_ext.data.preprocessing.inputs import Block
from dynapipe_ext.data.preprocessing.template_limits import MEMORY_UNLIMITED
from dynapipe_ext.data.preprocessing.workers import guarded
from dynapipe_ext.errors import DynaPipeError


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    connection = Connection(int(arguments[0]))
    try:
        settings, tokenizer = connection.recv()
    except (EOFError, OSError):
        return 0
    waiting: queue.SimpleQueue[Block] = queue.SimpleQueue()
    encoder, refusal, loading = None, None, threading.Lock()
    with loading:
        # A thread takes blocks out of the socket. Otherwise both ends could wait for the other one to read. The thread
        # also notices at once that the other end is gone.
        threading.Thread(target=_receive, args=(connection, waiting, loading), daemon=True).start()
        try:
            encoder = encoder_from_json(tokenizer)
        except DynaPipeError as error:
            refusal = type(error)(str(error))
    while True:
        block = waiting.get()
        result = refusal if encoder is None else guarded(block, settings, encoder)
        try:
            connection.send(result)
        except OSError:
            return 0


def _receive(connection: Connection, waiting: queue.SimpleQueue[Block], loading: threading.Lock) -> None:
    while True:
        try:
            connection.poll(None)
            with MEMORY_UNLIMITED:  # or a template that takes much would leave a block none
                block = connection.recv()
            waiting.put(block)
        except (EOFError, OSError):
            with loading:  # which has a folder of its own to remove
                os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
