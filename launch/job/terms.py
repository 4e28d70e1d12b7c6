"""What all ranks of a job must have alike: packages, settings, and the content of the files that settings name.

Each rank that torchrun or Slurm starts reads a command line and files of its own, and takes from rank 0 what that has
settled (`settled.SettledJob.to_json`). All else that changes what is trained is here, by name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from dynapipe_ext.data.sample_selection import weighted_files
from dynapipe_ext.errors import ConfigError, reason
from dynapipe_ext.launch.job.run_data import RunData, named_files
from dynapipe_ext.settings.train_config import TrainConfig

Terms = Mapping[str, str]


class UnlikeRanksError(ConfigError):
    """All ranks raise it, in the same words. Each calls `leave_together` at its end, which returns once all have."""

    def __init__(self, message: str, leave_together: Callable[[], None]) -> None:
        super().__init__(message)
        self.leave_together = leave_together


SECRET = "the secret of the job"  # by a tag, which is not shown

# What may differ from node to node.
_OF_A_NODE = {
    "[run] run_dir",  # rank 0's counts for all
    "[checkpoint] output",  # rank 0 writes it
    "[job] redis_server",  # rank 0 starts it
    "[plan] memory_limit_gb",  # by default what is free on a node: the least counts for all
    "[run] log_dir",
    "[run] log_level",  # one rank may say more than others
    "[run] plan_dir",
    # Of files that settings name, paths may differ and content may not.
    "[model] architecture",
    "[model] init_from",
    "[data] path",
    "[data] mixture",
    "[data] tasks",
    "[data] tokenizer",
    "[eval] path",
    "[plan] costs",
    "[deepspeed] config",
}
_ROOMS = ("schedules", "executor", "tools", "launch")
_NUM_BLOCKS, _BLOCK_BYTES = 8, 1 << 16
_NOT_READ = (".md", ".lock")
_MADE_FROM = "meta.json"  # of prepared data: it says when and from which path they were made
_FROM_FILES = ("the file", "the number of", "the digest of")
_NOTHING, _MOST_SHOWN = "nothing", 80


def terms_of(config: TrainConfig, *, compare: bool, reads_files: bool = True) -> Terms:
    """By names in the order in which they are compared; those of files' content where one rank of a machine
    `reads_files`. No secret is among them. Errors: ConfigError for a file that cannot be read."""
    packages = {f"the package {name}": version for name, version in _packages(config)}
    settings = {
        f"[{table}] {name}": json.dumps(value)
        for table, values in config.to_json().items()
        for name, value in values.items()
        if f"[{table}] {name}" not in _OF_A_NODE
    }
    weights = {"weights of [data] mixture": str([str(file.weight) for file in weighted_files(config.data.mixture)])}
    files: dict[str, str] = {}
    names_read: set[str] = set()
    for setting, name in named_files(config).items() if reads_files else ():
        if name not in names_read:
            names_read.add(name)
            files |= {f"the file {inside}of {setting}": content for inside, content in _content(Path(name))} or {
                setting: json.dumps(name)
            }
    return packages | settings | {"--compare": json.dumps(compare)} | weights | files


def terms_of_data(data: RunData) -> Terms:
    """Of data that are read: what their samples are."""
    return {
        "the number of samples": str(len(data.whole)),
        "the number of token ids": str(data.whole.vocab_size),
        "the digest of all samples": data.fingerprint,
    }


def difference(own_terms: Terms, other_terms: Terms, who: tuple[str, str], *, is_part: bool = False) -> str:
    """A message about the first name whose values differ; empty if none differs. `who` names the two ranks. `is_part`:
    names that the other rank lacks are not compared."""
    if is_part:
        own_terms = {name: value for name, value in own_terms.items() if name in other_terms}
    names = [name for name in {**own_terms, **other_terms} if own_terms.get(name) != other_terms.get(name)]
    if not names:
        return ""
    if names[0] == SECRET:
        without = [one for terms, one in zip((own_terms, other_terms), who, strict=True) if not terms.get(SECRET)]
        fault = f"the secret files of {who[0]} and {who[1]} differ"
        if without:
            fault = f"{without[0]} has no secret of the job, and {who[without[0] == who[0]]} has one"
        return f"{fault}: name a file with the same line by --secret-file on every node"
    first, more = names[0], f" ({len(names) - 1} more differ)" if names[1:] else ""
    values = " and ".join(
        f"{textwrap.shorten(terms.get(first, _NOTHING), _MOST_SHOWN, placeholder=' ...')} for {one}"
        for terms, one in zip((own_terms, other_terms), who, strict=True)
    )
    return f"{first} is {values}{more}: {_next_move(first)}"


def _next_move(name: str) -> str:
    if name.startswith("the package"):
        return "install the same on every node"
    if name.startswith(_FROM_FILES):
        return "have the same files on every node"
    return "start every node by the same command, with the same files"


def _packages(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Those that compute something of the job."""
    yield "dynapipe-ext", f"{_version('dynapipe-ext')} (sources {_digest_of_sources()})"
    names = ["torch", "numpy", "megatron-core"]
    names += ["transformers"] * config.model.uses_transformers
    names += ["peft"] * config.lora.enabled + ["deepspeed"] * bool(config.deepspeed.config)
    for name in names:
        yield name, _version(name)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _digest_of_sources() -> str:
    """Of this package as it lies here, from a wheel or a checkout: one version has many commits."""
    files: dict[str, Path] = {}
    for room in ("", *_ROOMS):
        spec = importlib.util.find_spec(f"dynapipe_ext.{room}".rstrip("."))
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        files |= {str(room / file.relative_to(folder)): file for file in folder.rglob("*.py")}
    return _digest(part for name in sorted(files) for part in (name.encode(), files[name].read_bytes()))


def _content(path: Path) -> Iterator[tuple[str, str]]:
    """The files at a path, each named as it lies there, with what tells its content; nothing where no file is."""
    if path.is_file():
        yield "", _described(path)
    elif path.is_dir():
        inside = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        for name in inside:
            hidden = any(part.startswith(".") for part in name.parts)
            if not hidden and name.suffix not in _NOT_READ and name.name != _MADE_FROM:
                yield f"{name} ", _described(path / name)


def _described(path: Path) -> str:
    """A file's size, and a digest of blocks from its beginning to its end: of all of it where it is short."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            whole = num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES
            starts = (
                range(1) if whole else (i * (num_bytes - _BLOCK_BYTES) // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS))
            )
            blocks = [(file.seek(start), file.read(num_bytes if whole else _BLOCK_BYTES))[1] for start in starts]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({reason(error)}): check its place and its rights") from error
    return f"{num_bytes:,} B with digest {_digest(blocks)}"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
