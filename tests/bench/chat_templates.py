"""Which tokens of a chat carry loss under every chat template that TRL ships, beside what TRL trains on.

    python -m pip download --no-deps trl && unzip trl-*.whl -d trl
    python tests/bench/chat_templates.py trl/trl/chat_templates

TRL swaps a published template for a training template of its own, which marks answers; ours reads the published one.
A column a chat: `=` the same text with the same targets, `T` another text, `M` other targets, `r` refused here, `n` TRL
has no training template. Tokens are characters, so that no tokenizer hides a difference.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.data.preprocessing.rendering import Rendered
from dynapipe_ext.errors import DataError
from tests.support.letter_tokens import letters, marked, rendered

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": _PLACE}}


def _said(*texts: str, **thoughts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} | (thoughts if i % 2 else {}) for i, text in enumerate(texts)]


CHATS: dict[str, Mapping[str, Any]] = {
    "one turn": {"messages": _said("What is 2?", "It is two.")},
    "several": {"messages": _said("What is 2?", "It is two.", "And 3?", "Three it is.", "4", "Four.")},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *_said("What is 2?", "It is two.")]},
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ],
        "tools": [_TOOL],
    },
    "thinking": {"messages": _said("What is 2?", "It is two.", "And 3?", "Three.", reasoning_content="Let me think.")},
    "<think>": {"messages": _said("What is 2?", "<think>\nLet me think.\n</think>\n\nIt is two.")},
    "same words": {"messages": _said("two", "two", "two", "two")},
}


def verdict(template: str, training: str | None, record: Mapping[str, Any]) -> str:
    """The letter of one chat under one template."""
    try:
        ours = rendered(template, record)
    except DataError:
        return "r"
    if training is None:
        return "n"
    tokens, targets = letters(training).render_marked(record["messages"], record.get("tools"))
    theirs = marked(Rendered(tokens, targets))
    if ours == theirs:
        return "="
    bare = (text.replace("⟦", "").replace("⟧", "") for text in (ours, theirs))
    return "M" if len(set(bare)) == 1 else "T"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("templates", type=Path, help="the folder chat_templates of the package trl")
    folder = parser.parse_args().templates
    counts: Counter[str] = Counter()
    print(f"{'':28}{'  '.join(CHATS)}")
    for path in sorted(folder.glob("*.jinja")):
        if path.stem.endswith("_training"):
            continue
        of_training = path.with_name(f"{path.stem}_training.jinja")
        template = path.read_text()
        training = of_training.read_text() if of_training.exists() else template
        row = [verdict(template, training if _GENERATION.search(training) else None, chat) for chat in CHATS.values()]
        counts.update(row)
        print(f"{path.stem:28}{'  '.join(f'{letter:{len(name)}}' for letter, name in zip(row, CHATS, strict=True))}")
    print(", ".join(f"{count} {letter}" for letter, count in counts.most_common()))


if __name__ == "__main__":
    main()
