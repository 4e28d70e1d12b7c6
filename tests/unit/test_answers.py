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
    with pytest.raises(DataError, match=r"leaves out the thought of message 2 \(reasoning_content\): remove it, train"):
        rendered(of_roles(user, EARLIER_DROPPED, "<|a|>"), record)
    kept = "<|u|>Hi<|e|><|a|>⟦<think>Hm</think>Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦<think>Hm</think>No.<|e|>⟧"
    assert rendered(QWEN, record) == kept  # which leaves out those of earlier answers where it is asked for the next


@pytest.mark.parametrize("template", [QWEN, of_roles("<|u|>{{ m.content }}<|e|>", EARLIER_DROPPED, "<|a|>"), "R1"])
def test_before_an_answer_that_is_trained_on_alone_the_context_is_that_of_inference(template: str) -> None:
    """So that of preferences, too: the published template leaves out thoughts of earlier answers."""
    record = chat(*TURNS, thought="Hm")
    if template == "R1":
        template = of_roles(
            "<|u|>{{ m.content }}<|e|>",
            "{% set content = m.content %}"
            "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
            "<|a|>{{ content }}<|e|>",
            "<|a|><think>",
        ).replace("{% for", "{% set ns = namespace(system_prompt='') %}{% for", 1)
        record = chat(TURNS[0], ("assistant", "<think>Hm</think>Yes."), TURNS[2], ("assistant", "<think>Hm</think>No."))
    expected = "<|u|>Hi<|e|><|a|>Yes.<|e|><|u|>And<|e|><|a|>⟦<think>Hm</think>No.<|e|>⟧"
    *prompt, answer = record["messages"]
    assert rendered(template, record, loss_on="last-answer") == expected
    assert rendered(template, {"prompt": prompt, "completion": [answer]}) == expected
    pair = rendered(
        template, {"prompt": prompt, "chosen": [answer], "rejected": [answer | {"content": "So."}]}, "preference"
    )
    assert pair.startswith("<|u|>Hi<|e|><|a|>Yes.<|e|><|u|>And<|e|><|a|>")
    assert pair.count("Hm") == (1 if "system_prompt" in template else 2)


THINKS = ("assistant", "<think>Two and two.</think>4")
# What a template loses of a chat, and how that is told: (what it writes of an answer, the messages).
LOSSES = {
    "QwQ's thoughts": (
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
        (TURNS[0], THINKS),
        r"the thought of message 2 \('Two' before </think>\)",
    ),
    "DeepSeek-V3.1's thoughts": (
        "{{ m.content.split('</think>', 1)[1] }}",
        (TURNS[0], THINKS),
        "the thought of message 2",
    ),
    "the middle of several thoughts": (
        "{{ m.content.split('</think>')[0] + '</think>' + m.content.split('</think>')[-1] }}",
        (TURNS[0], ("assistant", "<think>Two</think>and</think>two")),
        "the thought of message 2",
    ),
    "another role": ("{{ m.content }}", (("developer", "Be brief."), *TURNS[:2]), "message 1, of role 'developer'"),
    "a result that occurs elsewhere": (
        "{{ m.content }}",
        (("user", "A 4?"), ("assistant", "So"), ("tool", "4"), ("assistant", "So 4.")),
        "message 3, of role 'tool'",
    ),
    "another end of a word": (
        "{{ m.content.split(' ')[0] }}",
        (("user", "So 4"), ("assistant", "So 4")),
        "the words of message 2",
    ),
    "a mark alone": (
        "{{ m.content }}",
        (("system", "!"), ("user", "Hi!"), ("assistant", "Yes!")),
        "message 1, of role 'system'",
    ),
}


@pytest.mark.parametrize("path", ["chat", "marked", "preference"])
@pytest.mark.parametrize("name", LOSSES)
def test_words_that_a_template_loses_are_missed_at_their_place(name: str, path: str) -> None:
    answer, turns, says = LOSSES[name]
    body = f"{{% generation %}}{answer}<|e|>{{% endgeneration %}}" if path == "marked" else f"{answer}<|e|>"
    template = of_each(USER, f"<|a|>{body}")
    *prompt, last = chat(*turns)["messages"]
    record: dict[str, Any] = {"messages": [*prompt, last]}
    if path == "preference":
        record = {"prompt": prompt, "chosen": [last], "rejected": [{"role": "assistant", "content": "No."}]}
        if "thoughts" not in name:
            record["rejected"] = [last | {"content": f"{last['content']} too"}]
    with pytest.raises(DataError, match=f"the chat template leaves out {says}"):
        rendered(template, record, "preference" if path == "preference" else "chat")


