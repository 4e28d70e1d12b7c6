"""A block of records to token streams. The result depends on the block and the settings alone, so any process may do
it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.examples import Example, lacking, string_field
from dynapipe_ext.data.indexed_dataset import token_dtype
from dynapipe_ext.data.length_bounds import LengthBounds, TaskBounds
from dynapipe_ext.data.preprocessing.encoders import Encoder, digest_of, encode_answers
from dynapipe_ext.data.preprocessing.inputs import Block, InputFile, TextUnit
from dynapipe_ext.data.preprocessing.record_forms import (
    TASK,
    LossOn,
    RecordFields,
    Template,
    columns_of,
    example_of,
    is_chat,
)
from dynapipe_ext.data.preprocessing.records import Record, all_records, records
from dynapipe_ext.data.preprocessing.rendering import Renderer, first_target
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.errors import ConfigError, DataError

Target = Literal["dataset", "megatron"]
TOKENS, SIZES, FIRST_TARGET, TASKS, SENTENCES = "tokens", "sizes", "first_target", "task_ids", "sentences"
IS_TARGET = "is_target"  # a byte for each token of a chat, or of a pair of answers
NUM_FIRST = "num_first"  # tokens of the first document of each pair
_VERSION = 6  # raise it with every change of the output, so that old work is done again
_BATCH_CHARACTERS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings:
    """How records become samples.

    dataset: a sample has the input and the target by `pair`, else the text of `keys[0]` as its target. The tokenizer's
    separator, if any, stands between them and the end of text at the end. Without a `pair` every record is a text;
    `keys_only` also ignores tasks. With a `template` a model's own tokenizer renders the records;
    `loss_on` says on which answers of a chat loss falls.
    megatron: each of `keys` becomes a data set with the tokens of each text, or of each sentence in a list. With
    `append_eod` the end of text follows the last one. A text without tokens is a document without a sequence, as in
    Megatron's preprocess_data.py.
    `unread` are fields that hold the words of records, too, and are not read.
    """

    target: Target
    keys: tuple[str, ...] = ("text",)
    keys_only: bool = False
    pair: tuple[str, str] | None = ("input", "target")
    unit: TextUnit = "line"
    append_eod: bool = True
    max_seq_len: int | None = None
    truncate: bool = False
    tasks: TaskBounds = field(default_factory=TaskBounds)
    skip_empty: bool = False
    template: Template | None = None
    is_instruction: bool = False
    loss_on: LossOn = "answers"
    unread: tuple[str, ...] = ()

    @property
    def bounds(self) -> LengthBounds:
        return LengthBounds(self.max_seq_len, self.truncate, self.tasks)

    @property
    def columns(self) -> frozenset[str]:
        """The fields of a record that are read."""
        if self.target == "megatron" or self.keys_only:
            return frozenset(self.keys)
        return columns_of(self.template, self.fields)

    @property
    def fields(self) -> RecordFields:
        """The fields of a record; of a corpus for Megatron only the first of its texts."""
        return RecordFields(self.pair, self.keys[0], self.is_instruction)

    def digest(self, encoder: Encoder) -> str:
        """sha256 of everything besides the block that determines its output."""
        described = {"version": _VERSION, "tokenizer": digest_of(encoder), **asdict(self)}
        del described["unread"]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def dtype(self, encoder: Encoder) -> np.dtype[Any]:
        """The type of the tokens on disk."""
        if self.target == "megatron":
            return token_dtype(encoder.vocab_size)
        return np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The bytes that a block adds to each stream. Its `task_ids` (int32) index the block's own `tasks`."""

    file: str
    upto_bytes: int
    digest: str
    streams: dict[str, bytes]
    tasks: tuple[str, ...]
    num_samples: int
    num_tokens: int
    num_truncated: int
    num_skipped: int


