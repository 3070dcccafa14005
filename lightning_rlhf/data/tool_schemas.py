"""JSON schemas of Python functions, which chat templates render as the tools of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.references import load_function


def tool_schemas(functions: Sequence[str | Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of functions.

    Args:
        functions: functions, or their references ``file.py:name`` or ``module:name``. Type hints and a docstring in
            Google style with an ``Args`` section describe the arguments.

    Raises:
        ValueError: a function has no docstring, or an argument has no type hint or no description.
    """
    schemas = []
    for function in functions:
        loaded = load_function(function) if isinstance(function, str) else function
        try:
            schemas.append(get_json_schema(loaded))
        except (DocstringParsingException, TypeHintParsingException) as error:
            name = getattr(loaded, "__name__", repr(loaded))
            raise UsageError(f"the tool {name} has no schema for the chat template: {error}") from error
    return schemas
