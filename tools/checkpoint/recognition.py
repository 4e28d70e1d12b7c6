"""Which format a checkpoint has, by the names of its files alone, and the modules that read and write each format.

Nothing here needs torch: a folder that is no checkpoint is refused before that is loaded.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import MOST_NAME_BYTES, ConfigError, DataError, short
from dynapipe_ext.models.named_models import refuse_adapters
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, CheckpointWriter, WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, read_json_object

SAFETENSORS_INDEX = "model.safetensors.index.json"
# The first that is there counts, as in transformers.
WEIGHT_FILES = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
WHOLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Of a model in several files, where no index says so, and of one that was published in one file beside its shards.
SHARD = re.compile(r"(?:pytorch_)?model-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")
CONSOLIDATED = "consolidated.safetensors"
META_PARAMS = "params.json"
_MOST_DIGITS = 18  # of an iteration
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
_ITERATION = re.compile(r"iter_(\d{7,})|release")
METADATA, COMMON, DIST_CONFIG = ".metadata", "common.pt", "metadata.json"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
TAG_FILES = ("latest", "latest_universal")
MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
SHARD_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")


def is_huggingface(path: Path) -> bool:
    """Whether `path` is a folder with config.json and weights."""
    if not (path / CONFIG).is_file():
        return False
    is_one_file = (path / CONSOLIDATED).is_file() and not (path / META_PARAMS).is_file()
    return is_one_file or any((path / name).is_file() for name in WEIGHT_FILES) or bool(shards_without_index(path))


def has_all_weights(path: Path) -> bool:
    """Return whether a Hugging Face folder has files of weights, by the names of its files only.

    Raises DataError if it has a part of them: an index or numbers of shards that name absent files, a download that has
    not ended, weights under a name that is not read.
    """
    name = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if name is not None and name not in WHOLE_WEIGHTS:
        read_shard_index(path / name)
    if name is not None or numbered_shards(path) or (path / CONSOLIDATED).is_file():
        return True
    if parts := sorted(_parts_of_weights(path)):
        raise DataError(
            f"{path} has a part of a model's weights only ({some_names(parts)}): complete the download, or copy its"
            f" {CONFIG} into a folder of its own"
        )
    return False


def _parts_of_weights(path: Path) -> set[str]:
    """Return what a download into the folder, or into the cache of the Hugging Face hub that it is in, has left."""
    names = {file.name for file in path.iterdir()}
    unfinished = [path, path / ".cache" / "huggingface" / "download"]
    if path.absolute().parent.name == "snapshots":
        unfinished.append(path.absolute().parents[1] / "blobs")
    parts = {name for name in names if ".safetensors" in name or name.startswith("pytorch_model")}
    return parts | {file.name for folder in unfinished for file in folder.glob("*.incomplete")}


def read_shard_index(index: Path) -> dict[str, str]:
    """Return the shard of every tensor. Raises DataError for a damaged index, and if a shard is absent."""
    path, name = index.parent, index.name
    shard_of = read_json_object(index, "the index of the model's shards").get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise DataError(f"{index} has no weight_map of names to files: copy it again")
    shards = sorted(set(shard_of.values()))
    if outside := [one for one in shards if Path(one).name != one or len(os.fsencode(one)) > MOST_NAME_BYTES]:
        raise DataError(f"{index} points to {short(outside[0])}, outside its folder: name files beside it")
    if absent := [shard for shard in shards if not (path / shard).is_file()]:
        raise DataError(f"{path} lacks {some_names(absent)}, which {name} names: copy them too")
    return shard_of


def numbered_shards(path: Path) -> list[str]:
    """Return the shards that no index names, by their numbers. Raises DataError if numbers are absent or ambiguous."""
    shards = shards_without_index(path)
    numbers = [match.groups() for match in map(SHARD.fullmatch, shards) if match]
    totals = {int(total) for _, total in numbers}
    if len(totals) > 1:
        raise DataError(f"{path} has shards of several models and no index: {some_names(shards)}; take the others out")
    if absent := sorted({*range(1, max(totals, default=0) + 1)} - {int(number) for number, _ in numbers}):
        absent_numbers = ", ".join(f"{number:05d}" for number in absent[:5]) + (" and more" if len(absent) > 5 else "")
        raise DataError(f"{path} has no index and lacks shards {absent_numbers} of {max(totals)}: copy them too")
    return shards


def some_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def shards_without_index(path: Path) -> list[str]:
    """The names of all shards of the first kind that lies there, safetensors before .bin, by their numbers."""
    names = [file.name for file in path.iterdir() if SHARD.fullmatch(file.name) and file.is_file()]
    safe = [name for name in names if name.endswith(".safetensors")]
    return sorted(safe or names)


def is_meta(path: Path) -> bool:
    """Whether `path` is a folder with params.json and the first rank's file, or the only one."""
    files = (path / "consolidated.00.pth", path / CONSOLIDATED)
    return (path / META_PARAMS).is_file() and any(file.is_file() for file in files)


def is_megatron(path: Path) -> bool:
    """Whether `path` holds, or is, an iteration of Megatron's dist_checkpointing."""
    try:
        folder = iteration_folder(path)
    except DataError:
        return any((entry / METADATA).is_file() for entry in path.iterdir() if entry.is_dir())
    return (folder / METADATA).is_file() and any((folder / name).is_file() for name in (DIST_CONFIG, COMMON))


def is_megatron_legacy(path: Path) -> bool:
    """Whether `path` holds, or is, an iteration with mp_rank_XX."""
    try:
        folders = [iteration_folder(path)]
    except DataError:
        folders = [entry for entry in path.iterdir() if entry.is_dir()]
    return any(rank_files(folder) for folder in folders)