def stream_names(settings: EncodeSettings) -> tuple[str, ...]:
    """The streams of the output."""
    if settings.target == "dataset":
        masks = {"chat": (IS_TARGET,), "preference": (IS_TARGET, NUM_FIRST)}.get(settings.template or "", ())
        return (TOKENS, SIZES, FIRST_TARGET, TASKS, *masks)
    return tuple(f"{name}-{place}" for place in range(len(settings.keys)) for name in (TOKENS, SIZES, SENTENCES))


def encode_block(block: Block, settings: EncodeSettings, encoder: Encoder) -> EncodedBlock:
    """The token streams of a block. Errors: DataError naming file and line or row of the record at fault."""
    return _encoded(block, records(block, text_key=settings.keys[0]), settings, encoder)


def look_at(block: Block, settings: EncodeSettings, encoder: Encoder) -> None:
    """Encode its first record. Errors: as those of `encode_block`."""
    _encoded(block, islice(records(block, text_key=settings.keys[0]), 1), settings, encoder)


def _encoded(
    block: Block, rows: Iterable[tuple[str, Record]], settings: EncodeSettings, encoder: Encoder
) -> EncodedBlock:
    if settings.target == "megatron":
        return _encode_texts(block, rows, settings, encoder)
    if settings.template is not None:
        return _encode_rendered(block, rows, settings, encoder)
    return _encode_examples(block, rows, settings, encoder)


def read_examples(files: Iterable[InputFile], fields: RecordFields) -> Iterator[Example]:
    """The prompts with their answers, or texts, of all records. Errors: DataError with the place of the record."""
    for file, where, record in all_records(files, text_key=fields.text, columns=columns_of(None, fields)):
        yield replace(example_of(record, fields, where=where), file=str(file.path))


def texts_of(block: Block, settings: EncodeSettings) -> Iterator[str]:
    """All texts of a block, for training a tokenizer."""
    for where, record in records(block, text_key=settings.keys[0]):
        if settings.target == "megatron":
            yield from (text for sentences in _texts(where, record, settings) for text in sentences if text)
            continue
        example = _example(where, record, settings)
        yield from (text for text in (example.input, example.target) if text)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample of a dataset folder. Of chats and pairs of answers `is_target` has a byte for each token; of pairs
    `num_first` tokens are the first document's."""

    tokens: npt.NDArray[Any]
    first_target: int
    task: str
    is_truncated: bool
    is_target: bytes = b""
    num_first: int = 0


def _encode_examples(
    block: Block, rows: Iterable[tuple[str, Record]], settings: EncodeSettings, encoder: Encoder
) -> EncodedBlock:
    samples, num_skipped = list[_Sample](), 0
    examples = ((where, _example(where, record, settings)) for where, record in rows)
    for batch in _batches(examples, lambda example: len(example.input) + len(example.target)):
        for (prompt, target), (where, example) in zip(_pairs(encoder, batch), batch, strict=True):
            joined, first_target, is_truncated = _join(prompt, target, example.task, settings.bounds, encoder, where)
            if len(joined) < 2 or not (example.input or example.target):
                num_skipped += _skipped(where, settings)
                continue
            tokens = np.array(joined, settings.dtype(encoder))
            samples.append(_Sample(tokens, first_target, example.task, is_truncated))
    return _block_of_samples(block, samples, num_skipped, settings)


def _encode_rendered(
    block: Block, rows: Iterable[tuple[str, Record]], settings: EncodeSettings, encoder: Encoder
) -> EncodedBlock:
    if settings.template is None or not isinstance(encoder, FolderEncoder):
        raise ConfigError(f"the template {settings.template} needs the tokenizer of a model's folder: name the folder")
    renderer = Renderer.of(settings.template, settings.fields, encoder, settings.bounds, settings.loss_on)
    samples, num_skipped = list[_Sample](), 0
    for where, record in rows:
        task = string_field(record, TASK, where=where) if TASK in record else "unnamed"
        rendered = renderer.render(record, where, task)
        if rendered is None:
            num_skipped += _skipped(where, settings)
            continue
        tokens, targets = np.array(rendered.tokens, settings.dtype(encoder)), rendered.is_target
        first = first_target(targets)
        samples.append(_Sample(tokens, first, task, rendered.truncated, bytes(targets), rendered.num_first))
    return _block_of_samples(block, samples, num_skipped, settings)


