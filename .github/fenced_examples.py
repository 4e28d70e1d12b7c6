"""Examples of docstrings as code blocks of the API reference: griffe's extension, for mkdocs.yml."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>>.*(?:\n(?!\s*$).*)*", re.M)


class FencedExamples(griffe.Extension):
    """Puts a fence around every example, which Markdown would take for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```python\n{found[0]}\n```", obj.docstring.value)
