"""The form of a run's records: what they are taken for, and by which tokenizer they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.examples import PREFERENCE
from dynapipe_ext.data.preprocessing.encoder_loading import is_own, load_encoder
from dynapipe_ext.data.preprocessing.encoders import Encoder, digest_of, with_separator
from dynapipe_ext.data.preprocessing.inputs import InputFile
from dynapipe_ext.data.preprocessing.record_forms import (
    ANSWER_FIELDS,
    CHAT_FIELDS,
    INSTRUCTIONS,
    LABEL,
    MESSAGES,
    PAIRS,
    PROMPT_FIELDS,
    LossOn,
    RecordFields,
    Template,
    chat_field,
    is_chat,
    template_of,
    unread_fields,
)
from dynapipe_ext.data.preprocessing.records import Record, all_records
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder, load_model_tokenizer
from dynapipe_ext.data.tokenizer import FILE_NAME, Tokenizer
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.settings.tables import DataSettings
from dynapipe_ext.tools.console import counted


@dataclass(frozen=True, slots=True)
class DataForm:
    """The template by which a model's own tokenizer reads records, and their fields.

    Without a template the tokenizer is no model's: input, its separator if it has one, target; or text. `unread` are
    fields that hold the records' words, too.
    """

    template: Template | None
    fields: RecordFields
    unread: tuple[str, ...] = field(default=(), compare=False)
    loss_on: LossOn = "answers"

    @property
    def words(self) -> str:
        """What the records are, for people."""
        pair = " and ".join(map(repr, self.fields.pair or ()))
        beside = " (with input, system and history)" if self.fields.is_instruction else ""
        match self.template:
            case "chat" if self.fields.is_instruction:
                return f"instructions as chats: {pair}{beside}"
            case "chat":
                return f"chats, loss on {'the last answer' if self.loss_on == 'last-answer' else 'their answers'}"
            case "prompt":
                return f"prompts and answers: {pair}{beside}"
            case "text":
                return f"texts: {self.fields.text!r}"
            case "preference":
                return "pairs of a chosen and a rejected answer"
            case None:
                texts = f"texts: {self.fields.text!r}"
                return f"prompts and answers: {pair}{beside}, else {texts}" if pair else texts

    def described(self) -> list[object]:
        """As part of what tokens were made from."""
        loss_on = {} if self.loss_on == "answers" else {"loss_on": self.loss_on}
        return [{"template": self.template, "fields": asdict(self.fields), **loss_on}]


def loss_notes(prepared: TokenDataset) -> list[str]:
    """What may surprise about the labels: fields that are not read, and empty answers."""
    notes = []
    if unread := prepared.unread_fields:
        _, text = prepared.record_fields or ((), "text")
        names = f"The records also have {', '.join(map(repr, unread))}, not read"
        if unread == (text,):
            notes.append(
                f"note: {counted(len(prepared), 'sample')} of instructions: loss falls on their answers alone."
                f" {names}: to train on this whole field, name it by --fields"
            )
        elif not {*unread} & {*PROMPT_FIELDS}:
            notes.append(
                f"note: {counted(len(prepared), 'sample')} of questions and answers, of which records have several."
                f" {names}: to train on others, name theirs by --fields"
            )
        else:
            notes.append(
                f"note: {counted(len(prepared), 'sample')} of the whole field {text!r}: loss falls on prompts in it,"
                f" too. {names}: to train only on answers, name prompt and answer by --fields; else name the text by"
                " --fields"
            )
    if day := prepared.template_date:
        notes.append(
            f"note: the chat template prints the date, which is {day} in all samples (when they were prepared)"
        )
    if num_empty := prepared.num_empty_targets:
        notes.append(
            f"note: {counted(num_empty, 'sample')} with an empty target: the end of text is all they teach: remove"
            " them where that is not meant"
        )
    return notes


def tokenizer_to_train_with(name: str, *, encoder_decoder: bool) -> Encoder:
    """The tokenizer that a name means (`load_encoder`): a model's folder's with all that it does to whole samples; for
    an encoder-decoder any, with a separator behind inputs."""
    if encoder_decoder:
        return with_separator(load_encoder(name))
    return load_model_tokenizer(Path(name)) if is_model_folder(name) else load_encoder(name)


def is_model_folder(name: str) -> bool:
    """Whether a tokenizer's name is a folder of transformers, no data prepared earlier."""
    return Path(name).is_dir() and not is_own(Path(name) / FILE_NAME)


