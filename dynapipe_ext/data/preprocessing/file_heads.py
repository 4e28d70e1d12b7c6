"""What the beginning of a file says of its form, where its name leaves that open: JSON of three kinds, and the
delimiter of a table.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from dynapipe_ext.data.examples import PREFERENCE
from dynapipe_ext.data.preprocessing.record_forms import CHATS, HISTORY, PAIRS, TOOLS, is_message

HEAD_BYTES = 1 << 18
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# Usual names of the one member of an object that holds all records of a file.
_WRAPPERS = frozenset((
    "data", "dataset", "train", "validation", "test", "rows", "items", "examples", "records", "samples", "instances",
    "entries", "conversations", "messages", "dialogues", "dialogs", "chats", "results",
))  # fmt: skip
_OF_RECORDS = frozenset(("text", TOOLS, HISTORY, *PREFERENCE, *CHATS, *(name for pair in PAIRS for name in pair)))
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def json_form(head: str) -> tuple[Literal["json", "jsonl"], str]:
    """("json", MEMBER) for an array, or for an object whose MEMBER is the array of all records; ("jsonl", "") for
    records of a line each, of which the first may be an array. `head` is the beginning of a file.

    >>> json_form('[{"text": "a"}]'), json_form('{"text": "a"}')
    (('json', ''), ('jsonl', ''))
    >>> json_form('{"version": 1, "data": [{"text": "a"}]}')
    ('json', 'data')
    >>> json_form('[{"role": "user", "content": "a"}]\\n[{"role": ')  # a chat a line
    ('jsonl', '')
    """
    start = _after_space(head, 0)
    if head[start : start + 1] == "{":
        wrapper = wrapper_of(head, start)
        return ("json" if wrapper else "jsonl"), wrapper
    if head[start : start + 1] != "[":
        return "jsonl", ""
    try:
        _, end = _DECODER.raw_decode(head, start)
    except (ValueError, RecursionError):
        return "json", ""
    follows = head[_after_space(head, end) :][:1]
    is_line = "\n" not in head[start:end] and "\n" in head[end : _after_space(head, end)]
    return ("jsonl" if follows == "[" or (follows and is_line) else "json"), ""


def wrapper_of(head: str, start: int) -> str:
    """The member of the object that begins at `start` which holds all records of a file; empty for a record.

    It is an array of objects or lists, with one of the usual names or alone. No member is one of a record's.
    """
    members: dict[str, Any] = {}
    end = None
    for name, first, object_end in _members(head, start):
        members[name], end = first, object_end
    if end is not None and head[_after_space(head, end) :]:
        return ""  # more follows: a record a line
    holders = [name for name, first in members.items() if holds_records(name, first)]
    if any(name in _OF_RECORDS and name not in holders for name in members):
        return ""
    return next((name for name in holders if name in _WRAPPERS or len(members) == 1), "")


def holds_records(name: str, first: object) -> bool:
    """Whether a member of an object may hold records, by its name and its first item: of a chat's names, those that are
    plural with whole chats or records."""
    if name in _OF_RECORDS and (name not in _WRAPPERS or is_message(first)):
        return False
    return isinstance(first, dict | list)


def refuse_members(members: Mapping[str, object]) -> str:
    """Why an object whose one member holds records may not have these members beside it; empty where it may."""
    for name, value in members.items():
        if isinstance(value, list) and value and holds_records(name, value[0]):
            return f"{name!r} behind the records holds records, too"
        if name in _OF_RECORDS:
            return f"{name!r} behind the records is a field of a record"
    return ""


def _members(head: str, start: int) -> Iterator[tuple[str, object, int | None]]:
    """For each member of an object within the head: (name, the first item of an array or else the value, the end of the
    whole object or None). An incomplete item is given as an empty one of its kind."""
    place = start + 1
    while True:
        try:
            name, place = _DECODER.raw_decode(head, _after_space(head, place))
            place = _after_space(head, place)
            if not isinstance(name, str) or head[place : place + 1] != ":":
                return
            place = _after_space(head, place + 1)
            first = _first_item(head, place)
        except (ValueError, RecursionError):
            return
        try:
            value, place = _DECODER.raw_decode(head, place)
        except (ValueError, RecursionError):
            yield name, first, None
            return
        place = _after_space(head, place)
        is_last = head[place : place + 1] == "}"
        yield name, first if isinstance(value, list) else None, place + 1 if is_last else None
        if head[place : place + 1] != ",":
            return
        place += 1


def _first_item(head: str, place: int) -> object:
    """The first item of the array that begins there; where the head ends within it, as much of its kind as is known."""
    if head[place : place + 1] != "[":
        return None
    place = _after_space(head, place + 1)
    try:
        return _DECODER.raw_decode(head, place)[0]
    except (ValueError, RecursionError):
        key = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:').match(head, place)
        return {json.loads(key[1]): ""} if key else {"[": [], "{": {}}.get(head[place : place + 1])


def delimiter_of(head: str, own: str) -> str:
    """What parts the columns of a table: `own`, unless its first row is one name by that and several by another.

    >>> delimiter_of("question;answer\\na;b, c\\n", ","), delimiter_of("text\\na;b\\n", ",")
    (';', ',')
    """
    csv.field_size_limit(sys.maxsize)
    for delimiter in (own, *DELIMITERS):
        try:
            names = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), [])
        except csv.Error:
            continue
        if len(names) > 1:
            return delimiter
    return own


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()
