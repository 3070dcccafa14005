"""Parsers of vLLM: the accepted calls, and their process."""

import importlib.util
import os
import sys
import time
from functools import partial

import psutil
import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import ToolCall, VLLMToolCalls
from lightning_rlhf.extras.environments import vllm_parser

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def with_result(monkeypatch, *result, content="", error=None, name="hermes", **arguments):
    """Return a parser whose process returns the given result."""
    monkeypatch.setattr(VLLMToolCalls, "_run", lambda self, text, tokenizer: (content, list(result), error))
    return VLLMToolCalls(name, **arguments)


def test_calls_between_markers_are_accepted(monkeypatch):
    parse = with_result(monkeypatch, ("add", '{"a": 1}'), ("now", ""), content="so")
    assert parse("so" + 2 * HERMES, None).calls == (ToolCall("add", {"a": 1}), ToolCall("now", {}))
    assert parse("so" + 2 * HERMES, None).text == "so"
    parsed = parse(3 * HERMES, None)
    assert (parsed.calls, parsed.malformed) == ((), "2 of 3 calls could be read")


@pytest.mark.parametrize(
    "text",
    [
        HERMES[:-1], HERMES[:-12], "<tool_call>", "</tool_call>", HERMES + "<tool_call>", HERMES + "</tool_call>",
        "<tool_call>" + HERMES, "</tool_call>{}<tool_call>",
    ],
)  # fmt: skip
def test_missing_marker_is_not_accepted(monkeypatch, text):
    parsed = with_result(monkeypatch, ("add", "{}"), ("add", "{}"))(text, None)
    assert parsed.calls == ()
    assert parsed.malformed == "every <tool_call> must be followed by one </tool_call>"


def test_markers_of_the_parts_of_a_call_are_compared(monkeypatch):
    parse = with_result(monkeypatch, ("add", "{}"), name="qwen3_xml")
    assert parse(XML, None).malformed is None
    parsed = parse(XML.replace("</parameter>", ""), None)
    assert parsed.malformed == "every <parameter= must be followed by one </parameter>"
    assert parse("<function=add>\n</function>", None).calls == ()  # without the marker of a call it is a text


@pytest.mark.parametrize("arguments", ["[1]", "1", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "{", '{"a": 1e999}'])
def test_arguments_must_be_a_json_object(monkeypatch, arguments):
    parsed = with_result(monkeypatch, ("add", arguments))(HERMES, None)
    assert parsed.calls == ()
    assert parsed.malformed


def test_error_of_a_parser_makes_the_turn_malformed(monkeypatch):
    parsed = with_result(monkeypatch, error="KeyError: 'x'")(HERMES, None)
    assert (parsed.text, parsed.calls, parsed.malformed) == (HERMES, (), "KeyError: 'x'")


def test_turn_without_a_call_does_not_start_the_process(monkeypatch):
    monkeypatch.setattr(vllm_parser, "WorkerPool", None)
    assert VLLMToolCalls("hermes")("no call", None).text == "no call"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "llama3_json"}, "the markers of vLLM's parser 'llama3_json' are not known: set markers to the texts"),
        ({"name": "hermes", "markers": [["a"]]}, r"pairs of texts that are not empty, got \[\['a'\]\]"),
        ({"name": "hermes", "markers": [["a", ""]]}, "pairs of texts that are not empty"),
    ],
)
def test_markers_are_validated(arguments, message):
    with pytest.raises(ValueError, match=message):
        VLLMToolCalls(**arguments)


# -- vLLM -------------------------------------------------------------------------------------------------------------

real = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]


@pytest.fixture(scope="module")
def tokenizer():
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n<>|/_.[]{}\":,'=()"
    tokenizer = CharacterTokenizer(letters).load()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


@pytest.fixture
def loaded(tokenizer):
    """Create parsers and end their processes."""
    parsers = []

    def loaded(name, **arguments):
        parsers.append(VLLMToolCalls(name, **arguments))
        parsers[-1].check(tokenizer, [SCHEMA])
        return partial(parsers[-1], tokenizer=tokenizer)

    yield loaded
    for parser in parsers:
        parser.close()


