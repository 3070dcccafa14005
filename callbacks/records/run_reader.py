"""The base class of callbacks that read what the others wrote."""

from __future__ import annotations

from lightning.pytorch import Callback


class RunReader(Callback):
    """A callback that reads what the other callbacks wrote.

    It follows them at each hook. Its ``on_exception`` is called also where a signal ends the run without Lightning's.

    Attributes:
        prints_comparison: whether it prints the first and the last validation, so that Console does not.
    """

    prints_comparison = False
