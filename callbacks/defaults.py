"""The callbacks every run wants, and the order in which all of them take their turn."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from .checkpoint import RunCheckpoint
from .console import Console
from .graceful_shutdown import GracefulShutdown
from .hf_export import HFExport
from .metrics_csv import MetricsCSV
from .report import Report
from .rollout_loop import RolloutLoop
from .run_state import RunState
from .throughput import Throughput


def complete(callbacks: Sequence[Callback]) -> list[Callback]:
    """Add the missing default callbacks and sort; a callback of a default's class or a subclass replaces it.

    Signals come first, the clock starts before the rollout, callbacks that measure come before those that write, and a
    checkpoint is taken when all else of its step is on disk. Where no checkpoint is configured, Lightning adds one that
    keeps the end of each epoch; in its place the state is kept every hundred steps and at the end.

    Args:
        callbacks: callbacks of the Trainer.
    """
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(checkpoints) == 1 and _lightnings_own(checkpoints[0]):
        rest = [callback for callback in callbacks if callback is not checkpoints[0]]
        callbacks = [*rest, RunCheckpoint(every_n_steps=100)]
    defaults = (GracefulShutdown, Throughput, Console, MetricsCSV, RunState, HFExport)
    missing = [default() for default in defaults if not any(isinstance(callback, default) for callback in callbacks)]
    first = (GracefulShutdown, Throughput, Console, RolloutLoop)
    order = (*first, Callback, MetricsCSV, RunState, HFExport, Report, Checkpoint)

    def turn(callback: Callback) -> int:
        turns = [turn for turn, kind in enumerate(order) if kind is not Callback and isinstance(callback, kind)]
        return turns[0] if turns else order.index(Callback)

    return sorted([*callbacks, *missing], key=turn)


def _lightnings_own(callback: Callback) -> bool:
    if type(callback) is not ModelCheckpoint:
        return False
    return callback.state_key == ModelCheckpoint().state_key and callback.dirpath is None and callback.filename is None
