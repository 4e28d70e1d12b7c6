"""The data of a run: in which form they are, read once, before its ranks."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import as_length_array
from dynapipe_ext.data.batches import array_digest
from dynapipe_ext.data.dataset import (
    TokenDataset,
    TokenizerKind,
    fingerprint_of_source,
    is_prepared,
    open_prepared,
    prepare,
)
from dynapipe_ext.data.examples import Example, generate_examples, generator_settings
from dynapipe_ext.data.length_bounds import SideBounds, TaskBounds
from dynapipe_ext.data.pairs import PairDataset, pair_lengths
from dynapipe_ext.data.preprocessing.encoders import Encoder, digest_of
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings, read_examples
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess, template_date_of, with_fixed_date
from dynapipe_ext.data.preprocessing.record_forms import RecordFields
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.data.sample_selection import (
    SampleSubset,
    Tasks,
    check_tasks,
    describe_samples,
    hold_out,
    read_tasks,
    samples_of_epoch,
    weighted_files,
)
from dynapipe_ext.data.tokenizer import FILE_NAME
from dynapipe_ext.durable_files import remove_path
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError
from dynapipe_ext.executor.checkpoints.folder import read_manifest
from dynapipe_ext.launch.job.configured import training_rule
from dynapipe_ext.launch.job.data_form import (
    DataForm,
    form_lines,
    form_of,
    identity_of,
    loss_notes,
    tokenizer_to_train_with,
)
from dynapipe_ext.launch.job.run_directory import runs_folder
from dynapipe_ext.launch.processes.scratch import FileLock
from dynapipe_ext.settings.tables import DataSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import counted, percent
from dynapipe_ext.tools.files import writing_in


def refuse_other_tokens(data: DataSettings, prepared: TokenDataset, *, encoder_decoder: bool) -> None:
    """Errors: DataError for prepared data made by another tokenizer or template than the settings name. By default the
    tokenizer is the data's own. Imported data do not record how they were made, so their template is not compared."""
    tokenizer, template = data.tokenizer, data.template
    again = f"prepare it again (`dynapipe preprocess --tokenizer {tokenizer}"
    if template not in ("auto", prepared.template) and prepared.template != "unknown":
        raise DataError(
            f"{prepared.directory} was prepared by the template {prepared.template or 'of no model'} and [data]"
            f" template is {template}: {again} --template {template}`), or leave that out"
        )
    if prepared.num_first is not None and template != "preference":
        raise DataError(
            f"{prepared.directory} holds pairs of a chosen and a rejected answer, which a loss of preferences takes:"
            " give --preferences dpo, for example, or prepare texts"
        )
    if data.loss_on != prepared.loss_on and template in ("auto", "chat"):
        raise DataError(
            f"{prepared.directory} was prepared with loss on {prepared.loss_on} and [data] loss_on is {data.loss_on}:"
            f" {again} --loss-on {data.loss_on}`), or name that of the data"
        )
    if tokenizer == "bpe" or not (prepared.directory / FILE_NAME).is_file():
        return
    own = prepared.tokenizer()
    if encoder_decoder and own.separator is None:
        return  # refused for that, with what to do
    expected = tokenizer_to_train_with(tokenizer, encoder_decoder=encoder_decoder)
    no_template = isinstance(expected, FolderEncoder) and prepared.template is None
    if no_template or identity_of(own) != identity_of(expected):
        raise DataError(
            f"{prepared.directory} was prepared by another tokenizer than {tokenizer}, or without what that puts around"
            f" samples, so a model of {tokenizer} would train on other tokens: {again}`), or name the tokenizer of"
            " the data"
        )


def _refuse_other_date(data: DataSettings, prepared: TokenDataset) -> None:
    """Errors: DataError for prepared data with another date in their chats than a run began with."""
    if data.template_date and prepared.template_date != data.template_date:
        raise DataError(
            f"the chat template has written the date {prepared.template_date or '(none)'} into {prepared.directory},"
            f" but this run began with {data.template_date}: put back the data of that day, or give --data their text"
        )


