"""`dynapipe preprocess`: corpora to tokens on disk with a lengths file, for this package or in Megatron's format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.indexed_dataset import (
    import_indexed,
    index_lengths,
    is_indexed,
    lengths_path,
    read_index,
    write_lengths,
)
from dynapipe_ext.data.length_bounds import SideBounds
from dynapipe_ext.data.preprocessing import preprocess as work
from dynapipe_ext.data.preprocessing.compressed import COMPRESSED
from dynapipe_ext.data.preprocessing.encoder_loading import gpt2_encoder, load_encoder
from dynapipe_ext.data.preprocessing.encoders import Encoder, Specials, lost_characters
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import Form, InputFile, TextUnit, find_inputs
from dynapipe_ext.data.preprocessing.preprocess import train_bpe
from dynapipe_ext.data.preprocessing.record_forms import RecordFields
from dynapipe_ext.data.preprocessing.table_files import is_saved_dataset
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.data.preprocessing.workers import ProcessWorkers, RayWorkers, Workers, usable_cores
from dynapipe_ext.data.sample_selection import Tasks, read_tasks, unknown_tasks
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import (
    add_json,
    add_truncate,
    cut_at,
    ending,
    flag_of,
    given_flags,
    refuse_below,
)
from dynapipe_ext.launch.job.data_form import (
    DataForm,
    form_of,
    is_encoder_decoder,
    is_model_folder,
    loss_notes,
    tokenizer_to_train_with,
)
from dynapipe_ext.launch.processes.env import child_environment
from dynapipe_ext.settings.tables import DataSettings
from dynapipe_ext.settings.train_config import add_flag, add_flags, check_data_settings
from dynapipe_ext.tools.console import deliver, error_console

_OF_INDEX = {"--input", "--output", "--output-prefix", "--lengths-only", "--skip-empty", "--overwrite", "--json"}
_ALONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # one core a worker

_EPILOG = """examples:
  dynapipe preprocess --input 'data/*.jsonl.gz' --tokenizer tokenizer.json --output prepared --workers 8
  dynapipe preprocess --input corpus.parquet --tokenizer my-llama/ --json-keys content --output prepared
  dynapipe preprocess --input chats.jsonl --tokenizer my-llama/ --template chat --output prepared
  dynapipe preprocess --input pairs.jsonl --tokenizer bpe --vocab-size 8192 --max-seq-len 4096 --output prepared
  dynapipe preprocess --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt --append-eod \\
      --output-prefix my-gpt2
  dynapipe preprocess --input my-gpt2_text_document --lengths-only
  dynapipe preprocess --input my-gpt2_text_document --vocab-size 50257 --output prepared
  dynapipe plan --lengths prepared/lengths.npy --pp 4

