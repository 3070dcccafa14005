"""Messages in the forms of other libraries are read whole, or an error says what cannot be read."""

import json

import pytest

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.messages import messages_of
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow
from tests.field.test_chat_data import CALL, TOOL, assistant, read, reason, user


def call_of(name, **more):
    return {"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}}), **more}


# -- messages as text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'q'}]",
        "{'from': 'human', 'value': 'q'}",
        "[{'content': 'q', 'role': 'user'} {'content': 'b',\n 'role': 'assistant'}\n {'content': 'c', 'role': 'user'}]",
    ],
    ids=["list", "message", "NumPy"],
)
def test_pythons_form_of_messages_is_an_error(text):
    message = reason(PromptDataModule, {"prompt": text})
    assert "column 'prompt' has Python's form of a list of messages" in message
    assert "instead of JSON: convert the column by json.dumps" in message
    assert "column 'chosen'" in reason(PreferenceDataModule, {"chosen": text, "rejected": "x", "prompt": "why?"})


@pytest.mark.parametrize("text", ["[{'a': 1}]", r"{'\d'}", "{'role': 'user'}", "[{'role': f(x), 'content': 'q'}]"])
def test_other_python_is_a_text(text):
    assert read(ConversationDataModule, {"prompt": "?", "completion": text})[1] == [f"?[{text}</s>]"]


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "function_call": CALL["function"]},
        {"from": "gpt", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
)
def test_json_messages_need_calls_or_a_content(answer):
    row = {"prompt": json.dumps([user("sky?")]), "completion": json.dumps(answer), "tools": [TOOL]}
    assert read(ConversationDataModule, row)[1][0].endswith('[<call>weather {"city": "Oslo"}</s>]')
    row["completion"] = json.dumps([answer])
    assert read(ConversationDataModule, row)[1][0].endswith('[<call>weather {"city": "Oslo"}</s>]')


@pytest.mark.parametrize(
    "text",
    [
        '{"from": "EUR", "to": "USD", "value": 3}',
        '{"from": "EUR", "to": "USD", "value": "3"}',
        '[{"from": "EUR", "to": "USD", "value": 3}]',
        '{"role": "admin", "content": "x"}',
        '{"role": "user", "content": {"a": 1}}',
    ],
)
def test_json_that_is_an_answer_is_a_text(text):
    assert read(ConversationDataModule, {"prompt": "make", "completion": text})[1] == [f"make[{text}</s>]"]


def test_json_messages_of_configured_and_unknown_roles_are_messages():
    row = {"prompt": json.dumps([user("a")]), "completion": json.dumps({"role": "bob", "content": "b"})}
    texts = read(ConversationDataModule, row, roles={"bob": "assistant"})[1]
    assert texts == ["<user>a</s>\n<assistant>[b</s>]"]
    unknown = {"messages": json.dumps([{"from": "bob", "value": "a"}])}
    assert "a message is from 'bob'" in reason(ConversationDataModule, unknown)
    empty = {"messages": json.dumps([{"role": "user", "content": None}])}
    assert "needs 'role' and text" in reason(ConversationDataModule, empty)


# -- calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "text"), [([], ""), ([assistant("look")], "look")], ids=["calls alone", "after a text"]
)
def test_calls_that_are_messages_are_one_turn(before, text):
    messages = [user("sky?"), *before, call_of("f"), call_of("g"), {"role": "tool_response", "content": "3"}]
    texts = read(ConversationDataModule, {"messages": [*messages, assistant("so")]})[1]
    expected = f"<user>sky?</s>\n<assistant>[{text}<call>f {{}}<call>g {{}}</s>]\n<tool>3</s>\n<assistant>[so</s>]"
    assert texts == [expected]


def test_a_role_that_is_configured_has_no_calls():
    messages = [user("a"), assistant("b"), {"role": "tool_call", "content": "c"}]
    assert [message["role"] for message in messages_of(messages, "x", {"tool_call": "user"})] == [
        "user", "assistant", "user",
    ]  # fmt: skip


