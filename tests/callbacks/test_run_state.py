"""RunState: all random generators, the metrics, and a validation that was still to come."""

import io
import json
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from lightning_rlhf.callbacks import RunState
from lightning_rlhf.callbacks.run_state import random_state, restore_random_state


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        float(numpy.random.randn()),  # an odd number of these leaves one in store
        torch.rand(5).tolist(),
    )


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_generator_goes_on_where_it_was_also_behind_a_file_that_may_hold_no_code():
    random.gauss(0, 1)
    numpy.random.randn()
    draws()
    state = through_a_file(random_state())
    following = [draws() for _ in range(3)]
    assert [draws() for _ in range(3)] != following
    restore_random_state(state)
    assert [draws() for _ in range(3)] == following


def test_env_json_says_where_a_run_came_from(tmp_path):
    loop = SimpleNamespace()
    trainer = SimpleNamespace(
        is_global_zero=True, fast_dev_run=False, default_root_dir=str(tmp_path / "run"), fit_loop=loop
    )
    RunState().setup(trainer, None, "fit")
    told = json.loads((tmp_path / "run/env.json").read_text())
    assert told["packages"]["torch"] == torch.__version__
    assert told["command"]
    assert told["python"].startswith("3.")


def test_a_checkpoint_without_random_state_is_refused():
    with pytest.raises(ValueError, match="it was written without the RunState callback"):
        RunState().on_load_checkpoint(None, None, {"state_dict": {}})
