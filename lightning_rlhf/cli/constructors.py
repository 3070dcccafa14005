"""Errors of the constructors of a configuration's classes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightning_rlhf.cli.config_files import check_classes
from lightning_rlhf.cli.errors import CLIError, one_line
from lightning_rlhf.cli.parser import condense
from lightning_rlhf.compat import is_lightning_error, is_raised_in
from lightning_rlhf.expected_errors import ExpectedError


@contextmanager
def constructor_errors(parser: LightningArgumentParser, shows_cause: bool = True) -> Iterator[None]:
    """Turn errors of constructors that a parser calls into a :class:`CLIError`.

    Args:
        parser: parser whose constructors are called in the context.
        shows_cause: whether to print the traceback of an error that is neither an expected error nor one of Lightning:
            it may be a bug in a user's class.
    """
    raised: list[Exception] = []

    def instantiate(constructor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return constructor(*args, **kwargs)
        except Exception as error:
            raised.append(error)
            if isinstance(constructor, type) and issubclass(constructor, Logger) and _is_lightnings(constructor):
                message = f"trainer.logger: {constructor.__name__} cannot be created: {one_line(error)}"
                raised.append(CLIError(message))
                raise raised[-1] from error
            raise

    parser.add_instantiator(instantiate, object)
    try:
        yield
    except Exception as error:
        origin = _origin(error, raised)
        if is_raised_in(origin, "jsonargparse."):
            raise CLIError(condense(str(error))) from error
        is_told = is_lightning_error(origin) or is_raised_in(origin, "lightning.fabric.accelerators.")
        if shows_cause and not isinstance(origin, ExpectedError) and not is_told:
            traceback.print_exception(origin)
        raise CLIError(one_line(origin)) from error


def make(config: Namespace, key: str, base: type, shows_cause: bool = True) -> Any:
    """Return the object of a section of a parsed configuration.

    Args:
        config: parsed configuration.
        key: name of the section, such as ``model``.
        base: base class of its object.
        shows_cause: whether an error of a user's class is printed with its traceback.

    Raises:
        CLIError: its constructor fails, or a ``class_path`` in it names no class.
    """
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(base, key, subclass_mode=True)
    with constructor_errors(parser, shows_cause):
        check_classes({"trainer.callbacks" if base is Callback else key: config[key]})
        return parser.instantiate_classes(Namespace({key: config[key]}))[key]


def failures(config: Namespace, bases: Mapping[str, type]) -> list[str]:
    """Return the messages of the constructors that fail: those of sections, and those of callbacks.

    Args:
        config: parsed configuration.
        bases: base class of the object of each section.
    """
    callbacks = config["trainer"].get("callbacks") or []
    parts = [(config, key, base) for key, base in bases.items()]
    parts += [
        (Namespace(callback=callback), "callback", Callback)
        for callback in callbacks
        if isinstance(callback, Namespace)
    ]
    messages = []
    for part in parts:
        try:
            make(*part, shows_cause=False)
        except CLIError as error:
            messages.append(str(error))
    return list(dict.fromkeys(messages))


def _origin(error: BaseException, raised: list[Exception]) -> BaseException:
    """Return a constructor's error, which jsonargparse replaces by an error with the messages of all alternatives."""
    origin = error
    while is_raised_in(origin, "jsonargparse.") and origin.__cause__ is not None:
        origin = origin.__cause__
    if not is_raised_in(origin, "jsonargparse."):
        return origin
    named = [candidate for candidate in reversed(raised) if str(candidate) in str(error)]
    # An alternative may fail only because it has other arguments than those of the class that was meant.
    named.sort(key=lambda candidate: not isinstance(candidate, ExpectedError))
    return named[0] if named else origin


def _is_lightnings(constructor: type) -> bool:
    return constructor.__module__.startswith("lightning.")
