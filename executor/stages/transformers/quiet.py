"""Work with models of which this process has, or needs, only a part, without what transformers says of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Without what transformers says of weights that other stages have, and of its progress with a part."""
    logging: Any = transformers.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
