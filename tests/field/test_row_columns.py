"""Columns beside the messages of a row are read, or named with the line that leaves them out."""

import json

import pytest

from lightning_rlhf.data.conversations import ConversationDataModule
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
