"""Runs on one GPU: terms worked by hand, the order of the ways of training, and the table of the command."""

import re

import pytest

from lightning_rlhf.extras.plan import command
from lightning_rlhf.extras.plan.memory import ENGINE, OPTIMIZER, PARAMETERS, Shard, engine_bytes
from lightning_rlhf.extras.plan.one_gpu import ALGORITHMS, METHODS, MODELS, WORK, needed, roles_of, table
from lightning_rlhf.extras.plan.plan import GIB
from lightning_rlhf.extras.plan.setup import Engine, strategy


def resting(model, algorithm, method, term):
    shards = [Shard(role, strategy("rlhf_single"), 1, True) for role in roles_of(model, algorithm, method)]
    return sum(shard.resting()[term] for shard in shards)


def test_weights_of_four_roles_by_hand():
    """Qwen2.5-0.5B: embedding 151,936 x 896, 24 layers with 14,909,440 linear weights each, tied head."""
    embedding, linear = 151936 * 896, 24 * (896 * 896 * 2 + 2 * 896 * 128 + 3 * 896 * 4864)
    others = 24 * (2 * 896 + 896 + 2 * 128) + 896  # norms and biases
    actor = embedding + linear + others
    adapters = 24 * 32 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    whole = resting("0.5 B", "PPO", "all weights", PARAMETERS)
    scalar = actor + 896
    assert whole == 4 * (actor + scalar) + 2 * (actor + scalar)
    assert resting("0.5 B", "GRPO", "LoRA", PARAMETERS) == 2 * actor + 4 * adapters
    shared = resting("0.5 B", "PPO", "LoRA on one base", PARAMETERS)
    assert shared == 2 * actor + 4 * (3 * adapters + 2 * 896)
    nf4 = resting("0.5 B", "PPO", "nf4 on one base", PARAMETERS)
    assert shared - nf4 == pytest.approx(linear * (2 - 0.5 - (1 + 4 / 256) / 64), rel=1e-6)
    assert resting("0.5 B", "PPO", "nf4 on one base", OPTIMIZER) == 8 * (2 * adapters + 896)


def test_engine_is_counted_once_and_in_bfloat16():
    (actor,) = roles_of("1.5 B", "GRPO", "nf4 on one base")
    weights = engine_bytes(Engine(share=0.1, dtype="bfloat16"), actor, WORK, 24 * GIB)[ENGINE]
    assert weights == 2 * actor.model.elements
    assert needed("1.5 B", "GRPO", "nf4 on one base", 24) > weights / GIB


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_way_needs_less_than_the_one_before_and_larger_models_need_more(algorithm):
    sizes = [[needed(model, algorithm, method, 48) for method in METHODS] for model in MODELS]
    for row in sizes:
        assert row == sorted(row, reverse=True)
    for method in zip(*sizes, strict=True):
        assert list(method) == sorted(method)


def test_brackets_mark_what_does_not_fit():
    headings, rows = table(24)
    assert len(headings) == len(rows[0]) == 8
    for row in rows:
        for cell in row[1:]:
            number = float(re.sub("[()]", "", cell))
            assert cell.startswith("(") == (number > 24)


@pytest.mark.parametrize("arguments", [["--gpu", "24GB"], ["--gpu=24"], ["--gpu", "24 GiB"], ["--gpu=24gb"]])
def test_command_prints_the_table_without_a_configuration(arguments, capsys):
    assert command.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "on one GPU of 24 GiB, computed" in shown
    assert all(cell in shown for row in table(24)[1] for cell in row)
    assert "128 responses in a step, 1536 tokens" in shown


@pytest.mark.parametrize("value", ["many", "4GB", "24MB", "", "24GB --config x.yaml"])
def test_other_sizes_are_rejected(value, capsys):
    assert command.run(["--gpu", *value.split()]) == 2
    assert "--gpu is the memory of one GPU without further options, such as --gpu 24GB" in capsys.readouterr().err
