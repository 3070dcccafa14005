"""RunState: all random generators, the metrics, and a validation that was still pending."""

import io
import json
import random
from importlib.metadata import version
from types import SimpleNamespace

import numpy
import pytest
import torch

from lightning_rlhf import RLHFModule
from lightning_rlhf.callbacks import RunState
from lightning_rlhf.callbacks.survival.run_state import continue_random_state, random_state, restore_random_state
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.strategies import ranks
from tests.stand_ins import TinyModel


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        float(numpy.random.randn()),  # an odd number of these leaves one in store
        torch.rand(5).tolist(),
    )


def data_ranks(rank, size):
    result = DataRanks()
    result.rank, result.size = rank, size
    return result


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_random_generator_continues_from_a_file_without_pickled_code():
    random.gauss(0, 1)
    numpy.random.randn()
    draws()
    state = through_a_file(random_state())
    following = [draws() for _ in range(3)]
    assert [draws() for _ in range(3)] != following
    restore_random_state(state)
    assert [draws() for _ in range(3)] == following


def test_each_rank_gets_its_state_back_for_an_unchanged_number_of_ranks(monkeypatch):
    states, following = [], []
    for seed in range(3):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        states.append(random_state())
        following.append(draws())
    monkeypatch.setattr(ranks, "world_size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr(ranks, "rank", lambda number=number: number)
        continue_random_state(through_a_file(states), 3, 5, data_ranks(number, 3))
        assert draws() == following[number]


def test_ranks_are_seeded_by_step_and_rank_for_a_changed_number_of_ranks(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    monkeypatch.setattr(ranks, "world_size", lambda: 2)

    def drawn(rank, step):
        monkeypatch.setattr(ranks, "rank", lambda: rank)
        continue_random_state([random_state()], 1, step, data_ranks(rank, 2))
        return draws()

    assert drawn(0, 5) == drawn(0, 5)
    assert len({str(drawn(rank, step)) for rank in (0, 1) for step in (5, 6)}) == 4


@pytest.mark.parametrize("before", [1, 4])
def test_ranks_with_the_same_data_continue_alike_if_another_number_had_the_same(monkeypatch, before):
    states = []
    for seed in range(4):
        torch.manual_seed(seed)
        states.append(random_state())
    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    drawn = []
    for number in range(4):
        monkeypatch.setattr(ranks, "rank", lambda number=number: number)
        continue_random_state(states, before, 5, data_ranks(number // 2, 2))
        drawn.append(str(draws()))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_env_json_has_versions_and_command(tmp_path):
    loop = SimpleNamespace()
    trainer = SimpleNamespace(
        is_global_zero=True, fast_dev_run=False, default_root_dir=str(tmp_path / "run"), fit_loop=loop
    )
    RunState().setup(trainer, RLHFModule(TinyModel()), "fit")
    environment = json.loads((tmp_path / "run/env.json").read_text())
    assert environment["packages"]["torch"] == version("torch")  # PyPI's torch adds +cu130 in __version__
    assert environment["command"]
    assert environment["python"].startswith("3.")


def test_checkpoint_without_random_state_raises():
    with pytest.raises(ValueError, match="it was written without the RunState callback"):
        RunState().on_load_checkpoint(None, None, {"state_dict": {}})
