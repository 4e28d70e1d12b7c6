"""A tokenizer of single characters with a chat template, to look at which characters carry loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynapipe_ext.data.length_bounds import LengthBounds, TaskBounds
from dynapipe_ext.data.preprocessing.record_forms import RecordFields, Template
from dynapipe_ext.data.preprocessing.rendering import Rendered, Renderer
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
END = 3


class _Letters:
    """What `FolderEncoder` asks of a tokenizer of transformers."""

    is_fast, eos_token_id, special_tokens_map = True, END, SPECIAL
    all_special_ids = (END, *map(ord, "<|>"))  # of what looks like a special token
    added_tokens_decoder: Mapping[int, Any] = {}

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return 0x110000

    def get_vocab(self) -> dict[str, int]:
        return {"</s>": END}

    def get_chat_template(self, tools: Sequence[Any] | None = None) -> str:
        return self.chat_template

    def __call__(self, text: str | list[str], **choices: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [list(map(ord, one)) for one in text]}
        return {"input_ids": list(map(ord, text)), "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def letters(template: str) -> FolderEncoder:
    """A model's tokenizer whose tokens are characters; those of what looks like a special token are special."""
    choices: Any = {"separator": None, "specials": "parse", "add_special_tokens": False, "template_date": "2026-11-22"}
    return FolderEncoder(_Letters(template), {}, eos=END, **choices)


def rendered(template: str, record: Mapping[str, Any], kind: Template = "chat", **choices: Any) -> str:
    """A chat as the template renders it, with what carries loss between ⟦ and ⟧."""
    bounds = LengthBounds(None, False, TaskBounds())
    renderer = Renderer.of(kind, RecordFields(), letters(template), bounds, **choices)
    sample = renderer.render(record, "here", "unnamed")
    assert sample is not None
    return marked(sample)


def marked(sample: Rendered) -> str:
    """The characters of a sample, with targets between ⟦ and ⟧, and END as ■."""
    text, inside = "", False
    for token, is_target in zip([*sample.tokens, None], [*sample.is_target, False], strict=True):
        if is_target != inside:
            text, inside = text + ("⟦" if is_target else "⟧"), is_target
        if token is not None:
            text += "■" if token == END else chr(token)
    return text
