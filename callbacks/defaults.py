"""The callbacks every run wants, and the order in which all of them take their turn."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint

from .console import Console
from .hf_export import HFExport
from .metrics_csv import MetricsCSV
from .report import Report
from .rollout_loop import RolloutLoop
from .run_state import RunState
from .throughput import Throughput


def complete(callbacks: Sequence[Callback]) -> list[Callback]:
    """Given callbacks and the missing defaults, in order; one of a default's class or a subclass replaces it.

    The clock starts before the rollout, whatever measures comes before whatever writes, and a checkpoint is taken when
    all else of its step is on disk.

    Args:
        callbacks: of the Trainer.
    """
    defaults = (Throughput, Console, MetricsCSV, RunState, HFExport)
    missing = [default() for default in defaults if not any(isinstance(callback, default) for callback in callbacks)]
    order = (Throughput, Console, RolloutLoop, Callback, MetricsCSV, RunState, HFExport, Report, Checkpoint)

    def turn(callback: Callback) -> int:
        named = [place for place, kind in enumerate(order) if kind is not Callback and isinstance(callback, kind)]
        return named[0] if named else order.index(Callback)

    return sorted([*callbacks, *missing], key=turn)
