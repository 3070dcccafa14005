"""Errors of the constructors of a configuration's classes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightning_rlhf.cli.errors import CLIError, one_line
from lightning_rlhf.cli.parser import condense
from lightning_rlhf.compat import is_lightning_error, is_raised_in
from lightning_rlhf.expected_errors import ExpectedError


@contextmanager
def constructor_errors(parser: LightningArgumentParser) -> Iterator[None]:
    """Turn errors of constructors that a parser calls into a :class:`CLIError`.

    The traceback of an error that is neither an expected error nor one of Lightning is printed: it may be a bug in a
    user's class.
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
        if not isinstance(origin, ExpectedError) and not is_lightning_error(origin):
            traceback.print_exception(origin)
        raise CLIError(one_line(origin)) from error


def _origin(error: BaseException, raised: list[Exception]) -> BaseException:
    """Return a constructor's error, which jsonargparse replaces by an error with the messages of all alternatives."""
    origin = error
    while is_raised_in(origin, "jsonargparse.") and origin.__cause__ is not None:
        origin = origin.__cause__
    if not is_raised_in(origin, "jsonargparse."):
        return origin
    return next((candidate for candidate in reversed(raised) if str(candidate) in str(error)), origin)


def _is_lightnings(constructor: type) -> bool:
    return constructor.__module__.startswith("lightning.")