def _block_of_samples(
    block: Block, samples: Sequence[_Sample], num_skipped: int, settings: EncodeSettings
) -> EncodedBlock:
    tasks: dict[str, int] = {}
    task_ids = [tasks.setdefault(sample.task, len(tasks)) for sample in samples]
    sizes = [len(sample.tokens) for sample in samples]
    streams = {
        TOKENS: b"".join(sample.tokens.tobytes() for sample in samples),
        SIZES: np.array(sizes, "<i8").tobytes(),
        FIRST_TARGET: np.array([sample.first_target for sample in samples], "<i4").tobytes(),
        TASKS: np.array(task_ids, "<i4").tobytes(),
        IS_TARGET: b"".join(sample.is_target for sample in samples),
        NUM_FIRST: np.array([sample.num_first for sample in samples], "<i4").tobytes(),
    }
    return EncodedBlock(
        block.file,
        block.upto_bytes,
        block.digest(),
        {name: streams[name] for name in stream_names(settings)},
        tuple(tasks),
        len(samples),
        sum(sizes),
        sum(sample.is_truncated for sample in samples),
        num_skipped,
    )


def _encode_texts(
    block: Block, rows: Iterable[tuple[str, Record]], settings: EncodeSettings, encoder: Encoder
) -> EncodedBlock:
    dtype = settings.dtype(encoder)
    end = [encoder.eos] if settings.append_eod and encoder.eos is not None else []
    tokens: list[list[bytes]] = [[] for _ in settings.keys]
    sizes: list[list[int]] = [[] for _ in settings.keys]
    counts: list[list[int]] = [[] for _ in settings.keys]
    num_skipped = 0
    texts = ((where, _texts(where, record, settings)) for where, record in rows)
    for batch in _batches(texts, lambda texts: sum(len(text) for sentences in texts for text in sentences)):
        flat = [(where, text) for where, texts in batch for sentences in texts for text in sentences]
        encoded = iter(_encode(encoder, [text for _, text in flat], [where for where, _ in flat]))
        for _, texts_of_record in batch:
            documents = [[ids for ids in map(list, islice(encoded, len(one))) if ids] for one in texts_of_record]
            if settings.skip_empty and not all(documents):
                num_skipped += 1
                continue
            for place, sentences in enumerate(documents):
                if sentences:
                    sentences[-1] += end
                tokens[place] += [np.array(ids, dtype).tobytes() for ids in sentences]
                sizes[place] += map(len, sentences)
                counts[place].append(len(sentences))
    streams = {}
    for place in range(len(settings.keys)):
        streams[f"{TOKENS}-{place}"] = b"".join(tokens[place])
        streams[f"{SIZES}-{place}"] = np.array(sizes[place], "<i8").tobytes()
        streams[f"{SENTENCES}-{place}"] = np.array(counts[place], "<i8").tobytes()
    return EncodedBlock(
        block.file, block.upto_bytes, block.digest(), streams, (), len(counts[0]), sum(map(sum, sizes)), 0, num_skipped
    )


def _example(where: str, record: Record, settings: EncodeSettings) -> Example:
    if settings.keys_only:
        (key,) = settings.keys
        _refuse_lacking(where, record, settings)
        return Example("unnamed", "", string_field(record, key, where=where))
    has_pair = settings.pair is not None and all(name in record for name in settings.pair)
    if is_chat(record) and settings.keys[0] not in record and not has_pair:
        raise DataError(
            f"{where}: the record is a chat, which needs the chat template of a model's folder: name that folder as"
            " --tokenizer, or as --model of `dynapipe train`"
        )
    return example_of(record, settings.fields, where=where)