def refuse_other_fields(data: DataSettings, prepared: TokenDataset) -> None:
    """Errors: DataError for prepared data whose record names other fields than the settings."""
    if (recorded := prepared.record_fields) is None or prepared.template == "chat":
        return
    pair, text = recorded
    reads_pair = bool(pair) and prepared.template != "text"
    fields_read = f"the fields {pair[0]!r} and {pair[1]!r}" if reads_pair else f"the field {text!r}"
    if data.fields and data.fields != (pair if len(data.fields) == 2 else (text,) * (not reads_pair)):
        raise DataError(
            f"{prepared.directory} was made of {fields_read} of its records and [data] names"
            f" {' and '.join(map(repr, data.fields))}: prepare it again with these fields, or leave them out"
        )


def named_files(config: TrainConfig) -> dict[str, str]:
    """What a run reads, by the setting that names it; `architecture` and `tokenizer` may also be names of no file."""
    data, model = config.data, config.model
    mixed = {f"[data] mixture {number}": file.path for number, file in enumerate(weighted_files(data.mixture), 1)}
    paths = {
        "[model] architecture": model.architecture,
        "[model] init_from": model.init_from,
        "[data] path": data.path,
        **mixed,
        "[data] tasks": data.tasks,
        "[data] tokenizer": data.tokenizer,
        "[eval] path": config.eval.path,
        "[plan] costs": config.plan.costs,
        "[deepspeed] config": config.deepspeed.config,
    }
    return {setting: path for setting, path in paths.items() if path}


def missing_file(config: TrainConfig) -> str:
    """What to say of the first named file that is not on this machine; empty where all are."""
    for setting, path in named_files(config).items():
        is_path = setting not in ("[data] tokenizer", "[model] architecture") or os.sep in path
        may_be_glob = setting.startswith(("[data] path", "[data] mixture", "[eval] path"))
        is_there = Path(path).exists() or (may_be_glob and any(glob.iglob(path, recursive=True)))
        if is_path and not is_there:
            return f"{setting} is {path}, which is not on this machine{_download(setting, path)}"
    return ""