@pytest.mark.parametrize(
    ("name", "call", "malformed"),
    [
        pytest.param("hermes", HERMES, ["{}", '{"name": "add", "arguments": [1]}', "{", "", '{"name": 1}'], marks=real),
        pytest.param("qwen3_xml", XML, ["", "{}", "<function=add>", "<function=add>\n<parameter=a>1"], marks=real),
    ],
)
def test_calls_in_a_format_of_vllm(loaded, name, call, malformed):
    """A truncated call is not accepted, nor is one that vLLM treats as text."""
    parse = loaded(name)
    assert "vllm.tool_parsers" not in sys.modules
    parsed = parse(f"see {call}")
    assert (parsed.text.strip(), parsed.calls) == ("see", (ToolCall("add", {"a": 1}),))
    assert parse(f"{call}\n{call}").calls == (ToolCall("add", {"a": 1}),) * 2
    for length in range(len(call)):
        parsed = parse(call[:length])
        assert parsed.calls == ()
        assert (parsed.malformed is not None) == (length >= len("<tool_call>"))
    for body in malformed:
        for text in (f"<tool_call>{body}</tool_call>", f"{call}<tool_call>{body}</tool_call>"):
            parsed = parse(text)
            assert (parsed.calls, bool(parsed.malformed)) == ((), True), text


@pytest.mark.parametrize("name", [pytest.param("pythonic", marks=real)])
def test_format_of_vllm_without_markers(loaded, name):
    """Malformed calls are texts, but truncated ones are not accepted."""
    parse, call = loaded(name), "[add(a=1), add(a=2, s='x')]"
    assert parse(call).calls == (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2, "s": "x"}))
    for text in (*(call[:length] for length in range(len(call))), "[add(a=f())]", f"{call} y", "[1]"):
        parsed = parse(text)
        assert (parsed.text, parsed.calls, parsed.malformed) == (text, (), None)


class Misbehaves:
    """A parser with vLLM's interface and a behaviour that the turn selects."""

    def __init__(self, tokenizer, tools):
        assert [tool.function.name for tool in tools] == ["add"]

    def extract_tool_calls(self, text, request):
        if "hang" in text:
            time.sleep(3600)
        if "die" in text:
            os._exit(3)
        if "raise" in text:
            raise KeyError("name")
        from types import SimpleNamespace

        calls = [SimpleNamespace(function=SimpleNamespace(name="add", arguments='{"a": 1}'))]
        return SimpleNamespace(content=None, tool_calls=calls if text else [])


@pytest.mark.parametrize("name", [pytest.param(f"{__name__}:Misbehaves", marks=real)])
def test_failing_or_hanging_parser_is_reported(loaded, monkeypatch, name):
    before = set(psutil.Process().children(recursive=True))
    parse = loaded(name, markers=[])
    monkeypatch.setattr(vllm_parser, "_PARSE_SECONDS", 1.0)
    assert parse("good").calls == (ToolCall("add", {"a": 1}),)
    assert parse("raise").malformed == "KeyError: 'name'"
    assert parse("hang").malformed == "the turn takes longer than 1 s to parse"
    assert parse("good").calls == (ToolCall("add", {"a": 1}),)
    with pytest.raises(RuntimeError, match=r"the process of vLLM's parser '.*' ended at the turn 'die'"):
        parse("die")
    assert parse("good").calls == (ToolCall("add", {"a": 1}),)
    parse.func.close()
    deadline = time.monotonic() + 10
    while left := [child for child in psutil.Process().children(recursive=True) if child not in before]:
        if len(left) == 1 and "resource_tracker" in " ".join(left[0].cmdline()):
            break
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("name", [pytest.param("none_such", marks=real)])
def test_unknown_parser_is_rejected(loaded, name):
    with pytest.raises(ValueError, match=r"vLLM's parser 'none_such' cannot be used: KeyError: .*not found"):
        loaded(name, markers=[])
