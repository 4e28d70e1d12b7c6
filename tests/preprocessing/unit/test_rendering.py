"""What records become by a model's own tokenizer: tokens, and which of them carry loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.preprocessing.record_forms import INSTRUCTIONS, RecordFields, chat_of, template_of
from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.executor.drop_in.samples import megatron_arrays, open_samples, split_source
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.run_data import data_lines, run_data, shown_forms
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.show.samples import sample_text
from tests.support.model_folders import CHATML, write_lines, write_model_tokenizer

TWO_TURNS = [
    {"role": "system", "content": "I am fine"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and you"},
    {"role": "assistant", "content": "two and three"},
]
# The same as CHATML, saying itself what the assistant wrote, without the line's end.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)


# With tools, their calls and, in JSON, what they say.
CALLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokenizers with chat templates of all sorts."""
    root = tmp_path_factory.mktemp("tokenizers")
    no_system = "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    templates: dict[str, str | None] = {
        "chatml": CHATML,
        "marked": MARKED,
        "none": None,
        "refuses-system": CHATML.replace("<|im_start|>{{ m.role }}", no_system + "<|im_start|>{{ m.role }}", 1),
        "drops-system": "{% for m in messages if m.role != 'system' %}"
        + CHATML.removeprefix("{% for m in messages %}"),
        "forgets": CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}"),
        "calls": CALLS,
        "drops-tools": CALLS.replace("{{ m.content | tojson }}", ""),
        "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    }
    for name, template in templates.items():
        write_model_tokenizer(root / name, template=template)
    return root


def prepared(
    tokenizer: Path, records: Sequence[Mapping[str, Any]], folder: Path, *, max_seq_len: int = 512, **data: Any
) -> TokenDataset:
    path = write_lines(folder / "data.jsonl", records)
    tables = {"path": str(path), "tokenizer": str(tokenizer), **data}
    config = TrainConfig.from_json(
        {"data": tables, "model": {"max_seq_len": max_seq_len}, "run": {"run_dir": str(folder / "run")}}
    )
    return run_data(config).whole


def shown(dataset: TokenDataset, index: int = 0) -> str:
    return sample_text(dataset[index], dataset.tokenizer()).plain


def refusal(*given: Any, **data: Any) -> str:
    with pytest.raises(DynaPipeError) as caught:
        prepared(*given, **data)
    return str(caught.value)


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_loss_falls_on_what_the_assistant_says_and_ends(name: str, tokenizers: Path, tmp_path: Path) -> None:
    dataset = prepared(tokenizers / name, [{"messages": TWO_TURNS}], tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers / name)
    assert dataset[0].tokens.tolist() == tokenizer.apply_chat_template(TWO_TURNS, tokenize=True)["input_ids"]
    after = "⟧\n" if name == "marked" else "\n⟧"  # of an unmarked turn the template's own line end is part
    assert shown(dataset) == (
        "<|im_start|>system\nI am fine<|im_end|>\n<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n"
        f"⟦fine<|im_end|>{after}<|im_start|>user\nand you<|im_end|>\n<|im_start|>assistant\n"
        f"⟦two and three<|im_end|>{after}"
    )
    assert dataset.lengths.tolist() == [[len(dataset[0].tokens) - 1, 0, dataset[0].target]]


def test_the_loss_of_every_source_falls_on_the_targets_alone(tokenizers: Path, tmp_path: Path) -> None:
    """Of chats of several answers, pairs and text, in rows as we train them and as Megatron's loops do."""
    chats = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[1:3]}]
    for records in (chats, [{"prompt": "how are", "response": " you"}], [{"text": "two and three"}]):
        dataset = prepared(tokenizers / "chatml", records, tmp_path)
        source = open_samples(dataset.directory)
        part, _, _ = split_source(source, None)
        assert part is not None
        for index, sample in enumerate(dataset[i] for i in range(len(dataset))):
            is_target = sample.is_target[1:].astype(float).tolist()
            row = MicroBatch(sample_lengths(dataset.lengths, [index]), "packed", pad_multiple=8)
            planned, megatron = collate(row, [sample])["loss_weights"], megatron_arrays(row, [source[index]])
            assert planned[0, : sample.positions].tolist() == is_target
            assert megatron["loss_mask"][0, : sample.positions].tolist() == is_target
            assert part[index].loss_mask.tolist() == is_target


