"""Which tokenizer reads text to train on, and what its records are: settled by the settings and the first records
before anything is tokenized, for a run and for `dynapipe preprocess` alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.preprocessing.encoder_loading import is_own, load_encoder
from dynapipe_ext.data.preprocessing.encoders import Encoder, digest_of, with_separator
from dynapipe_ext.data.preprocessing.inputs import BlockStream, InputFile
from dynapipe_ext.data.preprocessing.rendering import (
    ANSWER_FIELDS,
    CONVERSATIONS,
    MESSAGES,
    PAIRS,
    PROMPT_FIELDS,
    RecordFields,
    Template,
    TextRecord,
    records,
    template_of,
    unread_pair,
)
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder, load_model_tokenizer
from dynapipe_ext.data.tokenizer import FILE_NAME, Tokenizer
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.settings.tables import DataSettings
from dynapipe_ext.tools.wording import counted


@dataclass(frozen=True, slots=True)
class DataForm:
    """The template by which a model's own tokenizer reads records, and their fields.

    Without a template the tokenizer is no model's: input, its separator if it has one, target; or text. `unread` are
    fields with a prompt and its answer beside a text that is read instead.
    """

    template: Template | None
    fields: RecordFields
    unread: tuple[str, ...] = field(default=(), compare=False)

    def described(self) -> list[object]:
        """As part of what tokens were made from."""
        return [{"template": self.template, "fields": asdict(self.fields)}]


def loss_notes(prepared: TokenDataset) -> list[str]:
    """What may surprise about the labels: prompts that are part of a text, and empty answers."""
    notes = []
    if unread := prepared.unread_fields:
        _, text = prepared.record_fields or ((), "text")
        notes.append(
            f"note: {counted(len(prepared), 'sample')} of the whole field {text!r}: loss falls on prompts in it, too."
            f" The records also have {', '.join(map(repr, unread))}, which are not read: to train on answers alone,"
            " name the prompt's field by --input-key and the answer's by --target-key; else name the text by --text-key"
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


def _form_of_file(data: DataSettings, file: InputFile, tokenizer: Encoder | Tokenizer | str) -> DataForm:
    usual = None if data.text_key else PAIRS[0]  # a field that is named counts before those that are not
    named = RecordFields((data.input_key, data.target_key) if data.input_key else usual, data.text_key or "text")
    try:
        where, record = _first(file, named)
    except DataError:
        if isinstance(tokenizer, FolderEncoder):
            raise
        return DataForm(None, named)  # what is wrong is told by the reader of such text
    if data.template == "auto":
        template, fields = template_of(record, named, where)
        unread = unread_pair(record) if template == "text" and named.pair else ()  # a named text is meant
    else:
        template = data.template
        fitting = [pair for pair in PAIRS if not data.input_key and all(name in record for name in pair)]
        fields, unread = replace(named, pair=fitting[0] if fitting else named.pair or PAIRS[0]), ()
    if isinstance(tokenizer, FolderEncoder):
        return DataForm(template, fields, unread)
    if template == "chat":
        field = CONVERSATIONS if CONVERSATIONS in record else MESSAGES
        raise ConfigError(
            f"{where}: the record has {field!r}, which needs the chat template of a decoder-only model, but the"
            f" tokenizer is {data.tokenizer!r}: name such a model's folder by --model, or its tokenizer's by"
            " --tokenizer; give an encoder-decoder input and target"
        )
    return DataForm(None, fields, unread)


def _first(file: InputFile, named: RecordFields) -> tuple[str, TextRecord]:
    columns = {
        *PROMPT_FIELDS,
        *ANSWER_FIELDS,
        MESSAGES,
        CONVERSATIONS,
        named.text,
        *(named.pair or ()),
        *(name for pair in PAIRS for name in pair),
    }
    for block in BlockStream([file], columns=columns):
        for where, record in records(block, text_key=named.text):
            return where, record
    raise DataError(f"{file.path} is empty (it has no records): give a file with at least one")


def refuse_other_tokens(data: DataSettings, prepared: TokenDataset, *, encoder_decoder: bool) -> None:
    """Errors: DataError for prepared data that the settings' tokenizer or template would have made otherwise,
    as far as both say: by default the tokenizer is the data's own, and imported data does not say how its samples were
    made."""
    named, template = data.tokenizer, data.template
    again = f"prepare it again (`dynapipe preprocess --tokenizer {named}"
    if template not in ("auto", prepared.template) and prepared.template != "unknown":
        raise DataError(
            f"{prepared.directory} was prepared by the template {prepared.template or 'of no model'} and [data]"
            f" template is {template}: {again} --template {template}`), or leave that out"
        )
    if named == "bpe" or not (prepared.directory / FILE_NAME).is_file():
        return
    own = prepared.tokenizer()
    if encoder_decoder and own.separator is None:
        return  # refused for that, with what to do
    expected = tokenizer_to_train_with(named, encoder_decoder=encoder_decoder)
    no_template = isinstance(expected, FolderEncoder) and prepared.template is None
    if no_template or identity_of(own) != identity_of(expected):
        raise DataError(
            f"{prepared.directory} was prepared by another tokenizer than {named}, or without what that puts around"
            f" samples, so a model of {named} would train on other tokens: {again}`), or name the tokenizer of the data"
        )


def refuse_other_fields(data: DataSettings, prepared: TokenDataset) -> None:
    """Errors: DataError for prepared data that is known to be of other fields of its records than those named."""
    if (recorded := prepared.record_fields) is None or prepared.template == "chat":
        return
    pair, text = recorded
    read = f"the fields {pair[0]!r} and {pair[1]!r}" if pair and prepared.template != "text" else f"the field {text!r}"
    for keys, differs in (
        ((data.input_key, data.target_key), pair != (data.input_key, data.target_key)),
        ((data.text_key,), text != data.text_key or bool(pair and not data.input_key and prepared.template != "text")),
    ):
        if keys[0] and differs:
            raise DataError(
                f"{prepared.directory} was made of {read} of its records and [data] names"
                f" {' and '.join(map(repr, keys))}: prepare it again with these keys, or leave them out"
            )
