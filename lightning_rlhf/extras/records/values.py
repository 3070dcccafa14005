"""Values of the files of a run, which may be damaged, as plain JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from lightning_rlhf.expected_errors import UsageError

_DEEPEST = 50  # levels of nested lists and mappings in a file; more than this is not from a run


def finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None, also in nested lists and mappings, whose names become texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [part if type(part) in (bool, int, str) else finite(part) for part in value]
    return value


def as_json(value: Any) -> str:
    """Return valid JSON: NaN and infinite numbers become null, halves of surrogate pairs question marks."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "replace").decode()


def parsed(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        UsageError: it is nested more than 50 levels deep.
        ValueError: the text is not JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise UsageError("nested too deeply") from error
    if _is_deeper(value, _DEEPEST):
        raise UsageError(f"nested more than {_DEEPEST} levels deep")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(isinstance(part, dict | list) and _is_deeper(part, levels - 1) for part in parts)


def number(value: Any) -> float | None:
    """Convert a number of a file; None for values that are not finite numbers."""
    try:
        converted = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        return None
    return converted if math.isfinite(converted) else None


def rounded(value: float | None) -> float | None:
    """Return a number with six digits; None for None."""
    return None if value is None else float(f"{value:.6g}")
