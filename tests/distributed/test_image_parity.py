"""Runs on texts with images under every strategy: the same numbers as in one process, also with trained encoders."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.strategies.tensor_parallel import tensor_parallel_plan
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_parity import STRATEGIES, WEIGHTS, assert_equal_metrics
from tests.vision_models import config, write_checkpoint

KINDS = ("sft", "dpo", "kto", "rm", "grpo", "ppo")
NAMES = ("rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_2", "rlhf_deepspeed_stage_3")


def write_with_head(name, folder, **changes):
    """Write the directory of a model for all roles: a language model that has a head for one number too."""
    write_checkpoint(name, folder, **changes)
    weights = load_file(folder / "model.safetensors")
    head = torch.linspace(-0.3, 0.3, config(name, **changes).get_text_config().hidden_size)[None]
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", {"format": "pt"})


def described(kind, name, folder, train_vision, **options):
    """Return a run that writes its weights, and a checkpoint after two of three steps."""
    run = {
        "kind": kind,
        "strategy": STRATEGIES.get(name, name),
        "module": {"checkpoint": f"{folder.parent}/model", "images": True, "train_vision": train_vision},
        "weights": f"{folder}/{name}-{kind}.safetensors",
        "save": f"{folder}/{name}-{kind}.ckpt",
        "save_at": 2,
    }
    return {key: value for key, value in (run | options).items() if value is not None}


@pytest.fixture(scope="module", params=[("idefics3", True), ("qwen2_5_vl", False), ("qwen3_vl", True)], ids=str)
def alone(request, tmp_path_factory):
    """Results of one process in plain Lightning, which those of all ranks must equal."""
    name, train_vision = request.param
    folder = tmp_path_factory.mktemp(name)
    write_with_head(name, folder / "model")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    runs = [described(kind, "auto", folder / "one", train_vision) for kind in KINDS]
    answers = run_ranks("tests.distributed.tasks:train", 1, runs)[0]
    return dict(zip(KINDS, answers, strict=True)), folder, train_vision


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_on_images_like_one_process_and_resume(name, alone):
    expected, folder, train_vision = alone
    runs = [described(kind, name, folder / "two", train_vision) for kind in KINDS]
    resumed = [
        run | {"ckpt": run["save"], "save": None, "weights": run["weights"].replace(".safe", "-resumed.safe")}
        for run in runs
    ]
    answers = run_ranks("tests.distributed.tasks:train", 2, [*runs, *resumed])
    for run, again, kind in zip(runs, resumed, KINDS, strict=True):
        for rank in answers:
            assert_equal_metrics(rank[runs.index(run)], expected[kind])
            assert len(rank[len(runs) + runs.index(run)]["steps"]) == 1
        reference = folder / f"one/auto-{kind}.safetensors"
        assert max(largest_differences(run["weights"], reference).values()) <= WEIGHTS
        assert max(largest_differences(again["weights"], run["weights"]).values()) <= WEIGHTS


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl", "gemma3", "llava", "internvl"])
def test_tensor_parallelism_splits_the_text_model_alone(name):
    model = AutoModelForImageTextToText.from_config(config(name, **HEADS))
    plan = tensor_parallel_plan("actor", model, 2)
    text = set(text_model_of(model).modules())
    assert set(plan) <= text
    assert sum(isinstance(module, torch.nn.Linear) for module in plan) == 2 * 7  # layers, matrices of each


@pytest.mark.slow
def test_two_ranks_that_split_the_text_model_train_like_one_process(tmp_path):
    write_with_head("idefics3", tmp_path / "model", **HEADS)
    (tmp_path / "x").mkdir()
    both = {}
    for name, ranks in (("auto", 1), ("rlhf_fsdp, tensor parallel 2", 2)):
        runs = [described(kind, name, tmp_path / "x", True, save=None) for kind in ("sft", "grpo", "ppo")]
        both[ranks] = run_ranks("tests.distributed.tasks:train", ranks, runs), runs
    for number in range(3):
        for rank in both[2][0]:
            assert_equal_metrics(rank[number], both[1][0][0][number])
        one, two = (both[ranks][1][number]["weights"] for ranks in (1, 2))
        assert max(largest_differences(two, one).values()) <= WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_images_of_an_environment_are_known_to_all_ranks(kind, tmp_path):
    write_with_head("idefics3", tmp_path / "model")
    (tmp_path / "x").mkdir()
    results, files = [], []
    for name, ranks in (("auto", 1), ("rlhf_ddp", 2), ("rlhf_fsdp", 2)):
        run = described(kind, name, tmp_path / "x", True, save=None)
        run["module"] |= {"turns": 4}
        results.append(run_ranks("tests.distributed.tasks:train", ranks, [run])[0][0])
        files.append(run["weights"])
    assert all(step["env/turns"] > 1.2 for step in results[0]["steps"])
    for result, file in zip(results[1:], files[1:], strict=True):
        assert_equal_metrics(result, results[0])
        assert max(largest_differences(file, files[0]).values()) <= WEIGHTS
