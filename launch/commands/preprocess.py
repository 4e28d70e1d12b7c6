"""`dynapipe preprocess`: corpora to tokens on disk with a lengths file, for this project or in Megatron's format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.indexed_dataset import index_lengths, is_indexed, lengths_path, read_index, write_lengths
from dynapipe_ext.data.mixture import unknown_tasks
from dynapipe_ext.data.preprocessing import preprocess as work
from dynapipe_ext.data.preprocessing.encoders import Encoder, Specials, lost_characters
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.indexed_import import import_indexed
from dynapipe_ext.data.preprocessing.inputs import Form, InputFile, TextUnit, find_inputs
from dynapipe_ext.data.preprocessing.ray_workers import RayWorkers
from dynapipe_ext.data.preprocessing.workers import ProcessWorkers, Workers, usable_cores
from dynapipe_ext.data.reading import COMPRESSED
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import (
    MAX_INPUT_HELP,
    MAX_TARGET_HELP,
    TASKS_HELP,
    add_json,
    add_truncate,
    ending,
)
from dynapipe_ext.launch.commands.preprocess_choices import chosen_encoding, chosen_tasks, named_encoder
from dynapipe_ext.launch.env import child_environment
from dynapipe_ext.settings.tables import TemplateChoice
from dynapipe_ext.tools.console import deliver

_OF_TEXT = (  # options that an .idx cannot follow
    "input_format",
    "json_keys",
    "pair_keys",
    "template",
    "input_key",
    "target_key",
    "text_key",
    "append_eod",
    "separator",
    "special_tokens",
    "add_special_tokens",
    "max_seq_len",
    "max_input_len",
    "max_target_len",
    "tasks",
    "truncate",
)
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

--output writes what `dynapipe train` and DynaPipeDataLoader read: chats, pairs of input and target, or text, each
sample with the end of text behind it. A model's folder as tokenizer does what `dynapipe train --model FOLDER` has it
do, beginning of text included, unless --eod-token, --separator or --special-tokens make another one. --output-prefix
writes Megatron's .bin and .idx, and lengths beside them. A run that was stopped, by Ctrl-C or a kill, goes on where it
was when it is started again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    reading = parser.add_argument_group("input")
    reading.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL, Parquet, text (.gz .xz .zst .bz2), globs; .idx; a folder, whose tree the output mirrors",
    )
    reading.add_argument("--input-format", choices=get_args(Form), help="where a file's name does not say it")
    reading.add_argument(
        "--template", choices=get_args(TemplateChoice), help="what records are; auto, the default: as the first one"
    )
    reading.add_argument("--input-key", metavar="KEY", help="field of the prompt (input, prompt)")
    reading.add_argument("--target-key", metavar="KEY", help="field of the response (target, response)")
    reading.add_argument("--text-key", metavar="KEY", help="field of plain text (text), read though pairs are there")
    reading.add_argument("--pair-keys", nargs=2, metavar=("INPUT", "TARGET"), help="--input-key and --target-key")
    reading.add_argument("--json-keys", nargs="+", metavar="KEY", help="fields with text, whatever others there are")
    reading.add_argument("--text-unit", choices=get_args(TextUnit), default="line", help="a sample of a text file")
    reading.add_argument("--skip-empty", action="store_true", help="leave out, and count, what has nothing to train on")

    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer.json, folder of transformers, tiktoken's name, bytes, or bpe"
    )
    tokens.add_argument("--tokenizer-type", metavar="TYPE", help="Megatron's GPT2BPETokenizer or HuggingFaceTokenizer")
    tokens.add_argument("--tokenizer-model", metavar="NAME", help="Megatron's name for --tokenizer")
    tokens.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    tokens.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="of the bpe to train, or of the ids in an .idx")
    tokens.add_argument("--append-eod", action="store_true", help="end of text after each document (--output always)")
    tokens.add_argument("--eod-token", metavar="TOKEN", help="which token that is, where the tokenizer does not say")
    tokens.add_argument(
        "--separator", metavar="TOKEN", help="token between input and target (default: its own, or none)"
    )
    tokens.add_argument(
        "--special-tokens", choices=get_args(Specials), help="what a special token spelt in a text becomes"
    )
    tokens.add_argument(
        "--add-special-tokens", action="store_true", help="what the tokenizer itself puts around a text (.bin/.idx)"
    )

    writing = parser.add_argument_group("output")
    where = writing.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", metavar="DIR", help="a dataset folder")
    where.add_argument("--output-prefix", metavar="PREFIX", help="Megatron's PREFIX_KEY_document.bin and .idx")
    where.add_argument("--lengths-only", action="store_true", help="lengths of an existing .idx, beside it")
    writing.add_argument("--dataset-impl", choices=["mmap"], help="Megatron's: the one kind of .bin/.idx there is")
    writing.add_argument("--max-seq-len", type=int, metavar="N", help="longest sample in tokens (default: no bound)")
    writing.add_argument("--max-input-len", type=int, metavar="N", default=0, help=MAX_INPUT_HELP)
    writing.add_argument("--max-target-len", type=int, metavar="N", default=0, help=MAX_TARGET_HELP)
    writing.add_argument("--tasks", metavar="FILE", help=TASKS_HELP)
    add_truncate(writing, "--max-seq-len; without --truncate longer ones are refused")
    writing.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    add_json(writing, "the result")

    running = parser.add_argument_group("processes")
    running.add_argument("--workers", type=int, metavar="N", help="processes (default: a core or CPU of Ray each)")
    running.add_argument("--ray", action="store_true", help="encode on a Ray cluster")
    running.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a running one, or auto (default: a new local one)"
    )


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    if args.lengths_only or any(map(is_indexed, args.input)):
        return _from_index(args, console)
    output = args.output_prefix if args.output is None else args.output
    parts = _parts(args, output)
    files = tuple(file for inputs, _ in parts for file in inputs)
    settings, encoder = chosen_encoding(args, files, console)
    if lost := lost_characters(encoder):
        console.print(f"warning: the tokenizer has no token for {', '.join(lost)} and drops such characters unsaid")
    started_s, outcomes = time.monotonic(), []
    for inputs, target in parts:
        with _progress(console) as show, _told_when_stopped(console):
            outcomes.append(
                work.preprocess(
                    inputs,
                    target,
                    settings=settings,
                    encoder=encoder,
                    workers=_workers(args, settings, encoder),
                    overwrite=args.overwrite,
                    progress=show,
                )
            )
    seconds = time.monotonic() - started_s
    if args.tasks:
        found = {task: None for _, target in parts for task in TokenDataset.open(target).tasks}
        tasks = chosen_tasks(args)
        if tasks.weights:
            console.print("note: weights of tasks are for dynapipe train --tasks: a prepared folder keeps none")
        if said := unknown_tasks(tasks, found):
            console.print(f"warning: {said}", soft_wrap=True)
    _report(
        args,
        {
            "outputs": [str(path) for outcome in outcomes for path in outcome.outputs],
            "files": len(files),
            "samples": sum(outcome.num_samples for outcome in outcomes),
            "tokens": sum(outcome.num_tokens for outcome in outcomes),
            "truncated": sum(outcome.num_truncated for outcome in outcomes),
            "skipped": sum(outcome.num_skipped for outcome in outcomes),
            "kept_samples": sum(outcome.num_kept_samples for outcome in outcomes),
            "already_there": all(outcome.reused for outcome in outcomes),
            "vocab_size": encoder.vocab_size,
            "dtype": settings.dtype(encoder).name,
            "end_of_text": encoder.eos if settings.append_eod else None,
            "seconds": round(seconds, 3),
        },
    )
    return 0


def _parts(args: argparse.Namespace, output: str) -> list[tuple[tuple[InputFile, ...], str]]:
    """What is written where: all files in one, or of a folder every file by itself, in the folder's own tree."""
    root = Path(args.input[0])
    if len(args.input) > 1 or not root.is_dir():
        return [(find_inputs(args.input, args.input_format), output)]
    if Path(output).resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"the output {output} lies in the folder {root} that is read: choose another place")
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
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers is {args.workers} but must be at least 1")
    if args.ray or args.ray_address:
        return RayWorkers(settings, encoder, num_workers=args.workers, address=args.ray_address)
    return ProcessWorkers(settings, encoder, args.workers or usable_cores(), child_environment(_ALONE))