def _texts(where: str, record: Record, settings: EncodeSettings) -> list[list[str]]:
    """The sentences of each key; a plain text is one sentence."""
    _refuse_lacking(where, record, settings)
    texts = []
    for key in settings.keys:
        value = record[key]
        sentences = [{key: sentence} for sentence in value] if isinstance(value, list) else [record]
        texts.append([string_field(sentence, key, where=where) for sentence in sentences])
    return texts


def _refuse_lacking(where: str, record: Record, settings: EncodeSettings) -> None:
    if missing := [key for key in settings.keys if key not in record]:
        raise lacking(record, missing, where=where, fields="name the right ones with --json-keys")


def _join(
    prompt: Sequence[int], target: Sequence[int], task: str, bounds: LengthBounds, encoder: Encoder, where: str
) -> tuple[list[int], int, bool]:
    """(tokens, index of the first target, whether tokens were cut): first the input's start is cut, then the target's
    end. Without a separator the very first token cannot be a label, since nothing comes before it.
    """
    assert encoder.eos is not None
    border = [] if encoder.separator is None else [encoder.separator]
    num_input, num_target = bounds.kept_lengths(
        task,
        num_beside=len(border),
        num_input=len(prompt),
        num_target=len(target) + 1,
        where=f"{where}: the sample",
    )
    tokens = [*prompt[len(prompt) - num_input :], *border, *[*target, encoder.eos][:num_target]]
    truncated = (num_input, num_target) != (len(prompt), len(target) + 1)
    return tokens, max(1, num_input + len(border)), truncated


def _pairs(encoder: Encoder, batch: Sequence[tuple[str, Example]]) -> list[tuple[list[int], list[int]]]:
    """The ids of inputs and of their targets: of each apart where a separator stands between them."""
    wheres = [where for where, _ in batch]
    inputs, targets = [example.input for _, example in batch], [example.target for _, example in batch]
    if encoder.separator is None:
        return encode_answers(_Named(encoder, wheres), inputs, targets, wheres)
    encoded = [list(ids) for ids in _Named(encoder, wheres).encode(inputs + targets)]
    return list(zip(encoded[: len(batch)], encoded[len(batch) :], strict=True))


@dataclass(frozen=True, slots=True)
class _Named:
    """An encoder that names the place of a text that it refuses; the texts of each place come in equal numbers."""

    encoder: Encoder
    wheres: Sequence[str]

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return _encode(self.encoder, texts, list(islice(cycle(self.wheres), len(texts))))

    def decode(self, tokens: Iterable[int]) -> str:
        return self.encoder.decode(tokens)


def _encode(encoder: Encoder, texts: Sequence[str], wheres: Sequence[str]) -> list[Sequence[int]]:
    try:
        return list(encoder.encode(texts))
    except Exception as error:
        for text, where in zip(texts, wheres, strict=True):
            try:
                encoder.encode([text])
            except Exception as cause:
                raise DataError(f"{where}: the tokenizer refuses the text ({cause})") from cause
        raise DataError(f"{wheres[0]} and the records after it: the tokenizer failed ({error})") from error


def _skipped(where: str, settings: EncodeSettings) -> int:
    if not settings.skip_empty:
        raise DataError(
            f"{where}: the record is empty (nothing to train on): fill it, or leave out all such records with"
            " `dynapipe preprocess --skip-empty`"
        )
    return 1


def _batches(rows: Iterable[tuple[str, Any]], num_characters: Any) -> Iterator[list[tuple[str, Any]]]:
    """Batches of rows, small enough to encode in bounded memory."""
    batch: list[tuple[str, Any]] = []
    total = 0
    for where, row in rows:
        batch.append((where, row))
        total += num_characters(row)
        if total >= _BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
