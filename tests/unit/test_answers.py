"""Which characters of a chat carry loss, under chat templates of every make."""

from __future__ import annotations

from typing import Any

import pytest

from dynapipe_ext.errors import DataError
from tests.support.letter_tokens import rendered

TURNS = [("user", "Hi"), ("assistant", "Yes."), ("user", "And"), ("assistant", "No.")]


def chat(*turns: tuple[str, str], thought: str = "") -> dict[str, Any]:
    thoughts = {"reasoning_content": thought} if thought else {}
    return {"messages": [{"role": r, "content": c} | (thoughts if r == "assistant" else {}) for r, c in turns]}


def of_roles(user: str, answer: str, prompt: str, *, end: str = "") -> str:
    """A template by what it writes of a user's and of an assistant's message, and to prompt for an answer."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{end}{{% endif %}}"
    )


CHATML = of_roles("<|u|>{{ m.content }}<|e|>", "<|a|>{{ m.content }}<|e|>", "<|a|>")
THOUGHTS = "<|a|><think>{{ m.reasoning_content }}</think>{{ m.content }}<|e|>"
EARLIER_DROPPED = f"{{% if loop.last %}}{THOUGHTS}{{% else %}}<|a|>{{{{ m.content }}}}<|e|>{{% endif %}}"
QWEN = of_roles(
    "{% set ns = namespace(last_query_index=loop.index0) %}<|u|>{{ m.content }}<|e|>",
    f"{{% if loop.index0 > ns.last_query_index %}}{THOUGHTS}{{% else %}}<|a|>{{{{ m.content }}}}<|e|>{{% endif %}}",
    "<|a|>",
).replace("{% for", "{% set ns = namespace(last_query_index=2) %}{% for", 1)
TEMPLATES = {
    "an end each": (CHATML, "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦No.<|e|>⟧"),
    "an end of text at the end alone": (
        of_roles("<|u|>{{ m.content }}<|e|>", "<|a|>{{ m.content }}<|e|>", "<|a|>", end="</s>"),
        "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦No.<|e|></s>⟧",
    ),
    "another end of the last": (
        of_roles("<|u|>{{ m.content }}<|e|>", "<|a|>{{ m.content }}{{ '<|r|>' if loop.last else '<|e|>' }}", "<|a|>"),
        "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦No.<|r|>⟧",
    ),
    "no end: the next turn's beginning": (
        of_roles("<|u|>{{ m.content }}", "<|a|>{{ m.content }}", "<|a|>"),
        "<|u|>Hi<|a|>⟦Yes.<|u|>⟧And<|a|>⟦No.<|u|>⟧",
    ),
    "no special token at all": (
        of_roles("U: {{ m.content }}\n", "A: {{ m.content }}\n", "A:"),
        "U: Hi\nA:⟦ Yes.\n⟧U: And\nA:⟦ No.\n■⟧",
    ),
    "a prompt that begins a thought": (
        of_roles("<|u|>{{ m.content }}<|e|>", "<|a|><think></think>{{ m.content }}<|e|>", "<|a|><think>\n"),
        "<|u|>Hi<|e|><|a|>⟦<think></think>Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦<think></think>No.<|e|>⟧",
    ),
    "a header that the model writes": (
        of_roles(
            "<|start|>user{{ m.content }}<|end|>", "<|start|>assistant{{ m.content }}<|end|>", "<|start|>assistant"
        ),
        "<|start|>userHi<|end|>⟦<|start|>assistantYes.<|end|>⟧<|start|>userAnd<|end|>⟦<|start|>assistantNo.<|end|>⟧",
    ),
    "a space behind the end": (
        of_roles("[U] {{ m.content }} [/U]", " {{ m.content }}<|e|> ", ""),
        "[U] Hi [/U]⟦ Yes.<|e|>⟧ [U] And [/U]⟦ No.<|e|>⟧ ",
    ),
    "lists of parts alone": (
        of_roles("<|u|>{{ m['content'][0]['text'] }}<|e|>", "<|a|>{{ m['content'][0]['text'] }}<|e|>", "<|a|>"),
        "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦No.<|e|>⟧",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_falls_on_answers_with_their_ends(name: str) -> None:
    template, expected = TEMPLATES[name]
    assert rendered(template, chat(*TURNS)) == expected
    last = expected.replace("⟧", "").split("⟦")
    assert rendered(template, chat(*TURNS), loss_on="last-answer").replace("⟧", "") == f"{last[0]}{last[1]}⟦{last[2]}"


@pytest.mark.parametrize("word", ["same", "<think>", "user", "answer"])
def test_words_that_occur_everywhere_are_told_apart(word: str) -> None:
    expected = f"<|u|>{word}<|e|><|a|>⟦{word}<|e|>⟧<|u|>{word}<|e|><|a|>⟦{word}<|e|>⟧"
    assert rendered(CHATML, chat(*[(role, word) for role, _ in TURNS])) == expected


def test_thoughts_are_trained_on_as_the_template_keeps_them() -> None:
    record = chat(*TURNS, thought="Hm")
    user = "<|u|>{{ m.content }}<|e|>"
    assert rendered(of_roles(user, THOUGHTS, "<|a|><think>"), record) == (
        "<|u|>Hi<|e|><|a|>⟦<think>Hm</think>Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦<think>Hm</think>No.<|e|>⟧"
    )
    assert rendered(of_roles(user, EARLIER_DROPPED, "<|a|>"), record) == (
        "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦<think>Hm</think>No.<|e|>⟧"
    )
    kept = "<|u|>Hi<|e|><|a|>⟦<think>Hm</think>Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦<think>Hm</think>No.<|e|>⟧"
    assert rendered(QWEN, record) == kept  # which leaves out those of earlier answers where it is asked for the next


@pytest.mark.parametrize("arguments", ["{{ f.arguments | tojson }}", "{{ f.name + f.arguments }}"])
def test_calls_of_tools_carry_loss_and_their_results_do_not(arguments: str) -> None:
    answer = (
        "<|a|>{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|c|>{{ f.name }}" + arguments + "<|x|>"
        "{% else %}{{ m.content }}<|e|>{% endif %}"
    )
    template = of_roles("<|u|>{{ m.content }}<|e|>", answer, "<|a|>").replace(
        "{% if m.role == 'user' %}",
        "{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
        "{% endif %}<|t|>{{ m.content }}<|e|>{% elif m.role == 'user' %}",
    )
    call = {"type": "function", "function": {"name": "sun", "arguments": {"in": "Rome"}}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "yes"}]
    record = {"messages": [chat(*TURNS)["messages"][0], *called, {"role": "assistant", "content": "Sunny."}]}
    text = rendered(template, record)
    assert text.startswith("<|u|>Hi<|e|><|a|>⟦<|c|>sun")
    assert text.endswith('"in": "Rome"}<|x|>⟧<|t|>yes<|e|><|a|>⟦Sunny.<|e|>⟧')


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("<|a|>{{ m.content[:3] }}<|e|>", "leaves out the words of message 2, or writes them twice"),
        ("<|a|>{{ m.content }}{{ m.content }}<|e|>", "leaves out the words of message 2, or writes them twice"),
        ("<|a|>{{ m.content }}<|e|>{{ messages | map(attribute='content') | map('length') | list }}", "writes other"),
    ],
)
def test_answers_that_cannot_be_found_are_refused(answer: str, says: str) -> None:
    with pytest.raises(DataError, match=f"here: the chat template {says}"):
        rendered(of_roles("<|u|>{{ m.content }}<|e|>", answer, "<|a|>"), chat(*TURNS))