def test_flags_and_thoughts_of_a_turn_must_agree():
    differ = [user("a"), assistant("b", loss=False), call_of("f")]
    assert "another flag for learning" in reason(ConversationDataModule, {"messages": differ})
    agree = [user("a"), assistant("b", loss=False), call_of("f", weight=0), user("c"), assistant("d")]
    assert read(ConversationDataModule, {"messages": agree})[1] == [
        "<user>a</s>\n<assistant>b<call>f {}</s>\n<user>c</s>\n<assistant>[d</s>]"
    ]
    with pytest.raises(BadRow, match="a tool call has thoughts, and the message"):
        messages_of([assistant("b", reasoning="hm"), call_of("f", reasoning="oh")], "x")
    with pytest.raises(BadRow, match="tool calls in its content and in tool_calls"):
        messages_of([assistant([{"type": "tool_call", "value": '{"name": "f"}'}], tool_calls=[CALL])], "x")


@pytest.mark.parametrize("call", [CALL["function"], json.dumps(CALL["function"])], ids=["object", "text"])
def test_a_function_call_beside_a_text_is_a_tool_call(call):
    assert messages_of([assistant("b", function_call=call)], "x") == [assistant("b", tool_calls=[CALL])]
    assert messages_of([assistant("b", function_call=" ")], "x") == [assistant("b")]
    with pytest.raises(BadRow, match=r"a tool call is 'f\(\)', expected a JSON object"):
        messages_of([assistant("b", function_call="f()")], "x")


# -- thoughts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": {"content": "hm"}},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm", "format": None}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "h"}, {"type": "reasoning.text", "text": "m"}]},
        {"thought": "hm"},
        {"thoughts": ["h", "m"], "thinking": []},
    ],
)
def test_thoughts_under_all_their_keys_are_read(thoughts):
    assert messages_of([assistant("b", **thoughts)], "x") == [assistant("b", reasoning_content="hm")]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "reasoning", "content": "hm"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": []},
    ],
    ids=["Mistral", "Anthropic", "content", "OpenAI"],
)
def test_thoughts_that_are_parts_are_read(part):
    content = [part, {"type": "text", "text": "b"}]
    assert messages_of([assistant(content)], "x") == [assistant("b", reasoning_content="hm")]
    with pytest.raises(BadRow, match="a message has different thoughts in reasoning and content"):
        messages_of([assistant(content, reasoning="oh")], "x")


def test_details_of_thoughts_that_are_readable_are_not_needed():
    details = [{"type": "reasoning.summary", "summary": "h"}, {"type": "reasoning.encrypted", "data": "x"}]
    message = messages_of([assistant("b", reasoning="hm", reasoning_details=details)], "x")[0]
    assert message == assistant("b", reasoning_content="hm")


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (assistant("b", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]), "keys ['data', 'type']"),
        (assistant("b", reasoning={"text": "x", "summary": "y"}), "keys ['summary', 'text']"),
        (assistant([{"type": "thinking", "thinking": [3]}]), "in 'content' are 3"),
        (assistant([{"type": "thinking", "data": "x"}]), "keys ['data', 'type']"),
        (assistant("b", thinking=True), "in 'thinking' are True"),
    ],
)
def test_thoughts_that_are_not_text_are_named(message, what):
    with pytest.raises(BadRow) as caught:
        messages_of([message], "x")
    assert what in str(caught.value)
    assert "expected text, or parts that have it in one of the keys text, thinking" in str(caught.value)


# -- what is not supported -------------------------------------------------------------------------------------


def test_spans_of_a_message_to_learn_are_an_error():
    spans = [{"begin_offset": 0, "end_offset": 0, "train": False}]
    message = reason(ConversationDataModule, {"messages": [user("a"), assistant("bc", train_detail=spans)]})
    assert "a message has train_detail, spans of its text to learn" in message
    assert read(ConversationDataModule, {"messages": [user("a"), assistant("bc", train_detail=[])]})
