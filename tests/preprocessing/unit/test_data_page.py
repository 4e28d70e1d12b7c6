"""The page about forms of data: it names all that is read, and each form is read as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from dynapipe_ext.data.preprocessing import record_forms
from dynapipe_ext.data.preprocessing.compressed import COMPRESSED
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.record_forms import (
    INSTRUCTIONS,
    PAIRS,
    RecordFields,
    chat_of,
    template_of,
)
from dynapipe_ext.errors import DataError
from dynapipe_ext.launch.job.data_form import form_of
from dynapipe_ext.settings.tables import DataSettings

QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ALPACA = {"instruction": "a", "output": "b"}
CHATS = [
    ({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, [True, True]),
    ({"messages": [QUESTION, ANSWER | {"train": False}, QUESTION, ANSWER | {"weight": 1}]}, [False, True]),
    ({"conversations": TURNS, "system": "c", "tools": "[]"}, [True]),
    ({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}, [False, True]),
    (ALPACA | {"input": "c", "system": "d", "history": [["e", "f"]]}, [True, True]),
    (ALPACA | {"context": "c"}, [True]),
]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / ".github/docs/data.md").read_text()


def test_every_pair_is_on_the_page(page: str) -> None:
    plain = [pair for pair in PAIRS if pair not in INSTRUCTIONS]
    assert [pair for pair in plain if f'`{{"{pair[0]}", "{pair[1]}"}}`' not in page] == []
    written = re.search(r"Pairs that are instructions, too: (.+)", page)
    assert written is not None
    named = {(prompt, answer) for prompts, answers in re.findall(r"([^;:]+) with ([^;.]+)", written[1])
             for prompt in re.findall(r"`(\w+)`", prompts) for answer in re.findall(r"`(\w+)`", answers)}  # fmt: skip
    assert named == {*INSTRUCTIONS}


def test_every_name_of_a_chat_and_of_its_speakers_is_on_the_page(page: str) -> None:
    roles = {name: role for name, role in record_forms._SPEAKERS.items() if role in ("user", "assistant")}
    names = (*record_forms.CHATS, *roles.keys() - {"function_call"})
    assert [name for name in names if f"`{name}`" not in page and f'"{name}"' not in page] == []


def test_every_suffix_of_the_page_is_read_as_its_row_says(page: str, tmp_path: Path) -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*`\.[^|]+) \|$", page, re.M)
    forms = {suffix: form.lower() for form, names in rows for suffix in re.findall(r"`(\.\w+)`", names)}
    assert {suffix for suffix, form in forms.items() if "compressed" in form} == {*COMPRESSED}
    for suffix in forms.keys() - {*COMPRESSED}:
        path = tmp_path / f"data{suffix}"
        path.write_text('[{"text": "a"}]')
        (file,) = find_inputs([path])
        assert file.form.removesuffix("l") in forms[suffix], suffix


@pytest.mark.parametrize(("record", "trained"), CHATS)
def test_chats_are_read_and_trained_on_as_the_page_says(record: dict[str, Any], trained: list[bool], page: str) -> None:
    form, fields = template_of(record, RecordFields(), "", instructions_as_chats=True)
    assert form == "chat"
    assert chat_of(record, fields, "").answers == trained
    assert all(f"`{name}`" in page or f'"{name}"' in page for name in record)


def test_what_a_record_is_without_a_template_for_chats() -> None:
    records = ({"text": "a"}, ALPACA, {"input": "a", "target": "b"})
    forms = [template_of(record, RecordFields(), "")[0] for record in records]
    assert forms == ["text", "prompt", "prompt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_answers_that_are_marked_as_good_or_bad_are_refused_unless_their_fields_are_named(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"unpaired{suffix}"
    record = {"prompt": "a", "completion": "b", "label": False}
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    else:
        path.write_text("prompt,completion,label\na,b,False\n" if suffix == ".csv" else json.dumps(record))
    files = find_inputs([path])
    with pytest.raises(DataError, match=r"unpaired preference data: 'label' says whether the completion is a good one"):
        form_of(DataSettings(), files, "bytes")
    named = DataSettings(fields=("prompt", "completion"))
    assert form_of(named, files, "bytes").fields.pair == ("prompt", "completion")