def _download(setting: str, path: str) -> str:
    """How to fetch what has a name of the Hugging Face hub; empty for other paths."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) or Path(path).parent.exists() or "." in path:
        return ""
    kind = " --repo-type dataset" if setting.endswith("path") or "mixture" in setting else ""
    return f" (a name of the Hugging Face hub? `hf download{kind} {path} --local-dir DIR` first, and name DIR)"


def refuse_missing_file(config: TrainConfig) -> None:
    """Errors: ConfigError for a named file that is not on this machine."""
    if fault := missing_file(config):
        raise ConfigError(f"{fault}: check the path")


# How long ranks wait for data to be tokenized and costs to be measured; a failure of who does it ends the job at once.
PREPARE_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Source:
    """Text to tokenize, by what, and the folder for its tokens."""

    examples: Callable[[], Iterator[Example]]
    fingerprint: str
    tokenizer: TokenizerKind | Encoder
    form: DataForm
    folder: Path


@dataclass(frozen=True, slots=True)
class SampleShares:
    """Files or tasks with weights, and of each sample of the whole data the number of its own."""

    names: Sequence[str]
    weights: Sequence[Fraction]
    of_sample: npt.NDArray[np.int64]

    def counts(self, samples: npt.NDArray[np.int64] | slice = slice(None)) -> npt.NDArray[np.int64]:
        """How many of these samples each share has."""
        return np.bincount(self.of_sample[samples], minlength=len(self.names))


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run trains on, and what it evaluates on, if anything."""

    train: TokenDataset | SampleSubset | PairDataset
    held_out: TokenDataset | SampleSubset | PairDataset | None
    shares: SampleShares | None = None

    @property
    def whole(self) -> TokenDataset:
        """The training data as they were prepared, held-out samples included."""
        return self.train.whole

    @property
    def fingerprint(self) -> str:
        """sha256 of all that is read of both; of older folders with their tokenizer, which cannot be left out there."""
        both = (self.train, self.held_out)
        parts = [part and (part.samples_fingerprint or part.whole.fingerprint) for part in both]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def run_data(config: TrainConfig, progress: Callable[[int], None] | None = None, *, verifies: bool = True) -> RunData:
    """The data of a run with these settings, in the parts that `[eval]` makes. They are a folder that `dynapipe
    preprocess` wrote, or the user's files or generated examples, which are tokenized once into a folder beside the
    runs.

    If several runs need the same tokens at once, one of them makes these; `progress` gets the number of samples done.
    Held-out text is tokenized with the training data's tokenizer. The tasks file is read once, here. With `verifies`
    all tokens are compared with their fingerprint, once per machine: damaged ones of this run's text are made again.

    Errors: ConfigError and DataError for data that cannot be trained on, or evaluated on beside these, or have ids that
    the run's model has not.
    """
    tasks = _tasks(config)  # refused before any text is read
    whole = _prepared(config, tasks.bounds, progress, verifies=verifies)
    check_tasks(tasks, whole)
    shares = _shares(config, tasks, whole)
    train, held_out = _parts(config, tasks.bounds, shares, whole, verifies=verifies)
    _refuse_unknown_ids(config, whole)
    if held_out is not None and held_out.whole is not whole:
        _refuse_unknown_ids(config, held_out.whole)
    if config.model.num_decoder_layers:
        pairs = None if held_out is None else PairDataset.of(held_out)
        return RunData(PairDataset.of(train), pairs, shares)
    return RunData(train, held_out, shares)


def _tasks(config: TrainConfig) -> Tasks:
    """Errors: ConfigError for tasks and files that both have weights."""
    tasks = read_tasks(config.data.tasks, SideBounds(config.data.max_input_len, config.data.max_target_len))
    if tasks.weights and any(file.weight for file in weighted_files(config.data.mixture)):
        raise ConfigError(f"{config.data.tasks} gives weights and [data] mixture too: give those of tasks or of files")
    return tasks


def _prepared(
    config: TrainConfig, tasks: TaskBounds, progress: Callable[[int], None] | None, *, verifies: bool
) -> TokenDataset:
    if _is_tokens(config):
        dataset = open_prepared(config.data.path, max_seq_len=config.model.max_seq_len)
        if verifies:
            dataset.verify()
        refuse_other_tokens(config.data, dataset, encoder_decoder=config.model.num_decoder_layers > 0)
        _refuse_other_date(config.data, dataset)
        if not config.eval.path or is_prepared(config.eval.path):  # else the fields may be those of its text
            refuse_other_fields(config.data, dataset)
        return dataset
    source = _source(config, tasks)
    with _writing_alone(source.folder):
        if verifies:
            _remove_damaged(source.folder)
        if not isinstance(source.tokenizer, str):
            encoder = with_fixed_date(source.tokenizer, source.folder, config.data.template_date)
            return _preprocessed(config, tasks, _paths(config), source.folder, encoder, source.form, progress)
        return prepare(
            source.examples,
            source.folder,
            tokenizer=source.tokenizer,
            vocab_size=config.data.vocab_size if source.tokenizer == "bpe" else None,
            max_seq_len=config.model.max_seq_len,
            truncate=config.data.truncate,
            tasks=tasks,
            source_fingerprint=source.fingerprint,
            unread=source.form.unread,
            progress=progress,
        )


@contextmanager
def _writing_alone(folder: Path) -> Iterator[None]:
    """Within: no other run writes tokens in this folder."""
    lock = folder.with_name(f".{folder.name}.lock")
    with FileLock(lock, f"the tokenized data in {folder}", wait_s=PREPARE_LIMIT_S), writing_in(folder):
        yield