@pytest.mark.parametrize("path", ["chat", "marked", "preference"])
def test_words_beside_calls_and_thoughts_that_are_lost_are_missed_on_every_path(path: str) -> None:
    body = "{% if m.tool_calls %}" + CALL + "{% else %}{{ m.content }}{% endif %}<|e|>"
    body = f"{{% generation %}}{body}{{% endgeneration %}}" if path == "marked" else body
    template, kind = (
        of_each(USER, f"<|a|>{body}", SAYS, before="{{ tools | tojson }}"),
        "preference" if path == "preference" else "chat",
    )

    def record(words: str) -> dict[str, Any]:
        own = called(SUN, words=words)
        first, call, *rest = own["messages"]
        if path == "preference":
            return {"prompt": [first], "chosen": [call, *rest], "rejected": rest[-1:], "tools": own["tools"]}
        return own

    assert "sun" in rendered(template, record(""), kind)
    with pytest.raises(DataError, match=r"leaves out the words of message 2, of role 'assistant' \('Dry'\)"):
        rendered(template, record("Dry"), kind)  # which the last answer has, too
    thought = record("")
    (thought["chosen"][0] if kind == "preference" else thought["messages"][1])["reasoning_content"] = "Dry"
    with pytest.raises(DataError, match="leaves out the thought of message 2"):
        rendered(template, thought, kind)
    with pytest.raises(DataError, match="leaves out the tools: give a template that has tools"):
        rendered(template.replace("{{ tools | tojson }}", ""), record(""), kind)  # whose name the call has, too


def test_nulls_in_arguments_and_schemas_are_values() -> None:
    record = called(SUN | {"function": {"name": "sun", "arguments": {"in": "Rome", "on": None}}})
    record["tools"][0]["function"]["parameters"] = {"default": None}
    text = rendered(of_each(USER, f"<|a|>{{{{ m.content }}}}{CALL}<|e|>", SAYS, before="{{ tools | tojson }}"), record)
    assert '"parameters": {"default": null}' in text
    assert '⟦<call>sun{"in": "Rome", "on": null}</call><|e|>⟧' in text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize(
    "words",
    [
        "{{ m.content or '' }}",
        "{% if m['content'] is not none %}{{ '' + m['content'] }}{% endif %}",
        "{{ m.content + '' }}",
    ],
)
def test_calls_alone_have_no_content_or_null_or_an_empty_text_as_the_template_wants_it(
    words: str, content: dict[str, Any]
) -> None:
    record = called(SUN)
    del record["messages"][1]["content"]
    record["messages"][1] |= content
    text = rendered(of_each(USER, f"<|a|>{words}{CALL}<|e|>", SAYS, before="{{ tools | tojson }}"), record)
    assert '<|u|>Hi<|e|><|a|>⟦<call>sun{"in": "Rome"}</call><|e|>⟧<|t|>yes<|e|>' in text


def test_a_chat_whose_only_target_is_its_first_token_is_refused_for_that() -> None:
    with pytest.raises(DataError, match="here: nothing to train on: loss can fall on no first token, which follows"):
        rendered(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            chat(("assistant", "A")),
        )


def test_characters_for_private_use_in_messages_are_words_like_others() -> None:
    icon = "\U000f0001 \U0010fffd"
    expected = f"<|u|>{icon}<|e|><|a|>⟦{icon} a<|e|>⟧"
    assert rendered(CHATML, chat(("user", icon), ("assistant", f"{icon} a"))) == expected


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


# Templates by what they write of a message `m`, as released ones do; a prompt for an answer is `<|a|>`.
def of_each(*writes: str, prompt: str = "{% if add_generation_prompt %}<|a|>{% endif %}", before: str = "") -> str:
    """A template that writes, of messages of the roles user, assistant, tool and system, what is given."""
    cases = "".join(
        f"{{% {'elif' if place else 'if'} m.role == '{role}' %}}{text}"
        for place, (role, text) in enumerate(zip(("user", "assistant", "tool", "system"), writes, strict=False))
    )
    return f"{before}{{% for m in messages %}}{cases}{{% endif %}}{{% endfor %}}{prompt}"


USER, ANSWER, SAYS, CALL = (
    "<|u|>{{ m.content }}<|e|>",
    "<|a|>{{ m.content }}<|e|>",
    "<|t|>{{ m.content }}<|e|>",
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}",
)
SUN = {"type": "function", "function": {"name": "sun", "arguments": {"in": "Rome"}}}
RAIN = {"type": "function", "function": {"name": "rain", "arguments": {"in": "Oslo"}}}


