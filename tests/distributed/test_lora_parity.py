"""Adapters under every strategy: the training of one process, and checkpoints with adapters only."""

import pytest
from safetensors import safe_open

from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_parity import (
    KINDS,
    NORMS,
    STRATEGIES,
    WEIGHTS,
    assert_equal_metrics,
    norm_difference,
)

HEADS = 2  # that tensor parallelism can split


def described(kind, name, folder, **options):
    """Return a run whose weights are written merged, under their names without adapters."""
    module = {"lora": True, "heads": HEADS}
    return {
        "kind": kind,
        "strategy": STRATEGIES.get(name, name),
        "module": module,
        "weights": f"{folder}/{name}-{kind}.safetensors",
    } | options


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of one process in plain Lightning, and the initial weights."""
    folder = tmp_path_factory.mktemp("alone")
    start = described("ppo", "auto", folder, weights=f"{folder}/start.safetensors", trainer={"max_steps": 1})
    start["module"] = start["module"] | {"lr": 0.0}
    *answers, _ = run_ranks(
        "tests.distributed.tasks:train", 1, [*(described(kind, "auto", folder) for kind in KINDS), start]
    )[0]
    return dict(zip(KINDS, answers, strict=True)), folder


def check(answers, runs, alone):
    """Check that every run gives the results of one process on every rank."""
    expected, folder = alone
    for number, run in enumerate(runs):
        for answer in answers:
            assert answer[number]["frozen"]
            assert norm_difference(answer[number], expected[run["kind"]]) <= NORMS
            assert_equal_metrics(answer[number], expected[run["kind"]])
        differences = largest_differences(run["weights"], folder / f"auto-{run['kind']}.safetensors")
        assert max(differences.values()) <= WEIGHTS, (run["strategy"], run["kind"], differences)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("rlhf_ddp", "rlhf_fsdp"),
        pytest.param(("rlhf_deepspeed_stage_3",), marks=pytest.mark.slow),
        pytest.param(("rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_2"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_three_updates_of_adapters_equal_those_of_one_process(names, alone, tmp_path):
    runs = [described(kind, name, tmp_path, save=f"{tmp_path}/{name}-{kind}.ckpt") for name in names for kind in KINDS]
    check(run_ranks("tests.distributed.tasks:train", 2, runs), runs, alone)
    head = {"lm.score.weight", "score_mean", "score_std"}
    for name in names:
        for written, besides in (("sft.ckpt/v*/actor", set()), ("rm.ckpt/v*/reward_model", head),
                                 ("ppo.ckpt/v*/actor", set()), ("ppo.ckpt/v*/critic", head)):  # fmt: skip
            keys = {key for file in tmp_path.glob(f"{name}-{written}/*.safetensors") for key in keys_of(file)}
            weights = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
            assert {key for key in weights if ".lora_A." not in key and ".lora_B." not in key} == besides
            assert len(weights) == 2 * 7 * 2 + len(besides)  # layers, matrices, A and B


@pytest.mark.slow
def test_adapters_are_split_with_their_layers(alone, tmp_path):
    runs = [described(kind, "rlhf_fsdp, tensor parallel 2", tmp_path) for kind in KINDS]
    check(run_ranks("tests.distributed.tasks:train", 2, runs), runs, alone)


@pytest.mark.slow
def test_compared_weights_have_changed(alone):
    _, folder = alone
    moved = largest_differences(folder / "start.safetensors", folder / "auto-ppo.safetensors")
    assert min(moved.values()) > 100 * WEIGHTS


def keys_of(file):
    with safe_open(file, "pt") as opened:
        return list(opened.keys())