def _remove_damaged(folder: Path) -> None:
    """Remove tokens that were made of this run's text and are no longer what they were."""
    if not is_prepared(folder):
        return
    try:
        TokenDataset.open(folder).verify()
    except DataError:
        print(f"note: the tokens in {folder} are damaged: they are prepared again", file=sys.stderr, flush=True)
        remove_path(folder)


def _refuse_unknown_ids(config: TrainConfig, data: TokenDataset) -> None:
    """Errors: DataError. A tokenizer may have more ids than a published model, as long as no sample has them."""
    model = config.model
    if model.described is not None and (place := data.sample_beyond(model.described.vocab_size)):
        sample, token = place
        raise DataError(
            f"sample {sample} of {data.directory} has the id {token} but {model.architecture} has a vocabulary of"
            f" {model.described.vocab_size}: prepare the data with the model's own tokenizer, or give the model more"
            " (resize_token_embeddings of transformers)"
        )


def _parts(
    config: TrainConfig, tasks: TaskBounds, shares: SampleShares | None, whole: TokenDataset, *, verifies: bool
) -> tuple[TokenDataset | SampleSubset, TokenDataset | SampleSubset | None]:
    settings, seed = config.eval, config.run.seed
    if settings.fraction:
        trained, held_out = hold_out(whole, settings.fraction, seed=seed)
        return _mixed(shares, trained, seed), held_out
    train = _mixed(shares, whole, seed)
    if not settings.path:
        return train, None
    if is_prepared(settings.path):
        prepared = _same_tokens(open_prepared(settings.path, max_seq_len=config.model.max_seq_len), whole)
        if verifies:
            prepared.verify()
        return train, prepared
    encoder = whole.tokenizer()
    form = form_of(config.data, find_inputs([settings.path]), encoder)
    made_by = [digest_of(encoder), *form.described(), *_lengths(config, tasks)]
    folder = _tokenized(config, [fingerprint_of_source(settings.path), *made_by])
    encoder = with_fixed_date(encoder, folder)
    with _writing_alone(folder):
        if verifies:
            _remove_damaged(folder)
        return train, _preprocessed(config, tasks, [settings.path], folder, encoder, form, None)


def _shares(config: TrainConfig, tasks: Tasks, whole: TokenDataset) -> SampleShares | None:
    """None where nothing has a weight."""
    files, weights = weighted_files(config.data.mixture), tasks.weights
    if weights:
        names = [f"task {task}" for task in whole.tasks]
        return SampleShares(names, [weights[task] for task in whole.tasks], np.asarray(whole.task_ids, np.int64))
    if len(files) < 2 or not files[0].weight:
        return None
    num_files = [len(find_inputs([file.path])) for file in files]  # a folder has several
    of_sample = np.repeat(np.repeat(np.arange(len(files)), num_files), whole.file_sizes)
    return SampleShares([file.path for file in files], [file.weight for file in files], of_sample)


def _mixed(shares: SampleShares | None, part: TokenDataset | SampleSubset, seed: int) -> TokenDataset | SampleSubset:
    """The samples of an epoch, where files or tasks have weights: a function of these, of the data and the seed."""
    if shares is None:
        return part
    indices = np.sort(part.indices)
    grouped, counts = indices[np.argsort(shares.of_sample[indices], kind="stable")], shares.counts(indices)
    if not counts.all():
        raise ConfigError(
            f"{shares.names[int(counts.argmin())]} has no samples left to train on: lower [eval] fraction"
        )
    parts = np.split(grouped, np.cumsum(counts)[:-1])
    drawn = samples_of_epoch(parts, shares.weights, names=shares.names, seed=seed)
    return SampleSubset.of(part.whole, drawn)