def called(*calls: dict[str, Any], words: str = "") -> dict[str, Any]:
    """A chat with calls whose result follows, and an answer."""
    answer = {"role": "assistant", "content": words, "tool_calls": list(calls)}
    asked, last = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Dry."}
    tools = [{"type": "function", "function": {"name": call["function"]["name"]}} for call in (SUN, RAIN)]
    return {"messages": [asked, answer, {"role": "tool", "content": "yes"}, last], "tools": tools}


def test_an_answer_may_come_first() -> None:
    first = of_each(USER, ANSWER, before="{{ messages[0].role[:0] }}")  # which a prompt without messages would break
    record = chat(("assistant", "Hello."), *TURNS[:2])
    assert rendered(first, record) == "<|a|>⟦Hello.<|e|>⟧<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧"


def test_what_a_template_moves_to_its_beginning_carries_no_loss() -> None:
    hoisted = "{% for m in messages if m.role == 'system' %}<|s|>{{ m.content }}{% endfor %}"
    record = chat(*TURNS[:2], ("system", "Now"), *TURNS[2:])
    assert rendered(of_each(USER, ANSWER, before=hoisted), record) == (
        "<|s|>Now<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|u|>And<|e|><|a|>⟦No.<|e|>⟧"
    )


def test_answers_that_are_written_otherwise_in_the_middle_are_found() -> None:
    """As thoughts are written from the last question on alone, while the prompt begins one."""
    thoughts = "{% set last = (messages | selectattr('role', 'equalto', 'user') | list | last).content %}"
    answer = "<|a|>{% if ns.on %}<think></think>{% endif %}{{ m.content }}<|e|>"
    user = "{% set ns.on = m.content == last %}" + USER
    template = of_each(user, answer, before=thoughts + "{% set ns = namespace(on=false) %}").replace(
        "<|a|>{% endif %}", "<|a|><think>{% endif %}"
    )
    record = chat(*TURNS[:2], ("assistant", "More."), *TURNS[2:])
    assert rendered(template, record) == (
        "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧<|a|>⟦More.<|e|>⟧<|u|>And<|e|><|a|>⟦<think></think>No.<|e|>⟧"
    )


@pytest.mark.parametrize("begins", ["<|m|>", "### "])
def test_a_prompt_that_is_always_written_is_no_end(begins: str) -> None:
    turn = begins + "{{ m.role }} {{ m.content }}<|e|>\n"
    template = of_each(turn, turn, prompt=f"{begins}assistant ")
    for turns, expected in (
        (TURNS[:2], f"{begins}user Hi<|e|>\n{begins}assistant ⟦Yes.<|e|>\n⟧{begins}assistant "),
        (
            TURNS,
            f"{begins}user Hi<|e|>\n{begins}assistant ⟦Yes.<|e|>\n⟧{begins}user And<|e|>\n"
            f"{begins}assistant ⟦No.<|e|>\n⟧{begins}assistant ",
        ),
    ):
        assert rendered(template, chat(*turns)) == expected


def test_tags_in_later_answers_are_no_ends_of_earlier_ones() -> None:
    template = of_each(
        "U: {{ m.content }}\n", "A: {{ m.content }}\n", prompt="{% if add_generation_prompt %}A:{% endif %}"
    )
    record = chat(TURNS[0], TURNS[1], TURNS[2], ("assistant", "<think>Hm</think> No."))
    assert rendered(template, record) == "U: Hi\nA:⟦ Yes.\n⟧U: And\nA:⟦ <think>Hm</think> No.\n⟧"


def test_contents_are_parts_only_for_templates_that_lose_them_as_text() -> None:
    parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    record = chat(*TURNS[:2])
    expected = "<|u|>Hi<|e|><|a|>⟦Yes.<|e|>⟧"
    assert rendered(of_each(f"<|u|>{parts}<|e|>", f"<|a|>{parts}<|e|>"), record) == expected
    either = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    reads = "{% set parts = m['content'][0]['text'] %}"
    assert rendered(of_each(f"{reads}<|u|>{either}<|e|>", f"<|a|>{either}<|e|>"), record) == expected


