"""Parsers of tool calls of vLLM, in a worker process: their import loads vLLM."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.calls.guard import begin_call, prepare_worker
from lightning_rlhf.calls.references import load_function
from lightning_rlhf.calls.workers import WorkerPool, lost_call
from lightning_rlhf.environments.parsing import ParsedTurn, ToolCallParser
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.environments.parsers import STRICT_JSON, call_of

_LOAD_SECONDS = 600.0  # for the import of vLLM
_PARSE_SECONDS = 10.0  # for a turn
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_QWEN_XML = (_TOOL_CALL, ("<function=", "</function>"), ("<parameter=", "</parameter>"))
_MARKERS: dict[str, Sequence[tuple[str, str]]] = {
    "hermes": [_TOOL_CALL], "qwen3_json": [_TOOL_CALL], "qwen3_xml": _QWEN_XML, "qwen3_coder": _QWEN_XML,
    "pythonic": [],
}  # fmt: skip
_given: dict[str, Any] = {}  # arguments of the parser in this worker process


class VLLMToolCalls(ToolCallParser):
    """Finds calls with a parser of vLLM, in a worker process that is killed if it takes too long.

    vLLM's parsers accept calls that are cut off, or treat malformed calls as text. Therefore the markers are compared
    first. If one is missing, or if the parser finds fewer calls than markers, the turn is malformed. Types of arguments
    in XML come from the environment's tools.

    The process loads vLLM. It needs about 0.5 GB of memory on each rank, and takes 10 to 40 s to start on two CPU
    cores. A turn takes 1 to 2 ms.

    Args:
        name: name of the parser in vLLM, such as ``hermes``, or reference ``module:Class`` of a class like those.
        markers: texts before and after each call and each of its parts, the call first. Give an empty list if the
            format uses none. A malformed call is then a text, which ends the conversation with ``Tools``. None works
            for hermes, qwen3_json, qwen3_xml, qwen3_coder and pythonic (which uses none).
    """

    def __init__(self, name: str, markers: Sequence[tuple[str, str]] | None = None) -> None:
        if markers is None and name not in _MARKERS:
            raise UsageError(
                f"the markers of vLLM's parser {name!r} are not known: set markers to the texts before and after a "
                f"call, such as [['<tool_call>', '</tool_call>']], or to [] if its calls have none"
            )
        self._name = name
        self._markers = [tuple(pair) for pair in (_MARKERS[name] if markers is None else markers)]
        if not all(len(pair) == 2 and all(pair) for pair in self._markers):
            raise UsageError(f"markers of tool calls are pairs of texts that are not empty, got {markers!r}")
        self._tools: list[dict[str, Any]] = []
        self._pool: WorkerPool | None = None
        self._is_loaded = False

    def check(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Load the parser in its process, which takes as long as an import of vLLM."""
        self.close()
        self._tools = [dict(tool) for tool in tools]
        *_, error = self._run("", tokenizer)
        if error is not None:
            raise UsageError(f"vLLM's parser {self._name!r} cannot parse an empty turn: {error}")

    @override
    def __call__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> ParsedTurn:
        malformed = self._unbalanced(text)
        if malformed is not None or (self._markers and self._markers[0][0] not in text):
            return ParsedTurn(text, malformed=malformed)
        content, results, malformed = self._run(text, tokenizer)
        try:
            calls = [call_of({"name": n, "arguments": json.loads(a or "{}", **STRICT_JSON)}) for n, a in results]
        except (ValueError, RecursionError) as error:
            return ParsedTurn(text, malformed=str(error))
        if self._markers and malformed is None and len(calls) < text.count(self._markers[0][0]):
            malformed = f"{len(calls)} of {text.count(self._markers[0][0])} calls could be read"
        if malformed:
            return ParsedTurn(text, malformed=malformed)
        return ParsedTurn(content, tuple(calls))

    def _unbalanced(self, text: str) -> str | None:
        """Describe a marker without its counterpart; None if every marker has one."""
        for start, end in self._markers:
            markers = re.findall(f"{re.escape(start)}|{re.escape(end)}", text)
            if markers != [start, end] * (len(markers) // 2):
                return f"every {start} must be followed by one {end}"
        return None

    def _run(self, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[str, str]], str | None]:
        """Return the text without calls, the names and arguments of the calls, and the parser's error, if any."""
        if self._pool is None:
            self._pool = WorkerPool(1, _initialize, self._name, tokenizer, self._tools)
        limit = _PARSE_SECONDS if self._is_loaded else _LOAD_SECONDS
        future = self._pool.schedule(_parse, text, timeout_s=limit)
        error = future.exception()
        if error is None:
            self._is_loaded = True
            return (*future.result(), None)
        lost = lost_call(error, limit)
        self._is_loaded = lost is None or lost.kind != "timeout"  # its process was killed
        if lost is not None and lost.kind == "timeout":
            return text, [], f"the turn takes longer than {limit:g} s to parse"
        if isinstance(error, UsageError):
            raise error
        if lost is not None:
            self.close()
            raise RunError(f"the process of vLLM's parser {self._name!r} ended at the turn {text[:200]!r}") from error
        return text, [], f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Kill the process; it starts again when it is needed."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._is_loaded = None, False


# -- the following runs in the worker process --------------------------------------------------------------------------


def _initialize(name: str, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]]) -> None:
    prepare_worker()
    _given.update(name=name, tokenizer=tokenizer, tools=tools)


def _parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a turn without calls, and the names and arguments of the calls."""
    begin_call()
    try:
        parser_class, request = _load()
        parser = parser_class(_given["tokenizer"], request.tools)  # contains the state of one turn
    except Exception as error:  # of an import, of an unknown name, of a tokenizer without the parser's markers
        raise UsageError(f"vLLM's parser {_given['name']!r} cannot be used: {type(error).__name__}: {error}") from error
    result = parser.extract_tool_calls(text, request)
    return result.content or "", [(call.function.name, call.function.arguments) for call in result.tool_calls]


@lru_cache
def _load() -> tuple[Any, Any]:
    """Return the class of the parser, and a request with the schemas of the tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # parsers log a traceback for each malformed call
    name, tools = _given["name"], _given["tools"]
    is_reference = "." in name or ":" in name
    parser_class = load_function(name) if is_reference else ToolParserManager.get_tool_parser(name)
    return parser_class, ChatCompletionRequest(model="policy", messages=[], **({"tools": tools} if tools else {}))
