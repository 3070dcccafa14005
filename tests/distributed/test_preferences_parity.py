"""Preference training, distillation and packing under every strategy: three updates equal those of one process."""

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_parity import (
    NORMS,
    STRATEGIES,
    STRATEGY_RUNS,
    WEIGHTS,
    assert_equal_metrics,
    norm_difference,
)

pytestmark = pytest.mark.slow
RUNS = {
    "dpo": ("dpo", {}),
    "dpo, packed": ("dpo", {"packing": True}),
    "dpo, start": ("dpo", {"ref": "start"}),
    "dpo, adapters": ("dpo", {"lora": True}),
    "kto": ("kto", {}),
    "kto, adapters": ("kto", {"lora": True}),
    "online dpo": ("online_dpo", {}),
    "sft, packed": ("sft", {"packing": True}),
    "distillation": ("distillation", {"teacher": "frozen", "top_k": None}),
    "distillation, top tokens": ("distillation", {"teacher": "frozen", "top_k": 4}),
    "distillation, two teachers": ("distillation", {"teacher": "by source", "top_k": None}),
    "distillation, two teachers, top tokens": ("distillation", {"teacher": "by source", "top_k": 4}),
    "distillation, student as teacher": ("distillation", {"teacher": "itself", "top_k": 4}),
    "mixture": ("mixture", {"top_k": None}),
    "mixture, top tokens": ("mixture", {"top_k": 4}),
    "distillation, adapters": ("distillation", {"teacher": "frozen", "top_k": None, "lora": True}),
}


def described(name, strategy, folder, **options):
    kind, module = RUNS[name]
    module = {"heads": 4, **module, **options}
    return {"kind": kind, "strategy": strategy, "weights": f"{folder}/{name}.safetensors", "module": module}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of one process in plain Lightning, and the weights of each run with a learning rate of 0."""
    folder, start = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("start")
    runs = [described(name, "auto", folder) for name in RUNS]
    runs += [described(name, "auto", start, lr=0.0) for name in RUNS]
    answers = run_ranks("tests.distributed.tasks:train", 1, runs)[0]
    return dict(zip(RUNS, answers, strict=False)), folder, start


@pytest.mark.timeout(900)  # 16 runs of up to 8 ranks, on as few as two cores
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGY_RUNS)
def test_three_updates_equal_those_of_one_process(strategy, ranks, alone, tmp_path):
    expected, folder, start = alone
    runs = [described(name, STRATEGIES[strategy], tmp_path) for name in RUNS]
    # Process groups of earlier runs keep their threads, which slow down later ones.
    half = len(runs) // 2
    parts = (runs[:half], runs[half:])
    first, second = (run_ranks("tests.distributed.tasks:train", ranks, some, seconds=430) for some in parts)
    answers = [one + other for one, other in zip(first, second, strict=True)]
    for number, name in enumerate(RUNS):
        for answer in answers:  # every rank logs the same
            assert answer[number]["frozen"]
            assert norm_difference(answer[number], expected[name]) <= NORMS
            # The rows of a matrix product, on which its rounding depends, are other ones in each part of a row.
            assert_equal_metrics(answer[number], expected[name], ties="sequence parallel" in strategy)
        file = f"{name}.safetensors"
        assert max(largest_differences(tmp_path / file, folder / file).values()) <= WEIGHTS
        assert max(largest_differences(start / file, folder / file).values()) > 100 * WEIGHTS


def test_packed_run_equals_a_padded_one(alone, tmp_path):
    expected, folder, _ = alone
    run = {"kind": "sft", "strategy": "auto", "weights": f"{tmp_path}/sft.safetensors", "module": {"heads": 4}}
    (answer,) = run_ranks("tests.distributed.tasks:train", 1, [run])[0]
    assert_equal_metrics(answer, expected["sft, packed"])
    assert (
        max(largest_differences(tmp_path / "sft.safetensors", folder / "sft, packed.safetensors").values()) <= WEIGHTS
    )