--output writes a folder for `dynapipe train` and DynaPipeDataLoader: chats, pairs of input and target, or text; every
sample ends with the end of text. With a model's folder as tokenizer, samples are those of `dynapipe train --model
FOLDER`, beginning of text included, unless --eod-token, --separator or --special-tokens change them. --output-prefix
writes Megatron's .bin and .idx, and lengths beside them. After Ctrl-C or a kill the same command goes on from there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    _add_input(parser.add_argument_group("input"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_output(parser.add_argument_group("output"))
    running = parser.add_argument_group("processes")
    running.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one for each core, or CPU of Ray)"
    )
    running.add_argument("--log-interval", type=int, metavar="N", help="say every N documents what is done")
    running.add_argument("--ray", action="store_true", help="encode on a Ray cluster")
    running.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a running cluster, or auto (default: a new local one)"
    )


def _add_input(reading: argparse._ArgumentGroup) -> None:
    reading.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="JSONL, Parquet, text (.gz .xz .zst .bz2), globs; .idx; a folder, whose tree the output mirrors",
    )
    reading.add_argument("--input-format", choices=get_args(Form), help="form of the files (default: by their names)")
    add_flags(reading, "data.template", "data.loss_on", "data.fields")
    reading.add_argument(
        "--json-keys", nargs="+", action="extend", metavar="KEY", help="fields with text; other fields are ignored"
    )
    reading.add_argument("--text-unit", choices=get_args(TextUnit), default="line", help="a sample of a text file")
    reading.add_argument(
        "--skip-empty", action="store_true", help="leave out and count records with nothing to train on"
    )


def _add_tokenizer(tokens: argparse._ArgumentGroup) -> None:
    add_flag(tokens, "data.tokenizer", "tokenizer.json, folder of transformers, tiktoken's name, bytes, or bpe")
    tokens.add_argument("--tokenizer-type", metavar="TYPE", help="Megatron's GPT2BPETokenizer or HuggingFaceTokenizer")
    tokens.add_argument("--tokenizer-model", metavar="NAME", help="Megatron's name for --tokenizer")
    tokens.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    tokens.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="of the bpe to train, or of the ids in an .idx")
    tokens.add_argument("--append-eod", action="store_true", help="end of text after each document (--output always)")
    tokens.add_argument("--eod-token", metavar="TOKEN", help="the end of text, where the tokenizer does not name it")
    tokens.add_argument(
        "--separator", metavar="TOKEN", help="token between input and target (default: its own, or none)"
    )
    tokens.add_argument(
        "--special-tokens", choices=get_args(Specials), help="how to read special tokens that a text spells"
    )
    tokens.add_argument(
        "--add-special-tokens", action="store_true", help="add the tokenizer's own tokens around a text (.bin/.idx)"
    )


def _add_output(writing: argparse._ArgumentGroup) -> None:
    where = writing.add_mutually_exclusive_group(required=True)
    add_flag(where, "checkpoint.output", "a dataset folder")
    where.add_argument("--output-prefix", metavar="PREFIX", help="Megatron's PREFIX_KEY_document.bin and .idx")
    where.add_argument("--lengths-only", action="store_true", help="lengths of an existing .idx, beside it")
    writing.add_argument("--dataset-impl", choices=["mmap"], help="Megatron's flag: the only kind of .bin/.idx")
    add_flag(writing, "model.max_seq_len", "longest sample in tokens (default: no bound)")
    add_flag(writing, "data.max_input_len", "most tokens of an input; 0: only of a sample", default=0)
    add_flag(writing, "data.max_target_len", "most tokens of a target; 0: only of a sample", default=0)
    add_flag(writing, "data.tasks", "TOML or JSON of tasks with other such lengths")
    add_truncate(writing, "--max-seq-len; without --truncate longer ones are refused")
    writing.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    add_json(writing, "the result")


def run(args: argparse.Namespace) -> int:
    console = error_console()
    if args.lengths_only or any(map(is_indexed, args.input)):
        return _from_index(args, console)
    output = args.output_prefix if args.output is None else args.output
    parts = _parts(args, output)
    files = tuple(file for inputs, _ in parts for file in inputs)
    settings, encoder = chosen_encoding(args, files, console)
    if dropped := lost_characters(encoder):
        console.print(
            f"warning: the tokenizer has no token for {', '.join(dropped)} and drops such characters without notice"
        )
    started_s = time.monotonic()
    outcomes = [_preprocessed(args, inputs, target, settings, encoder, console) for inputs, target in parts]
    seconds = time.monotonic() - started_s
    if args.tasks:
        _note_tasks(chosen_tasks(args), [target for _, target in parts], console)
    for note in [note for _, target in parts if args.output for note in loss_notes(TokenDataset.open(target))]:
        console.print(note, soft_wrap=True, markup=False)
    _report(
        args,
        {
            "outputs": [str(path) for outcome in outcomes for path in outcome.outputs],
            "files": len(files),
            "samples": sum(outcome.num_samples for outcome in outcomes),
            "kept_samples": sum(outcome.num_kept_samples for outcome in outcomes),
            "tokens": sum(outcome.num_tokens for outcome in outcomes),
            "truncated": sum(outcome.num_truncated for outcome in outcomes),
            "skipped": sum(outcome.num_skipped for outcome in outcomes),
            "already_there": all(outcome.reused for outcome in outcomes),
            "vocab_size": encoder.vocab_size,
            "dtype": settings.dtype(encoder).name,
            "end_of_text": encoder.eos if settings.append_eod else None,
            "seconds": round(seconds, 3),
        },
    )
    return 0


def _preprocessed(
    args: argparse.Namespace,
    inputs: tuple[InputFile, ...],
    target: str,
    settings: EncodeSettings,
    encoder: Encoder,
    console: Console,
) -> work.PreprocessOutcome:
    encoder = work.with_fixed_date(encoder, Path(target))
    with _progress(console, args.log_interval) as show, _noted_when_stopped(console):
        return work.preprocess(
            inputs,
            target,
            settings=settings,
            encoder=encoder,
            workers=_workers(args, settings, encoder),
            overwrite=args.overwrite,
            progress=show,
        )


def _note_tasks(tasks: Tasks, outputs: Sequence[str], console: Console) -> None:
    """Print which parts of the tasks file the outputs do not use."""
    data_tasks = {task: None for output in outputs for task in TokenDataset.open(output).tasks}
    if tasks.weights:
        console.print("note: weights of tasks are for dynapipe train --tasks: a prepared folder keeps none")
    if fault := unknown_tasks(tasks, data_tasks):
        console.print(f"warning: {fault}", markup=False, soft_wrap=True)


def _parts(args: argparse.Namespace, output: str) -> list[tuple[tuple[InputFile, ...], str]]:
    """Inputs and their outputs: all files go to one output; a folder's files go one by one to a tree like the folder's,
    unless it is one data set of Hugging Face's."""
    root = Path(args.input[0])
    if len(args.input) > 1 or not root.is_dir() or is_saved_dataset(root):
        return [(find_inputs(args.input, args.input_format), output)]
    if Path(output).resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"the output {output} lies in the input folder {root}: choose another place")
    parts: dict[str, tuple[InputFile, ...]] = {}
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        if not path.is_file() or any(part.startswith(".") for part in place.parts):
            continue
        stem = place.with_suffix("").with_suffix("") if place.suffix in COMPRESSED else place.with_suffix("")
        if (target := str(Path(output) / stem)) in parts:
            raise ConfigError(f"{path} and {parts[target][0].path} would both be written to {target}: rename one")
        parts[target] = find_inputs([path], args.input_format)
    if not parts:
        raise ConfigError(f"the folder {root} holds no file: name one with data")
    for target in parts:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
    return [(files, target) for target, files in parts.items()]


def _workers(args: argparse.Namespace, settings: EncodeSettings, encoder: Encoder) -> Workers:
    refuse_below(args, 1, "workers")
    if args.ray or args.ray_address:
        return RayWorkers(settings, encoder, num_workers=args.workers, address=args.ray_address)
    return ProcessWorkers(settings, encoder, args.workers or usable_cores(), child_environment(_ALONE))


def _from_index(args: argparse.Namespace, console: Console) -> int:
    """Handle a data set that is tokenized already."""
    if len(args.input) > 1 or not is_indexed(args.input[0]):
        raise ConfigError(
            "an .idx must be the only input, and --lengths-only needs one: name one data set of Megatron's format"
        )
    prefix = args.input[0]
    _refuse_of_index(args, prefix)
    if args.output_prefix is not None:
        raise ConfigError(f"{prefix} is in Megatron's format already: use --output DIR or --lengths-only")
    if args.lengths_only:
        index = read_index(prefix)
        if not args.skip_empty:
            index_lengths(index)  # refuses sequences without a row
        left_out = write_lengths(lengths_path(prefix), index.lengths)
        rows, tokens, outputs = len(index.lengths) - left_out, int(index.lengths.sum()), lengths_path(prefix)
    else:
        encoder, vocab_size = _ids_of_index(args)
        with _progress(console) as show:
            dataset = import_indexed(
                prefix,
                args.output,
                vocab_size=vocab_size,
                tokenizer_json=encoder.as_json() if encoder else None,
                skip_empty=args.skip_empty,
                overwrite=args.overwrite,
                progress=lambda done, total: show(work.Progress(done, total, 0, done, 0)),
            )
        rows, tokens, outputs = len(dataset), int(dataset.offsets[-1]), Path(args.output)
        left_out = int(str(dataset.meta["num_skipped"]))
    _report(args, {"outputs": [str(outputs)], "samples": rows, "tokens": tokens, "skipped": left_out})
    return 0


def _refuse_of_index(args: argparse.Namespace, prefix: str) -> None:
    """Errors: ConfigError for a flag that has nothing to do with an .idx."""
    ids = {"--tokenizer", "--tokenizer-model", "--vocab-size"}
    names_tokenizer = args.tokenizer or args.tokenizer_model
    for flag in given_flags(args):
        if args.lengths_only and flag in ids:
            raise ConfigError(f"--lengths-only counts tokens, whatever their ids, without {flag}: leave it out")
        if flag not in _OF_INDEX | ids | ({"--eod-token"} if names_tokenizer else set()):
            raise ConfigError(f"{prefix} is tokenized already, and {flag} is for text: leave it out")


def _ids_of_index(args: argparse.Namespace) -> tuple[Encoder | None, int]:
    """The tokenizer that the flags name, and how many ids there are. Errors: ConfigError where neither says that, or
    both say other."""
    refuse_below(args, 1, "vocab_size")
    which = _which_tokenizer(args) if args.tokenizer or args.tokenizer_model else None
    encoder = named_encoder(args, which) if which else None
    if encoder is None and args.vocab_size is None:
        raise ConfigError("an .idx does not say how many ids there are: give --vocab-size, or --tokenizer")
    if encoder is None:
        return None, args.vocab_size
    if args.vocab_size not in (None, encoder.vocab_size):
        raise ConfigError(
            f"--vocab-size is {args.vocab_size} but {which} has {encoder.vocab_size} ids: leave one of them out"
        )
    return encoder, encoder.vocab_size


@contextmanager
def _noted_when_stopped(console: Console) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print("stopped: what is done is kept, the same command goes on from there")
        raise


@contextmanager
def _progress(console: Console, log_interval: int | None = None) -> Iterator[Any]:
    """A function that shows each `Progress`: as a bar on a terminal, else as a line at each tenth of the input, or
    wherever with `log_interval` as many documents more are done."""
    live = console.is_terminal and log_interval is None
    bar = Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not live,
    )
    task = bar.add_task("tokenizing", total=None, figures="")
    started_s = time.monotonic()
    tenth = num_said = 0

    def show(progress: work.Progress) -> None:
        nonlocal tenth, num_said
        new_tokens = progress.num_tokens - progress.num_kept_tokens
        rate = new_tokens / max(1e-9, time.monotonic() - started_s)
        figures = f"{progress.num_tokens:,} tokens  {rate:,.0f} tokens/s"
        if live:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes, figures=figures)
        elif log_interval is not None:
            if progress.num_samples // log_interval > num_said // log_interval:
                num_said = progress.num_samples
                console.print(f"tokenizing: {num_said:,} documents  {figures}", soft_wrap=True)
        elif (now := 10 * progress.done_bytes // max(1, progress.total_bytes)) > tenth:
            tenth = now
            console.print(f"tokenizing: {10 * tenth} %  {figures}", soft_wrap=True)

    with bar:
        yield show


def _report(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    table = Table(show_header=False, box=box.ROUNDED)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, list):
            value = "\n".join(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        label = "of these, by an interrupted run" if name == "kept_samples" else name.replace("_", " ")
        table.add_row(label, "none" if value is None else str(value))
    deliver(args.json, facts, table)


def chosen_encoding(
    args: argparse.Namespace, files: tuple[InputFile, ...], console: Console
) -> tuple[EncodeSettings, Encoder]:
    """How the text in `files` becomes samples, and by which tokenizer. Errors: ConfigError for flags that contradict
    each other; DataError for first records that cannot be used."""
    _refuse_together(args)
    which = _which_tokenizer(args)
    if args.vocab_size is not None and which not in (None, "bpe"):
        raise ConfigError("--vocab-size goes with --tokenizer bpe, which is trained: other tokenizers have theirs")
    encoder = None if which == "bpe" else named_encoder(args, which)
    settings = _settings(args, _form(args, files, encoder or "bpe", which or "GPT-2's"))
    if encoder is None:
        encoder = _trained_bpe(args, files, settings, console)
    return settings, encoder


def chosen_tasks(args: argparse.Namespace) -> Tasks:
    return read_tasks(args.tasks or "", SideBounds(args.max_input_len, args.max_target_len))


def named_encoder(args: argparse.Namespace, which: str | None) -> Encoder:
    """The tokenizer of a name (None: of a vocabulary and merges). For a dataset folder, a model's folder gives the
    tokenizer that a run would use, unless flags change it."""
    choices = _choices(args)
    if which is None:
        return gpt2_encoder(args.vocab_file, args.merge_file, **choices)
    if args.output is None or not is_model_folder(which) or any(choices.values()):
        return load_encoder(which, **choices)
    return tokenizer_to_train_with(which, encoder_decoder=is_encoder_decoder(which))


def _choices(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "eos": args.eod_token,
        "separator": args.separator,
        "specials": args.special_tokens,
        "add_special_tokens": args.add_special_tokens,
    }


def _refuse_together(args: argparse.Namespace) -> None:
    refuse_below(args, 1, "log_interval")
    names = ("template", "loss_on", "fields")
    flags = [flag_of(name) for name in names if getattr(args, name)]
    if args.output_prefix is not None and args.tasks:
        raise ConfigError("--tasks is for samples, which --output DIR has: .bin/.idx holds texts, by --json-keys")
    if args.output_prefix is not None and flags:
        raise ConfigError(f"{flags[0]} is for samples, which --output DIR has: .bin/.idx holds texts, by --json-keys")
    if args.output is not None and args.dataset_impl:
        raise ConfigError(f"--dataset-impl {args.dataset_impl} is for --output-prefix: a dataset folder has one form")
    if args.output is not None and args.add_special_tokens:
        raise ConfigError(
            "--add-special-tokens is for --output-prefix: a dataset folder has its own borders of samples"
        )
    if args.json_keys and flags and (flags != ["--template"] or args.template != "text"):
        raise ConfigError(f"--json-keys reads plain text, whatever else there is, and {flags[0]} says other: give one")


def _form(args: argparse.Namespace, files: tuple[InputFile, ...], tokenizer: Encoder | str, name: str) -> DataForm:
    """Errors: ConfigError for a template with a tokenizer that has none."""
    is_models = isinstance(tokenizer, FolderEncoder) and not any(_choices(args).values())
    if args.template not in (None, "auto") and not is_models:
        raise ConfigError(
            f"--template {args.template} is how a decoder-only model's own tokenizer reads records: name its folder as"
            " --tokenizer, without --eod-token, --separator and --special-tokens, or leave the template out"
        )
    if args.output is None or (args.json_keys and not is_models):
        return DataForm(None, RecordFields())
    settings = DataSettings(
        tokenizer=name,
        template="text" if args.json_keys else args.template or "auto",
        fields=tuple((args.json_keys or ())[:1] or args.fields or ()),
        loss_on=args.loss_on or "answers",
    )
    check_data_settings(settings, "dynapipe preprocess")
    form = form_of(settings, files, tokenizer)
    return form if is_models else DataForm(None, form.fields, form.unread)


def _settings(args: argparse.Namespace, form: DataForm) -> EncodeSettings:
    tasks = chosen_tasks(args).bounds
    truncate = None if tasks.bind and args.max_seq_len is None and args.truncate is True else args.truncate
    cut = cut_at(truncate, args.max_seq_len)
    if cut is not None and args.max_seq_len not in (None, cut):
        raise ConfigError(f"--truncate cuts at {cut} and --max-seq-len is {args.max_seq_len}: give one of them")
    return EncodeSettings(
        target="megatron" if args.output is None else "dataset",
        keys=tuple(args.json_keys or (form.fields.text,)),
        keys_only=bool(args.json_keys) and form.template is None,
        pair=form.fields.pair,
        unit=args.text_unit,
        append_eod=args.append_eod or args.output is not None,
        max_seq_len=args.max_seq_len if cut is None else cut,
        truncate=args.truncate is not None,
        tasks=tasks,
        skip_empty=args.skip_empty,
        template=form.template,
        is_instruction=form.fields.is_instruction,
        loss_on=form.loss_on,
        unread=form.unread,
    )


def _trained_bpe(
    args: argparse.Namespace, files: tuple[InputFile, ...], settings: EncodeSettings, console: Console
) -> Encoder:
    if args.vocab_size is None:
        raise ConfigError("--tokenizer bpe is trained on the input: say how large with --vocab-size, for example 8192")
    if any(_choices(args).values()):
        raise ConfigError(
            "--tokenizer bpe has special tokens of its own: leave out --eod-token, --separator, --special-tokens and"
            " --add-special-tokens"
        )
    console.print(f"training a BPE of {args.vocab_size:,} ids")
    return train_bpe(files, settings, args.vocab_size)


def _which_tokenizer(args: argparse.Namespace) -> str | None:
    """The name for `load_encoder`; None for a vocabulary and its merges."""
    if bool(args.vocab_file) != bool(args.merge_file):
        raise ConfigError("--vocab-file and --merge-file go together: give both")
    if args.tokenizer_type not in (None, "GPT2BPETokenizer", "HuggingFaceTokenizer"):
        raise ConfigError(
            f"--tokenizer-type is {args.tokenizer_type!r}: give GPT2BPETokenizer, HuggingFaceTokenizer, or what"
            " --tokenizer takes"
        )
    if args.tokenizer and args.tokenizer_model and args.tokenizer != args.tokenizer_model:
        raise ConfigError("--tokenizer and --tokenizer-model mean the same thing: give one")
    which: str | None = args.tokenizer or args.tokenizer_model
    if which and args.vocab_file:
        raise ConfigError("--tokenizer and --vocab-file are two tokenizers: give one")
    if args.tokenizer_type == "GPT2BPETokenizer" and not args.vocab_file:
        raise ConfigError("GPT2BPETokenizer needs --vocab-file and --merge-file")
    if which is None and not args.vocab_file:
        raise ConfigError(
            "no tokenizer: name one with --tokenizer (a tokenizer.json, a folder, an encoding of tiktoken, bytes, bpe)"
            " or with --vocab-file and --merge-file"
        )
    return which
