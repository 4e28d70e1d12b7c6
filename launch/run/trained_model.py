"""What a run leaves besides itself: its model in a folder of its own, in a published form, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dynapipe_ext.durable_files import replace_file, replace_folder
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints import folder as checkpoints
from dynapipe_ext.executor.checkpoints.folder import MANIFEST, MODEL_FOLDER, OPTIMIZER_FILES, read_manifest
from dynapipe_ext.launch.job.own_outputs import is_own_output, note_output
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.files import writing_in

_CONFIG = "config.json"
_OF_THE_MODEL = (_CONFIG, "generation_config.json")  # not of a tokenizer that comes from elsewhere


def write_trained_model(config: TrainConfig, run_dir: Path, *, overwrite: bool) -> str:
    """Write `[checkpoint] output`, if it is set, from the run's last checkpoint, or from the best with `keep_best`.
    Return the line to print, empty without an output.

    A folder appears whole or not at all: it is written beside its place and renamed, over what is there where
    `overwrite` allows it or the run wrote that itself. Errors: DataError; the run and its checkpoints stay.
    """
    output = config.checkpoint.output
    if not output:
        return ""
    place = Path(os.path.realpath(output))  # where it is a link, what that points to is replaced
    with writing_in(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_name(f".{place.name}.written")
    for left in (written, written.with_name(f"{written.name}.partial")):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with writing_in(written):
        step = _write(config, run_dir, written)
    overwrite = overwrite or is_own_output(run_dir, output)
    with suppress(DataError):  # without it, who goes on with the run needs --overwrite
        note_output(run_dir, output, written)
    try:
        if place.exists() and not (place.is_dir() and (overwrite or not any(place.iterdir()))):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        replace_folder(written, place, place.with_name(f".{place.name}.old"))
    except OSError as error:
        raise DataError(
            f"{output} cannot be put in place ({error.strerror}): the model is whole in {written}, move it"
        ) from None
    return f"the model after step {step} is in {output} (hf)"


def keep_model_files(config: TrainConfig, run_dir: Path) -> None:
    """Copy config.json, tokenizer and licence of a published model beside a run's checkpoints, where conversion looks
    for them: a checkpoint has none of them. Checkpoints of transformers models are published folders themselves.

    Errors: DataError where they cannot be written.
    """
    if config.model.uses_transformers and not config.deepspeed.config:
        return
    from dynapipe_ext.tools.checkpoint import CARRIED_FOLDER

    root = run_dir / CHECKPOINTS
    folder = root if config.deepspeed.config else root / CARRIED_FOLDER
    with writing_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in _carried(config):
            replace_file(folder / file.name, file.read_bytes())


def _write(config: TrainConfig, run_dir: Path, written: Path) -> int:
    """The model as a new folder; the step that it is of."""
    root = run_dir / CHECKPOINTS
    source = checkpoints.best(root) if config.checkpoint.keep_best else checkpoints.latest(root)
    if config.model.uses_transformers:
        _lay_out(config, _published(config, source), written)
        return read_manifest(source).run.step
    from dynapipe_ext.tools.checkpoint import WriterOptions, convert, prepare_conversion

    convert(prepare_conversion(source, written, "hf", WriterOptions(), carry=_carried(config)))
    return read_manifest(source).run.step


def _published(config: TrainConfig, source: Path) -> Path:
    """Where in a checkpoint lies what `from_pretrained` reads. Errors: DataError where that was not saved."""
    saved = source / MODEL_FOLDER if config.deepspeed.config else source
    if not saved.is_dir():
        raise DataError(
            f"{source} was saved when it was not to be the run's output: dynapipe convert {source}"
            f" {config.checkpoint.output} --to hf"
        )
    return saved


def _lay_out(config: TrainConfig, saved: Path, written: Path) -> None:
    """A folder for `from_pretrained`, transformers' or peft's, without what else a run has saved beside the model."""
    shutil.copytree(saved, written, ignore=shutil.ignore_patterns(MANIFEST, OPTIMIZER_FILES))
    for file in _carried(config):
        of_the_base = config.lora.enabled and file.name in _OF_THE_MODEL
        if not of_the_base and not (written / file.name).exists():
            shutil.copy(file, written)


def _carried(config: TrainConfig) -> Sequence[Path]:
    """The files of the model that was trained, with those of the tokenizer that it was trained with."""
    from dynapipe_ext.tools.checkpoint import carried_files

    model, tokenizer = Path(config.model.architecture), Path(config.data.tokenizer)
    model = model if model.is_dir() else model.parent
    files = {file.name: file for file in carried_files(model)} if (model / _CONFIG).is_file() else {}
    if tokenizer.is_dir() and tokenizer.resolve() != model.resolve():
        own = {name: file for name, file in files.items() if name in _OF_THE_MODEL}
        files = {file.name: file for file in carried_files(tokenizer)} | own
        if not own:
            files = {name: file for name, file in files.items() if name not in _OF_THE_MODEL}
    elif tokenizer.is_file():
        files[tokenizer.name] = tokenizer
    return tuple(files[name] for name in sorted(files))