def shown_forms(config: TrainConfig) -> list[str]:
    """`form_lines` of a run's files of text, and of those it holds out; empty for prepared and made-up data."""
    paths = [] if _is_tokens(config) else _paths(config)
    if not paths:
        return []
    held_out = config.eval.path and not is_prepared(config.eval.path)
    return form_lines(
        config.data,
        find_inputs(paths),
        find_inputs([config.eval.path]) if held_out else [],
        encoder_decoder=config.model.num_decoder_layers > 0,
    )


def data_lines(data: RunData) -> list[str]:
    """What a run trains and is evaluated on, for its log."""
    whole = data.whole
    truncated = f", {whole.num_truncated:,} truncated" if whole.num_truncated else ""
    lengths = pair_lengths(whole.lengths) if isinstance(data.train, PairDataset) else whole.lengths
    tokens = counted(int(lengths[:, :2].sum()), "token")
    lines = [f"data: {counted(len(whole), 'sample')}, {tokens}{truncated}"]
    if shares := data.shares:
        drawn_of_each = shares.counts(data.train.indices)
        for name, drawn, size in zip(shares.names, drawn_of_each, shares.counts(), strict=True):
            percents = percent(drawn / len(data.train))
            lines.append(f"  {name}: {percents} of the samples, {drawn / size:.3g} times its {size:,} an epoch")
    lines += loss_notes(whole)
    if data.held_out is not None:
        tokens = counted(int(data.held_out.lengths[:, :2].sum()), "token")
        own = None if data.held_out.whole is whole else data.held_out.whole  # data of their own
        truncated = f", {own.num_truncated:,} truncated" if own and own.num_truncated else ""
        lines.append(f"held out for evaluation: {counted(len(data.held_out), 'sample')}, {tokens}{truncated}")
        lines += [f"held out: {note}" for note in loss_notes(own)] if own else []
    return lines


def check_data(data: RunData, check: Callable[..., None]) -> None:
    """Call `check(lengths, forwards_alone=…)` for the training data and for the held-out data, which run forwards
    alone. An error about a sample says whether it is held out, and names the record, not the place in the part."""
    for part, where in ((data.train, ""), (data.held_out, "[eval] of the held-out data, ")):
        if part is None:
            continue
        try:
            check(part.lengths, forwards_alone=part is data.held_out)
        except DynaPipeError as error:
            text = str(error)
            if match := re.match(r"sample (\d+)\b", text):
                record = describe_samples(part.whole, part.indices, (), [int(match[1])])
                text = f"sample {record}{text[match.end() :]}"
            if where + text == str(error):
                raise
            raise type(error)(f"{where}{text}") from error


def refuse_pieces(config: TrainConfig, data: RunData, *, compare: bool) -> None:
    """Errors: ConfigError for plans that cut samples whose targets are not all at the end: lengths do not say where."""
    cuts = compare or config.plan.split_policy == "fixed-rows" or config.plan.pieces != "off"
    if data.whole.targets is not None and cuts:
        raise ConfigError(
            "--compare, split_policy fixed-rows and pieces cut long samples, of which only those with all targets at"
            " their end can be cut: leave it out for chats, and for pairs of answers"
        )


def _same_tokens(held_out: TokenDataset, whole: TokenDataset) -> TokenDataset:
    """Errors: DataError for data whose ids mean something else than those that the model trains on."""
    if identity_of(held_out.tokenizer()) != identity_of(whole.tokenizer()):
        raise DataError(
            f"[eval] path {held_out.directory} was prepared with another tokenizer than {whole.directory}: prepare it"
            " with the tokenizer of the training data, or give its text"
        )
    return held_out