def test_prompts_that_carry_loss_and_empty_answers_are_counted(
    tokenizers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alpaca's records have their whole prompt and answer in `text`, too."""
    alpaca = {"instruction": "how are", "input": "", "output": "you", "text": "how are you"}
    path = write_lines(tmp_path / "alpaca.jsonl", [alpaca] * 3)

    def notes(*fields: str) -> list[str]:
        data = {"path": str(path), "tokenizer": str(tokenizers / "chatml"), "fields": fields}
        config = TrainConfig.from_json({"data": data, "run": {"run_dir": str(tmp_path / "run")}})
        return [line for line in data_lines(run_data(config)) if line.startswith("note:")]

    (answers,) = notes()
    command = ["preprocess", "--input", str(path), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert cli.main([*command, "--tokenizer", str(tokenizers / "chatml")]) == 0
    assert answers in "".join(capsys.readouterr())
    assert "3 samples of instructions: loss falls on their answers alone. The records also have 'text'" in answers
    assert notes("text") == []  # as it is meant
    assert notes("instruction", "output") == []
    write_lines(path, [alpaca, alpaca | {"output": ""}])
    for flags in ((), ("instruction", "output")):
        assert "1 sample with an empty target: the end of text is all they teach" in notes(*flags)[-1]
    write_lines(path, [{"question": "how are", "target": "you", "text": "how are you"}] * 3)
    (whole,) = notes()
    assert "3 samples of the whole field 'text': loss falls on prompts in it, too" in whole
    assert "The records also have 'question', 'target', not read" in whole
    write_lines(path, [{"problem": "how are", "solution": "you", "answer": "fine"}] * 3)
    (several,) = notes()
    assert "The records also have 'answer', not read: to train on others, name theirs by --fields" in several


@pytest.mark.parametrize("named", [{"user": "human", "assistant": "gpt"}, {}])
def test_sharegpts_turns_are_the_messages_of_a_chat(named: Mapping[str, str], tokenizers: Path, tmp_path: Path) -> None:
    turns = [{"from": named.get(said["role"], said["role"]), "value": said["content"]} for said in TWO_TURNS]
    records = [{"messages": TWO_TURNS}, {"conversations": turns, "id": "x"}, {"conversations": TWO_TURNS}]
    dataset = prepared(tokenizers / "chatml", records, tmp_path)
    assert shown(dataset, 0) == shown(dataset, 1) == shown(dataset, 2)
    (tmp_path / "alone").mkdir()
    assert shown(prepared(tokenizers / "chatml", records[1:2], tmp_path / "alone")) == shown(dataset)


QUESTION, ANSWER = TWO_TURNS[1:3]
MESSAGES = [(message["role"], message["content"]) for message in (QUESTION, ANSWER)]
ASKED = [("user", "how are"), ("assistant", "fine")]
EARLIER = {"instruction": "two", "output": "three", "system": "be", "history": [["how are", "fine"]]}


@pytest.mark.parametrize(
    ("record", "as_messages"),
    [
        ({"instruction": "how are", "input": "", "output": "fine"}, [("user", "how are"), ("assistant", "fine")]),
        ({"instruction": "how", "input": "are", "output": "fine"}, [("user", "how\nare"), ("assistant", "fine")]),
        ({"instruction": "how", "context": "are", "response": "fine"}, [("user", "how\nare"), ("assistant", "fine")]),
        (
            EARLIER,
            [("system", "be"), *zip(("user", "assistant") * 2, ("how are", "fine", "two", "three"), strict=True)],
        ),
        (
            {"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "fine"}], "system": "be"},
            [("system", "be"), ("user", "how"), ("assistant", "fine")],
        ),
        *[({prompt: "how are", answer: "fine"}, ASKED) for prompt, answer in INSTRUCTIONS],
        ({"problem": "how are", "solution": "fine", "answer": "two"}, ASKED),
        ({"question": "how", "context": "are", "answer": "fine"}, [("user", "how\nare"), ASKED[1]]),
        ({"system_prompt": "be", "question": "how are", "response": "fine"}, [("system", "be"), *ASKED]),
        *[
            ({"conversations": [{"from": "Human", "value": "how are"}, {"from": speaker, "value": "fine"}]}, ASKED)
            for speaker in ("bot", "chatgpt", "chatbot", "model", "ai", "assistant", "GPT")
        ],
        ({"messages": [{"from": "human", "value": "how are"}, {"from": "gpt", "value": "fine"}]}, ASKED),
        ({"messages": [{"role": "human", "content": "how are"}, {"role": "model", "content": "fine"}]}, ASKED),
        ({"messages": [{"role": "User", "content": "how are"}, {"role": "Assistant", "content": "fine"}]}, ASKED),
        ({"system": "be", "messages": [QUESTION, ANSWER]}, [("system", "be"), *MESSAGES]),
        ({"system": "be", "prompt": [QUESTION], "completion": [ANSWER]}, [("system", "be"), *MESSAGES]),
        ({"dialogue": [QUESTION, ANSWER]}, MESSAGES),
        ({"conversations": json.dumps([QUESTION, ANSWER])}, MESSAGES),
        (
            {"messages": [QUESTION | {"content": [{"type": "text", "text": "how"}, {"text": " are"}]}, ANSWER]},
            [("user", "how are"), ("assistant", ANSWER["content"])],
        ),
    ],
)
def test_other_forms_of_chats_are_the_same_chat(
    record: Mapping[str, Any], as_messages: Sequence[tuple[str, str]], tokenizers: Path, tmp_path: Path
) -> None:
    fields = template_of(record, RecordFields(), "", instructions_as_chats=True)[1]
    chat = chat_of(record, fields, "here")
    assert [(message["role"], message["content"]) for message in chat.messages] == as_messages
    (tmp_path / "other").mkdir()
    messages = {"messages": [{"role": role, "content": content} for role, content in as_messages]}
    expected = prepared(tokenizers / "chatml", [messages], tmp_path / "other")
    if "history" not in record:
        assert shown(prepared(tokenizers / "chatml", [record], tmp_path)) == shown(expected)


def test_any_pair_is_a_chat_where_that_is_asked_for(tokenizers: Path, tmp_path: Path) -> None:
    (expected,) = (shown(prepared(tokenizers / "chatml", [{"messages": [QUESTION, ANSWER]}], tmp_path)),)
    question, answer = QUESTION["content"], ANSWER["content"]
    pairs = [({"prompt": question, "response": answer}, {}), ({"q": question, "a": answer}, {"fields": ("q", "a")})]
    for record, keys in pairs:
        assert shown(prepared(tokenizers / "chatml", [record], tmp_path, template="chat", **keys)) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.csv", "question;answer\na;b\n", "csv of semicolons, instructions as chats: 'question' and 'answer'"),
        ("d.json", json.dumps({"data": [{"messages": TWO_TURNS}]}), "json, its records under 'data', chats, loss on"),
        ("d.json", json.dumps([TWO_TURNS]), "json, chats, loss on their answers"),
        ("d.tsv", "prompt\tresponse\na\tb\n", "tsv, prompts and answers: 'prompt' and 'response'"),
    ],
)
def test_the_form_that_is_taken_is_said_for_each_file(
    name: str, content: str, said: str, tokenizers: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    data = {"path": str(path), "tokenizer": str(tokenizers / "chatml")}
    (line,) = shown_forms(TrainConfig.from_json({"data": data, "run": {"run_dir": str(tmp_path / "run")}}))
    assert line.startswith(f"{path}: {said}")


def test_instructions_have_headings_where_no_template_is_for_chats(tokenizers: Path, tmp_path: Path) -> None:
    record = {"instruction": "how", "input": "are", "output": "fine"}
    expected = "### Instruction:\nhow\n\n### Input:\nare\n\n### Response:\n"
    assert shown(prepared(tokenizers / "none", [record], tmp_path)) == f"<s>{expected}⟦fine</s>⟧"
    path = write_lines(tmp_path / "own.jsonl", [record])
    data = {"path": str(path), "tokenizer": "bytes"}
    own = run_data(TrainConfig.from_json({"data": data, "run": {"run_dir": str(tmp_path / "run")}})).whole
    assert shown(own) == f"{expected}⟨separator⟩⟦fine⟨eos⟩⟧"


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_loss_falls_on_the_answers_that_are_to_be_trained_on(template: str, tokenizers: Path, tmp_path: Path) -> None:
    """By switches of messages, by the form, or on the last answer alone; the tokens stay the same."""
    first, second = [place for place, message in enumerate(TWO_TURNS) if message["role"] == "assistant"]

    def trained(record: Mapping[str, Any], **settings: str) -> tuple[bool, bool]:
        text = shown(prepared(tokenizers / template, [record], tmp_path, **settings))
        bare = text.replace("⟦", "").replace("⟧", "")
        assert bare == shown(prepared(tokenizers / template, [whole], tmp_path)).replace("⟦", "").replace("⟧", "")
        marked = [part.split("⟧")[0] for part in text.split("⟦")[1:]]
        words = [str(TWO_TURNS[place]["content"]) for place in (first, second)]
        return tuple(any(word in part for part in marked) for word in words)  # type: ignore[return-value]

    def switched(**switches: object) -> dict[str, Any]:
        return {"messages": [m | (switches if place == first else {}) for place, m in enumerate(TWO_TURNS)]}

    whole = {"messages": TWO_TURNS}
    assert trained(whole) == (True, True)
    assert trained(switched(weight=0)) == trained(switched(train=False)) == (False, True)
    assert (
        trained(switched(weight=1.0)) == trained(switched(train=True)) == trained(switched(weight=None)) == (True, True)
    )
    assert trained({"prompt": TWO_TURNS[:second], "completion": TWO_TURNS[second:]}) == (False, True)
    assert trained({"prompt": TWO_TURNS[:2], "completion": TWO_TURNS[2:]}) == (True, True)
    assert trained(whole, loss_on="last-answer") == (False, True)
    last_off = {"messages": [*TWO_TURNS[:second], TWO_TURNS[second] | {"weight": 0}, *TWO_TURNS[second + 1 :]]}
    assert trained(last_off, loss_on="last-answer") == (True, False)


def test_calls_and_tools_of_sharegpt_are_those_of_messages(tokenizers: Path, tmp_path: Path) -> None:
    call = json.dumps({"name": "weather", "arguments": {"place": "here"}})
    turns = [("human", "how"), ("function_call", call), ("observation", 'five "two"'), ("gpt", "fine")]
    record = {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}
    expected = shown(prepared(tokenizers / "calls", [called()], tmp_path))
    for tools in ([WEATHER], json.dumps([WEATHER])):
        assert shown(prepared(tokenizers / "calls", [record | {"tools": tools}], tmp_path)) == expected
    older, messages = called(), called()["messages"]
    older["messages"] = [
        messages[0],
        {"role": "assistant", "content": None, "function_call": json.loads(call)},
        {"role": "function", "name": "weather", "content": 'five "two"'},
        messages[3],
    ]
    assert shown(prepared(tokenizers / "calls", [older], tmp_path)) == expected


def test_an_answer_that_no_special_token_ends_gets_the_end_of_text(tokenizers: Path, tmp_path: Path) -> None:
    dataset = prepared(tokenizers / "plain", [{"messages": TWO_TURNS[1:3]}], tmp_path)
    assert shown(dataset) == "user: how are you\nassistant:⟦ fine\n</s>⟧"


def test_a_prompt_is_followed_by_its_response_as_the_tokenizer_has_them_together(
    tokenizers: Path, tmp_path: Path
) -> None:
    records = [{"prompt": "how are", "response": " you"}, {"prompt": "how are ", "response": "you"}]
    dataset = prepared(tokenizers / "none", [*records, {"prompt": "", "response": "fine</s>"}], tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers / "none")

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert dataset[0].tokens.tolist() == [start, *ids("how are you"), end]
    # The space flows into the next word, so the two are taken apart: the prompt's ids are what will be asked.
    assert dataset[1].tokens.tolist() == [start, *ids("how are "), *ids("you"), end]
    assert [shown(dataset, i) for i in range(3)] == [
        "<s>how are⟦ you</s>⟧",
        "<s>how are ⟦you</s>⟧",
        "<s>⟦fine</s>⟧",
    ]


def test_a_text_is_all_target_but_for_what_the_tokenizer_starts_it_with(tokenizers: Path, tmp_path: Path) -> None:
    assert shown(prepared(tokenizers / "none", [{"text": "how are you"}], tmp_path)) == "<s>⟦how are you</s>⟧"


def test_a_beginning_and_an_end_of_text_that_records_have_themselves_are_there_once(
    tokenizers: Path, tmp_path: Path
) -> None:
    """As a chat template applied beforehand leaves them."""
    given = tokenizers / "chatml"
    pair = prepared(
        given, [{"prompt": "<s>how are", "response": " you</s>"}, {"prompt": "", "response": "<s>two"}], tmp_path
    )
    assert [shown(pair, index) for index in range(2)] == ["<s>how are⟦ you</s>⟧", "<s>⟦two</s>⟧"]
    assert shown(prepared(given, [{"text": "<s>how are</s>"}], tmp_path)) == "<s>⟦how are</s>⟧"


def test_fields_are_found_by_their_usual_names_or_by_those_given(tokenizers: Path, tmp_path: Path) -> None:
    wanted = "<s>two⟦three</s>⟧"
    for names in (("input", "target"), ("prompt", "response"), ("prompt", "completion"), ("inputs", "targets")):
        assert (
            shown(prepared(tokenizers / "none", [dict(zip(names, ("two", "three"), strict=True))], tmp_path)) == wanted
        )
    own = [{"question": "two", "answer": "three", "body": "fine"}]
    assert shown(prepared(tokenizers / "none", own, tmp_path, fields=("question", "answer"))) == wanted
    assert shown(prepared(tokenizers / "none", own, tmp_path, fields=("body",))) == "<s>⟦fine</s>⟧"
    both = [own[0] | {"input": "two", "target": "three"}]
    assert shown(prepared(tokenizers / "none", both, tmp_path, fields=("body",))) == "<s>⟦fine</s>⟧"
    path = write_lines(tmp_path / "both.jsonl", both)
    run = {"run_dir": str(tmp_path / "run")}
    texts = TrainConfig.from_json({"data": {"path": str(path), "tokenizer": "bytes", "fields": ["body"]}, "run": run})
    assert shown(run_data(texts).whole) == "⟨separator⟩⟦fine⟨eos⟩⟧"
    words = ["preprocess", "--input", str(path), "--tokenizer", "bytes", "--workers", "1", "--fields", "body"]
    assert cli.main([*words, "--output", str(tmp_path / "texts")]) == 0
    assert shown(TokenDataset.open(tmp_path / "texts")) == "⟨separator⟩⟦fine⟨eos⟩⟧"
    path = write_lines(tmp_path / "own.jsonl", own)
    data = {"path": str(path), "tokenizer": "bytes", "fields": ["question", "answer"]}
    plain = run_data(TrainConfig.from_json({"data": data, "run": run})).whole
    assert shown(plain) == "two⟨separator⟩⟦three⟨eos⟩⟧"


def test_calls_of_tools_carry_loss_and_what_tools_say_does_not(tokenizers: Path, tmp_path: Path) -> None:
    text = shown(prepared(tokenizers / "calls", [called()], tmp_path))
    assert text.splitlines() == [
        "weather<|im_start|>user",
        "how<|im_end|>",
        "<|im_start|>assistant",
        '⟦{"name": "weather", "arguments": {"place": "here"}}<|im_end|>',
        "⟧<|im_start|>tool",
        '"five \\"two\\""<|im_end|>',
        "<|im_start|>assistant",
        "⟦fine<|im_end|>",
        "⟧",
    ]


def test_one_template_may_be_chosen_where_records_have_several(tokenizers: Path, tmp_path: Path) -> None:
    records = [{"messages": TWO_TURNS, "text": "fine", "input": "two", "target": "three"}]
    assert shown(prepared(tokenizers / "chatml", records, tmp_path)).startswith("<|im_start|>system")
    assert shown(prepared(tokenizers / "chatml", records, tmp_path, template="prompt")) == "<s>two⟦three</s>⟧"
    assert shown(prepared(tokenizers / "chatml", records, tmp_path, template="text")) == "<s>⟦fine</s>⟧"


def test_cuts_take_the_prompts_start_and_the_chats_end(tokenizers: Path, tmp_path: Path) -> None:
    given = tokenizers / "chatml"
    pair = [{"input": "how are you and two", "target": " three is"}]
    assert shown(prepared(given, pair, tmp_path, max_seq_len=5, truncate=True)) == "<s> and two⟦ three is</s>⟧"
    assert shown(prepared(given, pair, tmp_path, max_seq_len=2, truncate=True)) == "<s>⟦ three is⟧"
    whole = prepared(given, [{"messages": TWO_TURNS}], tmp_path)[0]
    cut = prepared(given, [{"messages": TWO_TURNS}], tmp_path, max_seq_len=whole.positions - 3, truncate=True)
    assert cut[0].tokens.tolist() == whole.tokens[:-3].tolist()
    assert cut.num_truncated == 1
    text = refusal(given, [{"messages": TWO_TURNS}] * 2, tmp_path, max_seq_len=5)
    assert "data.jsonl, line 1: the sample has" in text
    assert "max_seq_len is 5: pass --truncate" in text
    text = refusal(given, [{"messages": TWO_TURNS}], tmp_path, max_seq_len=5, truncate=True)
    assert "line 1: nothing is left to train on within max_seq_len" in text


CHAT = {"messages": TWO_TURNS[1:]}
SYSTEM = {"messages": TWO_TURNS[:3]}
TURNS = {"conversations": [{"from": said["role"], "value": said["content"]} for said in TWO_TURNS]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def called() -> dict[str, Any]:
    """A chat in which a tool is called."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}}
    return {
        "messages": [
            {"role": "user", "content": "how"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": 'five "two"'},
            {"role": "assistant", "content": "fine"},
        ],
        "tools": [WEATHER],
    }


@pytest.mark.parametrize(
    ("name", "records", "said"),
    [
        ("refuses-system", [CHAT, SYSTEM], "line 2: the chat template has no system role .*System role not supported"),
        ("drops-system", [CHAT, SYSTEM], "line 2: the chat template leaves out message 1, of role 'system' .'I'.: put"),
        ("forgets", [CHAT], "line 1: the chat template leaves out the words of message 2, of role 'assistant'"),
        ("none", [CHAT], "the tokenizer has no chat template: give a folder that has one"),
        ("chatml", [{"messages": TWO_TURNS[:2]}], "line 1: no message has the role 'assistant'"),
        ("chatml", [{"conversations": [{"from": "function", "value": "4"}]}], "line 1: turn 1 .* is from 'function'"),
        (
            "chatml",
            [{"conversations": [{"from": "gpt"}]}],
            "line 1: turn 1 of 'conversations' is from 'gpt'.* a \"value\"",
        ),
        ("chatml", [TURNS | {"system": "be"}], "line 1: field 'system' stands beside a first turn of the system"),
        ("chatml", [{"messages": [TWO_TURNS[1], TWO_TURNS[2] | {"weight": 0}]}], "line 1: no answer of it is to be"),
        ("chatml", [{"messages": [TWO_TURNS[1], TWO_TURNS[2] | {"weight": 0.5}]}], "message 2 has weight 0.5: give 0"),
        (
            "chatml",
            [{"messages": [TWO_TURNS[1] | {"train": True}, TWO_TURNS[2]]}],
            "message 1, of role 'user', has tra",
        ),
        ("chatml", [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "content of type 'image': give"),
        ("chatml", [CHAT | {"tools": "{"}], "line 1: field 'tools' is not JSON"),
        ("chatml", [{"conversations": [{"from": "function_call", "value": "{"}]}], "turn 1, a function_call, is not"),
        ("chatml", [{"conversations": [{"from": "function_call", "value": "3"}]}], 'turn 1, .* must be {"name"'),
        ("chatml", [{"instruction": "a", "output": "b", "history": ["a"]}], "field 'history' must be a list of"),
        ("chatml", [{"instruction": "a", "output": "b", "input": "c", "context": "d"}], "both 'input' and 'context'"),
        ("chatml", [{"system": "a", "prompt": "b", "response": "c"}], "field 'system' is part of a chat, but 'prompt'"),
        ("chatml", [{"prompt": {"0": "a"}, "response": {"0": "b"}}], "are an object each, as a whole table has its"),
        ("chatml", [TWO_TURNS[1]], "the record is one message of a chat: put all messages of a chat into one record"),
        ("chatml", [{"system": "a", "system_prompt": "b", "messages": TWO_TURNS[1:3]}], "it has both 'system' and"),
        ("none", [{"instruction": "a", "output": "b", "system": "c"}], "field 'system' is part of a chat: give a tok"),
        ("chatml", [{"messages": []}], "line 1: field 'messages' must be a list"),
        ("chatml", [{"messages": ["hi"]}], 'line 1: message 1 must be an object with a "role"'),
        ("chatml", [{"messages": [{"role": "user"}]}], "line 1: message 1, of role 'user', lacks 'content'"),
        ("chatml", [{"messages": [{"role": "user", "content": 1}]}], "message 1: field 'content' is a number"),
        (
            "chatml",
            [{"prompt": "a", "response": None}],
            "field 'response' is a null .*: write its text, or rem",
        ),
        (
            "chatml",
            [{"prompt": [QUESTION], "completion": "b"}],
            "'prompt' is a list and 'completion' a string: wri",
        ),
        (
            "chatml",
            [CHAT | {"tools": [WEATHER]}],
            "line 1: the chat template leaves out the tools: give a template that",
        ),
        ("chatml", [called()], "line 1: the chat template leaves out the tool_calls of message 2: give a template"),
        ("drops-tools", [called()], "line 1: the chat template leaves out message 3, of role 'tool'"),
        ("chatml", [CHAT | {"tools": 3}], "line 1: field 'tools' must be a list"),
        ("chatml", [CHAT, {"text": "a"}], "line 2: .*lacks 'messages' .*: all records .* must be of one kind"),
        ("chatml", [{"text": "a"}, CHAT], "line 2: .*lacks 'text' .*: all records .* must be of one kind"),
        ("chatml", [{"question": "a"}], "line 1: .*messages; input and target; .* or name yours with --fields"),
        ("chatml", [{"text": ""}], "line 1: the record is empty"),
        ("none", [{"text": "a"}, {"input": "a", "target": "b"}], "line 2: .*lacks 'text'.*all records .* be of one k"),
    ],
)
def test_what_no_template_can_say_is_refused_with_its_line(
    name: str, records: Sequence[Mapping[str, Any]], said: str, tokenizers: Path, tmp_path: Path
) -> None:
    with pytest.raises(DynaPipeError, match=said):
        prepared(tokenizers / name, records, tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"template": "text"},
            r"template is text but the tokenizer is 'bytes', and templates .*: leave it out; to",
        ),
        (
            {"fields": ["body"]},
            r"own\.jsonl, line 1: the record lacks 'body' \(it has 'input', 'target'\): name a",
        ),
        ({"path": "", "fields": ["body"]}, "fields are those of files: name your data, too"),
        ({"path": "", "template": "chat"}, "template is chat but the tokenizer is 'bytes'"),
    ],
)
def test_what_says_how_to_read_records_and_cannot_is_refused(
    tmp_path: Path, data: dict[str, object], said: str
) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"input": "two", "target": "three"}])
    config = TrainConfig.from_json({"data": {"path": str(path), "tokenizer": "bytes"} | data})
    with pytest.raises(DynaPipeError, match=said):
        run_data(config)


def test_a_chat_needs_a_models_tokenizer_and_a_broken_line_is_named(tokenizers: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [CHAT])
    config = TrainConfig.from_json({"data": {"path": str(path), "tokenizer": "bytes"}})
    with pytest.raises(DynaPipeError, match=r"line 1: the record has 'messages', .* is 'bytes': give such"):
        run_data(config)
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT)[:-4] + "\n")
    config = config.with_values(data={"tokenizer": str(tokenizers / "chatml")}, run={"run_dir": str(tmp_path / "run")})
    with pytest.raises(DynaPipeError, match=r"data\.jsonl, line 2, column \d+: not JSON"):
        run_data(config)


def test_chats_are_prepared_once_and_evaluated_by_the_same_tokenizer(tokenizers: Path, tmp_path: Path) -> None:
    path, held = (write_lines(tmp_path / name, [CHAT, SYSTEM]) for name in ("data.jsonl", "held.jsonl"))
    tables = {
        "data": {"path": str(path), "tokenizer": str(tokenizers / "chatml")},
        "eval": {"path": str(held), "every": 1},
        "run": {"run_dir": str(tmp_path / "run")},
    }
    config = TrainConfig.from_json(tables)
    first = run_data(config).whole
    assert run_data(config, lambda _: pytest.fail("prepared again")).whole.directory == first.directory
    other = config.with_values(data={"tokenizer": str(tokenizers / "marked")})
    assert run_data(other).whole.directory != first.directory
    evaluated = run_data(config).held_out
    assert evaluated is not None
    assert [evaluated[i].tokens.tolist() for i in range(2)] == [first[i].tokens.tolist() for i in range(2)]
    assert np.array_equal(evaluated.lengths, first.lengths)


def test_a_tokenizer_may_have_more_ids_than_the_model_but_no_sample(tokenizers: Path, tmp_path: Path) -> None:
    """As where somebody has added a token for padding, and left the model as it was."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers / "chatml")
    transformers.LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2).save_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "more")
    path, held = (write_lines(tmp_path / name, [CHAT, SYSTEM]) for name in ("data.jsonl", "held.jsonl"))
    tables = {
        "model": {"architecture": str(tmp_path / "model")},
        "data": {"path": str(path), "tokenizer": str(tmp_path / "more")},
        "eval": {"path": str(held), "every": 1},
        "run": {"run_dir": str(tmp_path / "run")},
    }
    config = TrainConfig.from_json(tables)
    assert run_data(config).whole.vocab_size == len(tokenizer)
    number = len(tokenizer) - 1
    for spoilt in (held, path):
        write_lines(spoilt, [CHAT, {"messages": [*SYSTEM["messages"][:2], {"role": "assistant", "content": "<more>"}]}])
        with pytest.raises(
            DynaPipeError, match=rf"sample 1 of .* has the id {number} but .* a vocabulary of {number}:"
        ):
            run_data(config)
