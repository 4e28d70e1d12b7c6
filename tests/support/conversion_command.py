"""`dynapipe convert` in this process."""

from __future__ import annotations

from pathlib import Path

from dynapipe_ext.launch import cli

SHARD_BYTES = 200_000  # three shards of the tiny model


def run(*arguments: object) -> int:
    """Its exit status."""
    return cli.main(["convert", *map(str, arguments)])


def to_hf(origin: Path, target: Path, *more: object) -> int:
    return run(origin, target, "--to", "hf", "--max-shard-gb", SHARD_BYTES / 1e9, *more)
