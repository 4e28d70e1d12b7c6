"""What the records of a run's text are, settled by the settings and the first record before anything is tokenized."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dynapipe_ext.config_data import DataSettings
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.inputs import BlockStream, find_inputs
from dynapipe_ext.data.preprocessing.records import TextRecord, records
from dynapipe_ext.data.preprocessing.rendering import MESSAGES, PAIRS, RecordFields, Template, template_of
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder
from dynapipe_ext.data.tokenizer import Tokenizer
from dynapipe_ext.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class DataForm:
    """The template by which a model's own tokenizer reads records, and their fields.

    Without a template the tokenizer is no model's: input, its separator if it has one, target; or text.
    """

    template: Template | None
    fields: RecordFields

    def described(self) -> list[object]:
        """As part of what tokens were made from."""
        return [asdict(self)]


def form_of(data: DataSettings, path: Path, tokenizer: Encoder | Tokenizer | str) -> DataForm:
    """The form of the records in `path`. Errors: DataError for a first record of no known kind, or that cannot be read;
    ConfigError for a template that the tokenizer does not have.
    """
    named = RecordFields(
        (data.input_key, data.target_key) if data.input_key else PAIRS[0],
        data.text_key or "text",
    )
    try:
        where, record = _first(path, named)
    except DataError:
        if isinstance(tokenizer, FolderEncoder):
            raise
        return DataForm(None, named)  # what is wrong is told by the reader of such text
    if data.template == "auto":
        template, fields = template_of(record, named, where)
    else:
        template = data.template
        fitting = [pair for pair in PAIRS if not data.input_key and all(name in record for name in pair)]
        fields = replace(named, pair=fitting[0]) if fitting else named
    if isinstance(tokenizer, FolderEncoder):
        return DataForm(template, fields)
    if template == "chat":
        raise ConfigError(
            f"{where}: the record has {MESSAGES!r}, which needs the chat template of a decoder-only model, but the"
            f" tokenizer is {data.tokenizer!r}: name such a model's folder by --model, or its tokenizer's by"
            " --tokenizer; give an encoder-decoder input and target"
        )
    return DataForm(None, fields)


def _first(path: Path, named: RecordFields) -> tuple[str, TextRecord]:
    columns = {MESSAGES, named.text, *named.pair, *(name for pair in PAIRS for name in pair)}
    for block in BlockStream(find_inputs([path]), columns=columns):
        for where, record in records(block, text_key=named.text):
            return where, record
    raise DataError(f"{path} is empty (it has no records): give a file with at least one")
