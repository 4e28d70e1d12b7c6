"""What the flags of `dynapipe preprocess` say of text: its tokenizer, its records, and what becomes of these."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from dynapipe_ext.data.length_bounds import SideBounds
from dynapipe_ext.data.mixture import Tasks, read_tasks
from dynapipe_ext.data.preprocessing.encoders import Encoder, gpt2_encoder, load_encoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import InputFile
from dynapipe_ext.data.preprocessing.preprocess import train_bpe
from dynapipe_ext.data.preprocessing.rendering import RecordFields
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import cut_at
from dynapipe_ext.launch.job.data_form import (
    DataForm,
    form_of,
    is_encoder_decoder,
    is_model_folder,
    tokenizer_to_train_with,
)
from dynapipe_ext.settings.agreement import check_data_settings
from dynapipe_ext.settings.tables import DataSettings


def chosen_encoding(
    args: argparse.Namespace, files: tuple[InputFile, ...], console: Console
) -> tuple[EncodeSettings, Encoder]:
    """What becomes of the text in `files`, and by which tokenizer. Errors: ConfigError for flags that do not go
    together; DataError for first records that cannot be used."""
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
    """The tokenizer of a name (None: of a vocabulary and merges): for samples of a dataset folder a model's own, as a
    run takes it, where no flag makes another one of it."""
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
    of_records = [name for name in ("template", "input_key", "target_key", "text_key") if getattr(args, name)]
    flags = [f"--{name.replace('_', '-')}" for name in of_records]
    if args.output_prefix is not None and args.pair_keys:
        raise ConfigError(".bin/.idx has no place for pairs of input and target: use --json-keys, or --output DIR")
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
    if args.pair_keys and args.json_keys:
        raise ConfigError("--json-keys reads plain text and --pair-keys pairs: give one of them")
    if args.json_keys and flags and (flags != ["--template"] or args.template != "text"):
        raise ConfigError(f"--json-keys reads plain text, whatever else there is, and {flags[0]} says other: give one")
    if args.pair_keys and (args.input_key or args.target_key):
        raise ConfigError("--pair-keys is --input-key and --target-key in one: give it, or these")


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
    input_key, target_key = args.pair_keys or (args.input_key, args.target_key)
    text_key = args.json_keys[0] if args.json_keys else args.text_key
    settings = DataSettings(
        tokenizer=name,
        template="text" if args.json_keys else args.template or "auto",
        input_key=input_key or "",
        target_key=target_key or "",
        text_key=text_key or "",
    )
    check_data_settings(settings, "dynapipe preprocess")
    form = form_of(settings, files, tokenizer)
    return form if is_models else DataForm(None, form.fields)


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
    """What `load_encoder` gets; None for a vocabulary and its merges."""
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