def is_encoder_decoder(name: str) -> bool:
    """Whether the config.json of a model's folder says that an encoder reads inputs apart."""
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("is_encoder_decoder") is True


def identity_of(encoder: Encoder) -> str:
    """The same for encoders that make the same tokens of everything, wherever their files lie."""
    return encoder.behaviour if isinstance(encoder, FolderEncoder) else digest_of(encoder)


def form_of(data: DataSettings, files: Sequence[InputFile], tokenizer: Encoder | Tokenizer | str) -> DataForm:
    """The form of the records of all `files`, by their first ones.

    Errors: DataError for a first record of no known kind, or that cannot be read; ConfigError for a template that the
    tokenizer does not have, or files of several forms.
    """
    form, *others = (_form_of_file(data, file, tokenizer) for file in files)
    for file, other in zip(files[1:], others, strict=True):
        if other != form:
            raise ConfigError(
                f"the records of {file.path} are of another form ({other.template or other.fields}) than those of"
                f" {files[0].path} ({form.template or form.fields}): give files of one form"
            )
    return form


OTHER_FORM = "; note: the training data are of another form"  # end of the line of a file that is held out


def form_lines(
    data: DataSettings, files: Sequence[InputFile], held_out: Sequence[InputFile], *, encoder_decoder: bool
) -> list[str]:
    """For each file of text the form that its records are taken for; whether held-out ones are of another."""
    own = data.tokenizer in ("bpe", "bytes")
    tokenizer = data.tokenizer if own else tokenizer_to_train_with(data.tokenizer, encoder_decoder=encoder_decoder)
    trained = [_form_of_file(data, file, tokenizer).words for file in files]
    evaluated = [_form_of_file(data, file, tokenizer).words for file in held_out]
    lines = [f"{file.path}: {file.words}, {words}" for file, words in zip(files, trained, strict=True)]
    for file, words in zip(held_out, evaluated, strict=True):
        other = "" if words in trained else OTHER_FORM
        lines.append(f"held out, {file.path}: {file.words}, {words}{other}")
    return lines


def _form_of_file(data: DataSettings, file: InputFile, tokenizer: Encoder | Tokenizer | str) -> DataForm:
    match data.fields:
        case (prompt, response):
            named_fields = RecordFields((prompt, response))
        case (text,):
            named_fields = RecordFields(None, text)
        case _:
            named_fields = RecordFields(PAIRS[0])
    try:
        where, record = _first(file, named_fields)
    except DataError:
        if isinstance(tokenizer, FolderEncoder):
            raise
        return DataForm(None, named_fields)  # what is wrong is told by the reader of such text
    if data.template == "auto":
        has_chats = isinstance(tokenizer, FolderEncoder) and tokenizer.has_chat_template
        template, fields = template_of(record, named_fields, where, instructions_as_chats=has_chats)
        unread = unread_fields(record, template, fields) if named_fields.pair else ()  # a named text is meant
    else:
        template = data.template
        fitting = [pair for pair in PAIRS if len(data.fields) < 2 and all(name in record for name in pair)]
        pair = fitting[0] if fitting else named_fields.pair or PAIRS[0]
        is_instruction = (bool(fitting) and pair in INSTRUCTIONS) or (template == "chat" and not is_chat(record))
        fields, unread = RecordFields(pair, named_fields.text, is_instruction), ()
    if data.loss_on != "answers" and template != "chat":
        raise ConfigError(f"[data] loss_on is {data.loss_on}, but {where} is no chat: leave it out")
    if isinstance(tokenizer, FolderEncoder):
        return DataForm(template, fields, unread, data.loss_on)
    if template == "chat":
        field = chat_field(record) or MESSAGES
        raise ConfigError(
            f"{where}: the record has {field!r}, which needs the chat template of a decoder-only model, but the"
            f" tokenizer is {data.tokenizer!r}: give such a model's folder as"
            " --tokenizer (train takes it as --model, too), and an encoder-decoder input and target"
        )
    return DataForm(None, fields, unread)


def _first(file: InputFile, named_fields: RecordFields) -> tuple[str, Record]:
    pairs = (name for pair in PAIRS for name in pair)
    columns = {
        *PROMPT_FIELDS,
        *ANSWER_FIELDS,
        *CHAT_FIELDS,
        *PREFERENCE,
        LABEL,
        named_fields.text,
        *(named_fields.pair or ()),
        *pairs,
    }
    _, where, record = next(all_records([file], text_key=named_fields.text, columns=columns))
    return where, record