def refuse_other_data(checkpoint: Path, config: TrainConfig, data: RunData) -> None:
    """Errors: DataError for other data than those that a run has trained on, or global batches by another rule, before
    anything of it is changed."""
    trained = read_manifest(checkpoint).run.loader
    same_lengths = trained.get("lengths") == array_digest(as_length_array(data.train.lengths))
    if same_lengths and trained.get("data") in (None, data.train.samples_fingerprint):
        _refuse_other_rule(checkpoint, config, trained.get("rule", {}))
        return
    differing = "tokens, of the same lengths," if same_lengths else "lengths"
    paths = ", ".join(_paths(config)) if not _is_tokens(config) else config.data.path
    day = data.whole.template_date
    if day and read_manifest(checkpoint).run.settings.get("data", {}).get("template_date") != day:
        differing += f", since the chat template prints the date, now {day}: tokens"
    raise DataError(
        f"{checkpoint} was trained on other data than {paths or 'the generator'} in {Path.cwd()} by these settings"
        f" (their {differing} differ): resume with the same data and settings, where the run was started or with --data"
    )


def _refuse_other_rule(checkpoint: Path, config: TrainConfig, trained: Mapping[str, Any]) -> None:
    rule = training_rule(config).to_json()
    if others := {name: saved for name, saved in trained.items() if saved != rule.get(name)}:
        before, now = (
            ", ".join(f"{name} {values[name]}" for name in others if values.get(name) is not None)
            for values in (trained, rule)
        )
        raise DataError(
            f"{checkpoint} was trained with {before} but this run has {now}: resume with the same data and settings, or"
            " begin a new run"
        )


def refuse_other_training(checkpoint: Path, config: TrainConfig) -> None:
    """Errors: DataError where other weights train than before, or another engine trains them."""
    saved = read_manifest(checkpoint).run.settings
    for table, setting, words in (("lora", "enabled", "adapters"), ("deepspeed", "config", "a DeepSpeed engine")):
        had, has = bool(saved.get(table, {}).get(setting)), bool(getattr(getattr(config, table), setting))
        if had != has:
            before, now = "with" if had else "without", "with" if has else "without"
            raise DataError(
                f"{checkpoint} was trained {before} {words} and this run is {now}: resume with the same [{table}], or"
                " begin a new run from its model (--output, then --model)"
            )


def refuse_other_first_weights(checkpoint: Path, config: TrainConfig, first_weights: str) -> None:
    """Errors: DataError for others than those that a run began with, before anything of it is changed."""
    saved = read_manifest(checkpoint).run.first_weights
    if saved and saved != first_weights:
        use = "its adapters are beside" if config.lora.enabled else "its loss compares with"
        raise DataError(
            f"{config.model.init_from} has other weight files than when the run of {checkpoint} began, and {use} those:"
            " put them back to resume, or begin a new run"
        )


def validated_on(config: TrainConfig, held_out: TokenDataset | SampleSubset | PairDataset | None) -> str:
    """Names what validation losses by these settings are of, samples and kind of loss; empty where none are taken."""
    settings = config.eval
    if held_out is None or not settings.every:
        return ""
    samples = held_out.samples_fingerprint or held_out.whole.fingerprint
    batches = [settings.steps, config.data.batch_size, config.data.tokens_per_batch] if settings.steps else []
    preferences = asdict(replace(config.preferences, beta=config.preferences.used_beta))
    made_of = [samples, batches, config.plan.loss_norm, preferences]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def _tokenized(config: TrainConfig, made_from: list[object]) -> Path:
    """Where tokens lie beside the run, by what they were made from."""
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    return runs_folder(config.run.run_dir) / "tokenized" / name


def _is_tokens(config: TrainConfig) -> bool:
    return bool(config.data.path) and is_prepared(config.data.path)


