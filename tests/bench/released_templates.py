"""Which tokens of a chat carry loss under chat templates of released models, by an oracle without training templates.

    python tests/bench/released_templates.py FOLDER …

A folder holds templates as *.jinja: those of llama.cpp, Axolotl and others. A word is put at the end of each message in
turn; it must carry loss where the message is an answer, and nowhere else, and the text must be the one that
transformers renders (with the thoughts of all answers kept), but for an end of its last answer. A column a chat of
`chat_templates.py`: `=` right, `X` wrong, `r` refused by name here, `R` refused by the template itself.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chat_templates import CHATS
from transformers.utils.chat_template_utils import render_jinja_template

from dynapipe_ext.data.preprocessing.answers import training_template
from dynapipe_ext.data.preprocessing.chat_variants import spellings
from dynapipe_ext.errors import DataError
from tests.support.letter_tokens import SPECIAL, rendered

WORD = "Xyzzy"


def texts(template: str, record: Mapping[str, Any]) -> list[str]:
    """What transformers renders of every spelling of the chat that the template takes."""
    found = []
    for messages in spellings(record["messages"]):
        choices = {"conversations": [messages], "tools": record.get("tools"), "chat_template": template}
        try:
            (text,), _ = render_jinja_template(**choices, **SPECIAL)
        except Exception:  # noqa: BLE001  (a template may raise anything)
            continue
        found.append(text)
    return found


def verdict(template: str, record: Mapping[str, Any]) -> str:
    """The letter of one chat under one template."""
    wanted = texts(template, record)
    try:
        marked = rendered(template, record)
    except DataError:
        return "r" if wanted else "R"
    if not any(re.sub("[⟦⟧■]", "", marked).startswith(text) for text in wanted):
        return "X"
    for place, message in enumerate(record["messages"]):
        if not message["content"]:
            continue
        changed = message | {"content": f"{message['content']} {WORD}"}
        messages = [*record["messages"][:place], changed, *record["messages"][place + 1 :]]
        try:
            marked = rendered(template, {**record, "messages": messages})
        except DataError:
            return "X"
        with_loss = sum(WORD in span for span in re.findall("⟦.*?⟧", marked, re.DOTALL))
        others = WORD in re.sub("⟦.*?⟧", "", marked, flags=re.DOTALL)
        if (with_loss, others) != ((1, False) if message["role"] == "assistant" else (0, True)):
            return "X"
    return "="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    counts: Counter[str] = Counter()
    print(f"{'':46}{'  '.join(CHATS)}")
    for path in sorted(path for folder in parser.parse_args().folders for path in folder.glob("*.jinja")):
        template = training_template(path.read_text())
        row = [verdict(template, chat) for chat in CHATS.values()]
        counts.update(row)
        cells = "  ".join(f"{letter:{len(name)}}" for letter, name in zip(row, CHATS, strict=True))
        print(f"{path.stem[:44]:46}{cells}".rstrip())
    print(", ".join(f"{count} {letter}" for letter, count in counts.most_common()))


if __name__ == "__main__":
    main()
