"""Tool calls in turns: accepted formats, and mistakes reported to the policy."""

import json
import re

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import FunctionToolCalls, JSONToolCalls, MarkedToolCalls, TokenizerToolCalls, ToolCall
from lightning_rlhf.extras.environments.parsers import call_of

PARSE = JSONToolCalls()


def calls(*bodies):
    return "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def test_text_and_calls_are_separated():
    first, second = '{"name": "add", "arguments": {"a": 1}}', '{"name": "list", "arguments": {}, "id": "c1"}'
    parsed = PARSE(f"let me see {calls(first, second)} now", None)
    assert parsed.text == "let me see  now"
    assert parsed.calls == (ToolCall("add", {"a": 1}), ToolCall("list", {}, "c1"))
    assert parsed.malformed is None
    assert PARSE("no call", None).calls == ()


MALFORMED = [
    "", " ", "{", "}", "[]", "null", "1", '"add"', "add(1)", "{'name': 'add'}", '{"name": 1, "arguments": {}}',
    '{"name": null}', '{"arguments": {}}', '{"name": "a", "arguments": []}', '{"name": "a", "arguments": "x"}',
    '{"name": "a", "arguments": null}', '{"name": "a", "parameters": {}}', '{"name": "a", "arguments": {}, "x": 1}',
    '{"name": "a", "arguments": {}} trailing', '{"name": "a", "arguments": {"x": NaN}}',
    '{"name": "a", "arguments": {"x": Infinity}}', '{"name": "a", "arguments": {"x": 1e999}}',
    '{"name": "a", "name": "b", "arguments": {}}',
    '{"name": "a", "arguments": {"x": 1, "x": 2}}', '{"name": "a", "arguments": {},}', 
    "{\"name\": \"a\", \"arguments\": {'x': 1}}",
    '{"name": "a", "arguments": {}}{"name": "b", "arguments": {}}', '[{"name": "a", "arguments": {}}]',
    '{"name": "a" "arguments": {}}', '{name: "a", arguments: {}}', '{"name": "a", "arguments": {"x": 01}}',
    '{"name": "a", "arguments": {"x": .5}}', "true", "<tool_call>", "[" * 100_000, '{"a":' * 100_000,
    '{"name": "a", "arguments": {"x": "\n"}}', "print('x')", "```json\n{}\n```", "\\u007b\\u007d", '{"NAME": "a"}',
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_calls_are_not_accepted(number):
    good = '{"name": "add", "arguments": {}}'
    for text in (calls(MALFORMED[number]), calls(good, MALFORMED[number]), calls(MALFORMED[number], good)):
        parsed = PARSE(text, None)
        assert parsed.calls == ()
        assert parsed.malformed.startswith("call ")


def test_truncated_call_is_not_accepted():
    body = '<tool_call>{"name": "add", "arguments": {"a": 1}}'
    assert PARSE(body, None).malformed == "call 1 has no </tool_call>"
    assert JSONToolCalls(end_optional=True)(body, None).calls == (ToolCall("add", {"a": 1}),)
    for length in range(len("<tool_call>"), len(body)):
        assert JSONToolCalls(end_optional=True)(body[:length], None).malformed


def test_marker_texts_in_values_are_kept():
    value = {"name": "say", "arguments": {"text": "<tool>x</tool>"}}
    assert PARSE(calls(json.dumps(value)), None).calls == (ToolCall("say", {"text": "<tool>x</tool>"}),)


def test_marked_calls_of_small_models_are_parsed():
    parse = MarkedToolCalls("calculate", "sum", start="[", end="]")
    assert parse("a[1+2]b[3+4", None).calls == (
        ToolCall("calculate", {"sum": "1+2"}),
        ToolCall("calculate", {"sum": "3+4"}),
    )
    assert parse("12", None).text == "12"


def test_calls_in_the_format_of_a_tokenizer_are_parsed():
    tokenizer = CharacterTokenizer("ab").load()
    parse = TokenizerToolCalls()
    with pytest.raises(ValueError, match="TokenizerToolCalls reads tool calls with the tokenizer's response_template"):
        parse.check(tokenizer)
    tokenizer.response_template = {
        "start_anchor": "assistant:",
        "fields": {
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
            "content": {"content": "text"},
        },
    }
    parse.check(tokenizer)
    parsed = parse("see " + calls('{"name": "add", "arguments": {"a": 1}}'), tokenizer)
    assert parsed.calls == (ToolCall("add", {"a": 1}),)
    assert parsed.text.strip() == "see"
    assert parse("no call", tokenizer).calls == ()
    assert parse(calls("{"), tokenizer).malformed


def find(text):
    """Find calls in lines ``!name {...}``; some turns make it fail."""
    if "refuse" in text:
        raise ValueError("calls must not be refused")
    if "broken" in text:
        raise KeyError("name")
    if "strings" in text:
        return ["add"]
    calls = re.findall(r"^!(\w+) (.*)$", text, re.MULTILINE)
    return [{"name": name, "arguments": json.loads(body)} for name, body in calls]


def find_and_cut(text, tokenizer):
    assert tokenizer == "tokenizer"
    first, _, name = text.partition("!")
    return first.strip(), [ToolCall(name, {})] if name else []


def test_calls_found_by_a_function(tmp_path):
    parse = FunctionToolCalls(find)
    parsed = parse('see\n!add {"a": 1}\n!list {}', None)
    assert parsed.calls == (ToolCall("add", {"a": 1}), ToolCall("list", {}))
    assert parsed.text == 'see\n!add {"a": 1}\n!list {}'
    assert parse("no call", None).calls == ()
    assert parse("refuse", None).malformed == "calls must not be refused"
    assert parse('!add {"a": }', None).malformed.startswith("Expecting value")
    assert parse("!add " + "[" * 100_000, None).malformed.startswith("maximum recursion depth")
    parsed = parse("!add {}\n!add 1", None)
    assert (parsed.calls, parsed.malformed) == ((), "'arguments' must be an object, got int")
    parsed = FunctionToolCalls(f"{__name__}:find_and_cut")("see !add", "tokenizer")
    assert (parsed.text, parsed.calls) == ("see", (ToolCall("add", {}),))
    (tmp_path / "own.py").write_text("def parse(text, tokenizer=None, strict=True):\n    return []\n")
    assert FunctionToolCalls(f"{tmp_path}/own.py:parse")("x", None).calls == ()


def test_failing_function_ends_the_run():
    with pytest.raises(RuntimeError, match=r"raised KeyError: 'name', for the turn 'broken'; it must raise ValueError"):
        FunctionToolCalls(find)("broken", None)
    with pytest.raises(ValueError, match=r"returned \['add'\], expected a list of calls"):
        FunctionToolCalls(find)("strings", None)


@pytest.mark.parametrize("result", [None, "x", {}, [1], (1, []), ("x", ()), ("x", [], 1)])
def test_function_with_a_wrong_result_ends_the_run(result):
    with pytest.raises(ValueError, match="expected a list of calls, each a ToolCall or a dictionary, or a tuple"):
        FunctionToolCalls(lambda text: result)("turn", None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda turn: [], "needs 'turn', but only text, tokenizer are passed"),
        ("no_such_file.py:parse", "file not found: no_such_file.py"),
        (f"{__name__}:fint", "did you mean 'find'"),
    ],
)
def test_function_is_validated_before_the_run(function, message):
    with pytest.raises(ValueError, match=message):
        FunctionToolCalls(function)


def test_markers_must_not_be_empty():
    with pytest.raises(ValueError, match="must not be empty"):
        JSONToolCalls(start="")


def test_call_without_arguments():
    assert call_of({"name": "now"}) == ToolCall("now", {})
