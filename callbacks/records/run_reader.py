"""Base classes of callbacks whose place among the others matters."""

from __future__ import annotations

from lightning.pytorch import Callback


class RunPrinter(Callback):
    """A callback that prints what a run does. It precedes RolloutLoop, and so describes a run before it begins."""


class RunMeter(Callback):
    """A callback that measures steps. It precedes RolloutLoop, and so measures generation too."""


class RunWriter(Callback):
    """A callback that writes what the others measured. It precedes those that read it."""


class RunReader(Callback):
    """A callback that reads what the other callbacks wrote.

    It follows them at each hook. Its ``on_exception`` is called also where a signal ends the run without Lightning's.

    Attributes:
        prints_comparison: whether it prints the first and the last validation, so that a RunPrinter does not.
    """

    prints_comparison = False
