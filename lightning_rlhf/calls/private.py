"""Private copies of what code of users receives, so that a change of its arguments reaches nothing else."""

from __future__ import annotations

import copy
import datetime
import decimal
from types import MappingProxyType
from typing import Any

_SCALARS = {str, int, float, bool, type(None)}
_IMMUTABLE = (str, bytes, int, float, complex, type(None), datetime.date, datetime.timedelta, decimal.Decimal, range)


def private(value: Any, objects: bool = True) -> Any:
    """Return a copy of a value that shares no mutable part with it.

    Each entry of a list is copied on its own: two entries that are one object become two. A read-only view of a
    mapping becomes a dictionary. Frozen dataclasses, functions, classes, and objects
    that cannot be copied stay as they are.

    Args:
        value: value of a row: text, numbers, lists, mappings, images, arrays.
        objects: whether other objects than lists, tuples, sets and mappings are copied too.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    kind = type(value)
    if kind is list:
        return [item if type(item) in _SCALARS else private(item, objects) for item in value]
    if kind in (dict, MappingProxyType):
        return {key: item if type(item) in _SCALARS else private(item, objects) for key, item in value.items()}
    if kind is tuple:
        return tuple(private(item, objects) for item in value)
    if kind is set:
        return set(value)
    parameters = getattr(kind, "__dataclass_params__", None)
    if not objects or callable(value) or (parameters is not None and parameters.frozen):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error):  # such as a lock or a module, which has no copy
        return value