def is_deepspeed(path: Path) -> bool:
    """Whether a folder holds a DeepSpeed checkpoint, or is one of its tags."""
    return path.is_dir() and (is_tag(path) or any(told_tag(path, name) for name in TAG_FILES))


def iteration_folder(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the iteration that its tracker file names, or its only one.

    Errors: DataError where that is not one folder.
    """
    if _ITERATION.fullmatch(path.name) or not path.is_dir():
        return path
    tracker = path / TRACKER
    if tracker.is_file():
        try:
            text = tracker.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{tracker} cannot be read ({error}): write the iteration into it") from error
        if text != RELEASE and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
            raise DataError(f"{tracker} says {short(text)}: it must be a number or {RELEASE!r}")
        return path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    iterations = sorted(entry for entry in path.iterdir() if entry.is_dir() and _ITERATION.fullmatch(entry.name))
    if len(iterations) > 1:
        names = ", ".join(entry.name for entry in iterations)
        raise DataError(f"{path} holds {names} and no {TRACKER}: give the one that you mean")
    return iterations[0] if iterations else path


def rank_files(folder: Path) -> list[Path]:
    """The files of all ranks of an iteration with mp_rank_XX, by name."""
    if not folder.is_dir():
        return []
    places = [entry / file for entry in folder.iterdir() if RANK_FOLDER.match(entry.name) for file in RANK_FILES]
    return sorted(place for place in places if place.is_file())


def is_tag(path: Path) -> bool:
    """Whether `path` is one tag's folder of a DeepSpeed checkpoint."""
    patterns = (MODEL_FILE, SHARD_FILE, LAYER_FILE)
    try:
        names = [file.name for file in path.iterdir() if file.is_file()]
    except (OSError, ValueError):  # no folder, not ours to read, or a name that no file can have
        return False
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def told_tag(path: Path, name: str) -> Path | None:
    """The tag's folder that a file like `latest` names, where both are there."""
    try:
        tag = (path / name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return path / tag if tag and Path(tag).name == tag and is_tag(path / tag) else None


@dataclass(frozen=True, slots=True)
class Format:
    """A format by the name that `--to` and `--from` take. Its modules are imported when they are used."""

    name: str
    recognises: Callable[[Path], bool]
    module: str  # of `open_checkpoint`
    writer: str  # module and class; empty where the format is only read
    needs: str  # what a folder of the format holds, for the message where none is recognised

    def open(self, path: Path) -> CheckpointReader:
        """Errors: DataError, ConfigError naming the file and what is wrong."""
        reader: CheckpointReader = _member(self.module, "open_checkpoint")(path)
        return reader

    def new_writer(
        self, directory: Path, reader: CheckpointReader, options: WriterOptions, **own: Any
    ) -> CheckpointWriter:
        """Errors: ConfigError where the format cannot heed the options, or is only read."""
        if not self.writer:
            raise ConfigError(f"--to {self.name}: this format is only read; give one of {', '.join(TARGETS)}")
        writer: CheckpointWriter = _member(*self.writer.rsplit(".", 1))(directory, reader, options, **own)
        return writer


FORMATS = (
    Format(
        "hf",
        is_huggingface,
        "huggingface.folder",
        "huggingface.folder.HuggingFaceWriter",
        "config.json with model*.safetensors, pytorch_model*.bin or consolidated.safetensors",
    ),
    Format("meta", is_meta, "meta.folder", "", "params.json with consolidated.00.pth or consolidated.safetensors"),
    Format(
        "megatron",
        is_megatron,
        "megatron.dist",
        "megatron.dist_writer.MegatronDistWriter",
        "iter_XXXXXXX with .metadata and *.distcp",
    ),
    Format(
        "megatron-legacy",
        is_megatron_legacy,
        "megatron.legacy",
        "megatron.legacy_writer.MegatronLegacyWriter",
        "iter_XXXXXXX with mp_rank_XX[_YYY]",
    ),
    Format(
        "deepspeed",
        is_deepspeed,
        "deepspeed.reader",
        "deepspeed.writer.DeepSpeedWriter",
        "a tag folder with *model_states.pt",
    ),
)
TARGETS = tuple(one.name for one in FORMATS if one.writer)


def format_of(name: str) -> Format:
    """Errors: ConfigError where no format has that name."""
    for format_ in FORMATS:
        if format_.name == name:
            return format_
    raise ConfigError(f"format {name!r} is not known: give one of {', '.join(format_.name for format_ in FORMATS)}")


def recognise(path: Path) -> tuple[Format, tuple[str, ...]]:
    """The format of a checkpoint's folder, and the names of others that it could be as well. Errors: DataError."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give the folder of a checkpoint")
    if not path.is_dir():
        raise DataError(f"{path} is a file: give the folder that it lies in")
    refuse_adapters(path)
    matching = [one for one in FORMATS if one.recognises(path)]
    if not matching:
        inside = (entry for entry in sorted(path.iterdir()) if entry.is_dir())
        if holder := next((entry for entry in inside if any(one.recognises(entry) for one in FORMATS)), None):
            raise DataError(f"{path} is no checkpoint but holds {holder.name}, which is: give {holder}")
        needs = "; ".join(f"{one.name}: {one.needs}" for one in FORMATS)
        raise DataError(f"{path} holds no checkpoint that is known ({needs}): give the folder that holds one of these")
    return matching[0], tuple(one.name for one in matching[1:])


def _member(module: str, name: str) -> Callable[..., Any]:
    member: Callable[..., Any] = getattr(importlib.import_module(f"dynapipe_ext.tools.checkpoint.{module}"), name)
    return member
