"""FrozenHeap: what exists at the start is not collected during training, what training leaves is, and a run can end."""

import gc
import weakref

import pytest
from lightning.pytorch import Callback

from lightning_rlhf.extras.frozen_heap.callback import FrozenHeap


class Ring:
    """Garbage that only the collector can free."""

    def __init__(self):
        self.ring = self


class Leaves(Callback):
    """Leaves garbage in the first step, and collects it or fails in the second."""

    def __init__(self, fails=False):
        self.fails = fails
        self.frozen = 0
        self.is_freed = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.left = weakref.ref(Ring())
            return
        gc.collect()
        self.frozen, self.is_freed = gc.get_freeze_count(), self.left() is None
        if self.fails:
            raise RuntimeError("failed")


@pytest.fixture(autouse=True)
def _nothing_is_frozen():
    """Undo what the suite froze for its own speed, and freeze again."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_objects_are_frozen_until_the_run_ends_or_fails(run, fails):
    leaves = Leaves(fails)
    made = run(callbacks=[FrozenHeap(), leaves], trainer={"max_steps": 2})
    if fails:
        with pytest.raises(RuntimeError, match="failed"):
            made.fit()
    else:
        made.fit()
    assert leaves.frozen > 10_000
    assert leaves.is_freed
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_froze_stay_frozen(run):
    gc.freeze()
    run(callbacks=[FrozenHeap()]).fit()
    assert gc.get_freeze_count() > 0


def test_module_of_an_ended_run_can_be_freed(run):
    made = run(callbacks=[FrozenHeap()])
    made.fit()
    module = weakref.ref(made.module)
    made.trainer = made.module = made.loop = made = None
    gc.collect()
    assert module() is None
