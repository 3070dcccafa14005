"""A type checker for jaxtyping that checks tensors only, so that tests may pass wrong values of other types."""

import contextlib
import contextvars
import functools
import inspect
import typing

from jaxtyping import AbstractArray
from torch import Tensor


def _of_tensors(annotation):
    """Return the annotations of shapes in an annotation and its unions."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return [annotation]
    is_container = typing.get_origin(annotation) in (dict, list, tuple)
    return [] if is_container else [kind for each in typing.get_args(annotation) for kind in _of_tensors(each)]


_is_on = contextvars.ContextVar("_is_on", default=True)


@contextlib.contextmanager
def unchecked():
    """Pass tensors of wrong shapes and dtypes, to test what the function itself says."""
    token = _is_on.set(False)
    try:
        yield
    finally:
        _is_on.reset(token)


def _check(name, value, allowed):
    if allowed and isinstance(value, Tensor) and not any(isinstance(value, kind) for kind in allowed):
        raise TypeError(f"{name} is {value.dtype} of shape {tuple(value.shape)}, expected {allowed}")


def check_tensors(function):
    """Wrap a function to raise TypeError for a tensor whose shape or dtype is not that of its annotation."""
    signature = inspect.signature(function)
    if any(isinstance(parameter.annotation, str) for parameter in signature.parameters.values()):
        signature = inspect.signature(function, eval_str=True)
    kinds = {name: _of_tensors(parameter.annotation) for name, parameter in signature.parameters.items()}
    results = _of_tensors(signature.return_annotation)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        if not _is_on.get():
            return function(*args, **kwargs)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            _check(name, value, kinds[name])
        result = function(*args, **kwargs)
        _check("the result", result, results)
        return result

    return checked