def _source(config: TrainConfig, tasks: TaskBounds) -> _Source:
    data, seed, paths = config.data, config.run.seed, _paths(config)
    tokenizer: TokenizerKind | Encoder
    made_by: list[object]
    match data.tokenizer:
        case "bpe" | "bytes":
            tokenizer = "bpe" if data.tokenizer == "bpe" else "bytes"
            made_by = [tokenizer, data.vocab_size if tokenizer == "bpe" else 0]
        case _:
            if not paths:
                raise ConfigError(
                    f"[data] tokenizer is {data.tokenizer!r} but no path is given: the built-in generator's text takes"
                    " bpe or bytes; name your own data"
                )
            tokenizer = tokenizer_to_train_with(data.tokenizer, encoder_decoder=config.model.num_decoder_layers > 0)
            made_by = [digest_of(tokenizer)]
    if data.template == "preference" and not isinstance(tokenizer, FolderEncoder):
        raise ConfigError(
            f"pairs of a chosen and a rejected answer are read by a decoder-only model's own tokenizer, but the"
            f" tokenizer is {data.tokenizer!r}: name the model's folder by --model, or its tokenizer's by --tokenizer"
        )
    if data.template != "auto" and not isinstance(tokenizer, FolderEncoder):
        raise ConfigError(
            f"[data] template is {data.template} but the tokenizer is {data.tokenizer!r}, and templates are how a"
            " decoder-only model's own tokenizer reads records: leave it out; to read texts where records have more,"
            " name their field by fields"
        )
    if data.template_date and not (isinstance(tokenizer, FolderEncoder) and tokenizer.prints_date):
        raise ConfigError(f"template_date is {data.template_date}, but no chat template prints the date: leave it out")
    if paths:
        files = find_inputs(paths)
        prints = [fingerprint_of_source(file.path) for file in files]
        form = form_of(data, files, tokenizer)
        examples = partial(read_examples, files, form.fields)
        fingerprint = prints[0] if len(prints) == 1 else hashlib.sha256(json.dumps(prints).encode()).hexdigest()
    elif data.fields:
        raise ConfigError("[data] fields are those of files: name your data, too")
    else:
        form = DataForm(None, RecordFields())
        examples = partial(generate_examples, num_samples=data.num_samples, seed=seed)
        fingerprint = fingerprint_of_source(generator_settings(num_samples=data.num_samples, seed=seed))
    made_from = [fingerprint, *made_by, *form.described(), *_lengths(config, tasks)]
    folder = _tokenized(config, made_from)
    if data.template_date and template_date_of(folder) not in ("", data.template_date):
        folder = _tokenized(config, [*made_from, data.template_date])  # this run began with another date
    return _Source(examples, fingerprint, tokenizer, form, folder)


def _lengths(config: TrainConfig, tasks: TaskBounds) -> list[object]:
    """The bounds of samples, as part of what tokens were made from."""
    sides = [asdict(tasks)] if tasks.bind else []
    return [config.model.max_seq_len, config.data.truncate, *sides]


def _paths(config: TrainConfig) -> list[str]:
    """The files to tokenize; none where the generator makes the text.

    Errors: ConfigError for prepared data in a mixture, whose tokens another tokenizer may have made.
    """
    paths = [file.path for file in weighted_files(config.data.mixture)]
    if prepared := [path for path in paths if is_prepared(path)]:
        raise ConfigError(f"[data] mixture names {prepared[0]}, which is tokenized already: name the files of text")
    return paths or ([config.data.path] if config.data.path else [])


def _preprocessed(
    config: TrainConfig,
    tasks: TaskBounds,
    paths: Sequence[str],
    folder: Path,
    encoder: Encoder,
    form: DataForm,
    progress: Callable[[int], None] | None,
) -> TokenDataset:
    """Files of the user's by a tokenizer of any make, as `dynapipe preprocess` does it."""
    if not is_prepared(folder):
        longest, truncate = config.model.max_seq_len, config.data.truncate
        preprocess(
            find_inputs(paths),
            folder,
            settings=EncodeSettings(
                target="dataset",
                keys=(form.fields.text,),
                pair=form.fields.pair,
                template=form.template,
                is_instruction=form.fields.is_instruction,
                loss_on=form.loss_on,
                unread=form.unread,
                max_seq_len=longest,
                truncate=truncate,
                tasks=tasks,
            ),
            encoder=encoder,
            overwrite=True,
            progress=None if progress is None else lambda done: progress(done.num_samples),
        )
    return TokenDataset.open(folder)