def _from_index(args: argparse.Namespace, console: Console) -> int:
    """What can be done with a data set that is tokenized already."""
    if len(args.input) > 1 or not is_indexed(args.input[0]):
        raise ConfigError(
            "an .idx is taken alone, and --lengths-only needs one: name one data set of Megatron's format"
        )
    prefix = args.input[0]
    if given := [f"--{name.replace('_', '-')}" for name in _OF_TEXT if getattr(args, name)]:
        raise ConfigError(f"{prefix} is tokenized already, and {given[0]} is for what is not: leave it out")
    if args.output_prefix is not None:
        raise ConfigError(f"{prefix} is in Megatron's format already: use --output DIR or --lengths-only")
    if args.lengths_only:
        index = read_index(prefix)
        if not args.skip_empty:
            index_lengths(index)  # refuses what would get no row
        left_out = write_lengths(lengths_path(prefix), index.lengths)
        rows, tokens, outputs = len(index.lengths) - left_out, int(index.lengths.sum()), lengths_path(prefix)
    else:
        encoder = named_encoder(args, args.tokenizer) if args.tokenizer else None
        vocab_size = args.vocab_size or (encoder.vocab_size if encoder else None)
        if vocab_size is None:
            raise ConfigError("an .idx does not say how many ids there are: give --vocab-size, or --tokenizer")
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


@contextmanager
def _told_when_stopped(console: Console) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print("stopped: what is done is kept, the same command goes on from there")
        raise


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """A function to call with each `Progress`: a bar on a terminal, a line at each tenth of the input in a pipe."""
    live = console.is_terminal
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
    tenth = 0

    def show(progress: work.Progress) -> None:
        nonlocal tenth
        new_tokens = progress.num_tokens - progress.num_kept_tokens
        rate = new_tokens / max(1e-9, time.monotonic() - started_s)
        figures = f"{progress.num_tokens:,} tokens  {rate:,.0f} tokens/s"
        if live:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes, figures=figures)
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
        table.add_row(name.replace("_", " "), "none" if value is None else str(value))
    deliver(args.json, facts, table)