@pytest.mark.parametrize("arguments", [{"in": "Rome"}, '{"in": "Rome"}'])
@pytest.mark.parametrize(
    "write",
    [
        "{{ f.arguments | tojson(ensure_ascii=true) }}",
        "{{ f.arguments | tojson }}",
        "{{ '' + f.arguments }}",
        "{{ f.arguments }}",
        "{%- set _ = f.arguments %}",
    ],
)
def test_arguments_of_calls_are_one_object_however_data_have_them(write: str, arguments: Any) -> None:
    answer = "<|a|>{% for c in m.tool_calls %}{% set f = c.function %}{{ f.name }}" + write + "{% endfor %}<|e|>"
    record = called(SUN | {"function": {"name": "sun", "arguments": arguments}})
    if "set _" in write:
        with pytest.raises(DataError, match="leaves out the tool_calls of message 2: give a template that has tools"):
            rendered(of_each(USER, answer.replace("<|e|>", "{{ m.content }}<|e|>"), SAYS), record | {"tools": None})
        return
    text = rendered(of_each(USER, answer.replace("<|e|>", "{{ m.content }}<|e|>"), SAYS), record | {"tools": None})
    assert text == '<|u|>Hi<|e|><|a|>⟦sun{"in": "Rome"}<|e|>⟧<|t|>yes<|e|><|a|>⟦Dry.<|e|>⟧'


TOOLS = "{{ tools | tojson }}"


def test_a_result_within_the_models_turn_carries_no_loss() -> None:
    """A template may write calls, then their results, then what was said beside the calls."""
    inline = (
        "<|a|>" + CALL + "{% if m.tool_calls %}<|t|>{% if not loop.last %}{{ messages[loop.index0 + 1].content }}<|/t|>"
        "{% endif %}{% endif %}{{ m.content }}{% if not m.tool_calls or m.content %}<|e|>{% endif %}"
    )
    template = of_each(USER, inline, "", before=TOOLS)
    text = rendered(template, called(SUN))
    assert text.partition("]")[2] == ('<|u|>Hi<|e|><|a|>⟦<call>sun{"in": "Rome"}</call><|t|>⟧yes<|/t|><|a|>⟦Dry.<|e|>⟧')
    with pytest.raises(DataError, match="the chat template writes message 3 within message 2"):
        rendered(template, called(SUN, words="Look."))


@pytest.mark.parametrize(
    ("template", "number"), [(CHATML, 4), (of_roles("<|u|>{{ m.content }}", EARLIER_DROPPED, "<|a|>"), 2)]
)
def test_a_thought_that_a_template_drops_is_refused(template: str, number: int) -> None:
    messages = chat(*TURNS)["messages"]
    messages[number - 1]["reasoning_content"] = "Rain is wet."
    with pytest.raises(DataError, match=rf"the chat template leaves out the thought of message {number} \(reasoning"):
        rendered(template, {"messages": messages})
    messages[number - 1]["reasoning_content"] = ""
    assert "Yes." in rendered(template, {"messages": messages})


def test_a_call_ends_with_what_begins_its_result_where_answers_have_no_end() -> None:
    template = of_each("<|u|>{{ m.content }}", "<|a|>{{ m.content }}" + CALL, "<|o|>{{ m.content }}", before=TOOLS)
    call = '<call>sun{"in": "Rome"}</call>'
    text = rendered(template, called(SUN, words="Look."))
    assert text.partition("]")[2] == f"<|u|>Hi<|a|>⟦Look.{call}<|o|>⟧yes<|a|>⟦Dry.<|u|>⟧"
    last = called(SUN)
    text = rendered(template, last | {"messages": last["messages"][:2]})
    assert text.partition("]")[2] == f"<|u|>Hi<|a|>⟦{call}<|o|>⟧"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ANSWER, "leaves out the tool_calls of message 2: give a template that has tools"),
        (
            "<|a|>{{ m.content }}{% for c in (m.tool_calls or [])[:1] %}<c>{{ c.function | tojson }}{% endfor %}<|e|>",
            "leaves out",
        ),
        (
            "<|a|>{{ m.content if not m.tool_calls }}" + CALL + "<|e|>",
            "leaves out the words of message 2, of role 'assis",
        ),
    ],
)
def test_parts_of_answers_that_a_template_drops_are_refused(answer: str, says: str) -> None:
    """Also where the tools that stand before the chat have the names of calls."""
    with pytest.raises(DataError, match=f"the chat template {says}"):
        rendered(of_each(USER, answer, SAYS, before=TOOLS), called(SUN, RAIN, words="Look."))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("<|a|>{{ m.content[:3] }}<|e|>", "writes messages otherwise by their words"),
        ("<|a|>{{ m.content }}{{ m.content }}<|e|>", "leaves out the words of message 2, or writes them twice"),
        (
            "<|a|>{{ m.content }}<|e|>{{ messages | map(attribute='content') | map('length') | list }}",
            "writes messages",
        ),
    ],
)
def test_answers_that_cannot_be_found_are_refused(answer: str, says: str) -> None:
    with pytest.raises(DataError, match=f"here: the chat template {says}"):
        rendered(of_roles("<|u|>{{ m.content }}<|e|>", answer, "<|a|>"), chat(*TURNS))
