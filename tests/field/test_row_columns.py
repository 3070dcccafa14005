"""Columns beside the messages of a row are read, or named with the line that leaves them out."""

import json

import pytest

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from tests.field.test_chat_data import TOOL, assistant, read, reason, user

TALK = {"messages": [user("a"), assistant("b")]}
PROMPT = {"prompt": [user("a")]}


def leave_out(name):
    return f"to leave it out, set data.init_args.columns: {{{name}: null}}"


@pytest.mark.parametrize("tools", ["", "  ", None, "[]"])
def test_blank_tools_are_no_tools(tools):
    assert read(ConversationDataModule, {**TALK, "tools": tools})[1] == ["<user>a</s>\n<assistant>[b</s>]"]


@pytest.mark.parametrize(
    ("tools", "what"), [("{", "tools is not valid JSON"), (3, "tools must be a list of JSON schemas of tools")]
)
def test_tools_of_another_form_are_named_with_the_remedy(tools, what):
    message = reason(ConversationDataModule, {**TALK, "tools": tools})
    assert what in message
    assert leave_out("tools") in message


@pytest.mark.parametrize("functions", [["def f(): pass"], [{"code": "f()"}], "weather", [], 3])
def test_functions_that_are_no_schemas_are_an_ordinary_column(functions):
    module, texts = read(PromptDataModule, {**PROMPT, "functions": functions})
    assert texts == ["<user>a</s>\n<assistant>"]
    assert module.examples["train"][0].columns["functions"] == functions
    assert list(module.reports["train"].unread) == ["functions"] * bool(functions)
    assert read(PromptDataModule, {**PROMPT, "functions": functions, "tools": [TOOL]})[1][0].startswith("<tools>")


@pytest.mark.parametrize("write", [lambda tools: tools, json.dumps, lambda tools: list(map(json.dumps, tools))])
def test_functions_that_are_schemas_are_tools(write):
    row = {**PROMPT, "functions": write([TOOL["function"]])}
    assert read(PromptDataModule, row)[1][0].startswith(f"<tools>{json.dumps([TOOL])}")


def test_a_column_that_is_set_as_tools_must_have_them():
    message = reason(PromptDataModule, {**PROMPT, "functions": ["def f()"]}, columns={"tools": "functions"})
    assert f"functions is not valid JSON: Expecting value; {leave_out('tools')}" in message


def test_a_history_of_another_form_is_named_with_the_remedy():
    message = reason(PromptDataModule, {**PROMPT, "history": "patient"})
    assert "column 'history' must be a list of pairs of a question and an answer" in message
    assert leave_out("history") in message
    assert read(PromptDataModule, {**PROMPT, "history": "patient"}, columns={"history": None})
    mapped = reason(PromptDataModule, {**PROMPT, "past": "patient"}, columns={"history": "past"})
    assert "column 'past' must be" in mapped
    assert leave_out("history") in mapped
    assert read(PromptDataModule, {**PROMPT, "history": " "})[1] == ["<user>a</s>\n<assistant>"]


@pytest.mark.parametrize("system", [["S"], 3, {"content": "S"}])
@pytest.mark.parametrize("kind", [ConversationDataModule, PromptDataModule])
def test_a_system_message_that_is_not_text_is_an_error(kind, system):
    message = reason(kind, {**TALK, "system": system})
    assert f"column 'system' holds {type(system).__name__}, expected the text of the system message" in message
    assert leave_out("system") in message
    assert read(kind, {**TALK, "system": system}, columns={"system": None})
    assert read(kind, {**TALK, "system": []})[1][0].startswith("<user>a")


@pytest.mark.parametrize("options", [{}, {"as_messages": True}], ids=["text", "as message"])
@pytest.mark.parametrize("prompt", ["a ", "\na", "a"])
def test_white_space_around_a_prompt_does_not_make_another_question(prompt, options):
    pair = {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}
    texts = read(PreferenceDataModule, {"prompt": prompt, **pair}, **options)[1]
    assert texts == ["<user>a</s>\n<assistant>[b</s>]", "<user>a</s>\n<assistant>[c</s>]"]
    assert read(ConversationDataModule, {"prompt": prompt, "messages": pair["chosen"]}, **options)
    assert "do not begin with it" in reason(PreferenceDataModule, {"prompt": "x", **pair})


# -- nested columns --------------------------------------------------------------------------------------------

NESTED = {"input": {"messages": [user("a")], "tools": [TOOL], "parallel_tool_calls": True}, "source": "x"}
NESTED |= {"preferred_output": [assistant("b")], "non_preferred_output": [assistant("c")]}
OF_OPENAI = {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}


def test_tools_beside_nested_messages_are_read_and_their_siblings_are_named():
    module, texts = read(PreferenceDataModule, NESTED, columns=OF_OPENAI)
    assert texts[0].startswith(f"<tools>{json.dumps([TOOL])}\n<user>a</s>")
    assert "tools <- input.tools" in next(iter(module.reports["train"].column_mappings))
    assert list(module.reports["train"].unread) == ["source", "input.parallel_tool_calls"]


def test_nested_tools_that_are_left_out_or_no_schemas_are_named():
    for tools, columns in (([TOOL], {"input.tools": None}), (["hammer"], {})):
        row = {**NESTED, "input": {**NESTED["input"], "tools": tools}}
        module, texts = read(PreferenceDataModule, row, columns=OF_OPENAI | columns)
        assert texts[0].startswith("<user>a</s>")
        assert "input.tools" in module.reports["train"].unread


def test_siblings_of_deeper_columns_are_named_once():
    row = {"a": {"b": {"question": "q", "c": 1}, "d": 2, "e": None}, "completion": "x", "extra_info": {"f": 1, "g": 2}}
    columns = {"prompt": "a.b.question", "ground_truth": "extra_info.f"}
    assert list(read(ConversationDataModule, row, columns=columns)[0].reports["train"].unread) == [
        "extra_info", "a.d", "a.b.c",
    ]  # fmt: skip
    module, _ = read(PromptDataModule, row, columns=columns)
    assert list(module.reports["train"].unread) == ["completion", "a.d", "a.b.c"]
    verl = {**PROMPT, "reward_model": {"style": "rule", "ground_truth": "3"}}
    assert list(read(PromptDataModule, verl)[0].reports["train"].unread) == []
