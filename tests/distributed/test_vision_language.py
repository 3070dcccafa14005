"""Vision-language checkpoints under every strategy: the text model trains like in one process, towers are frozen."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from lightning_rlhf import Pretrained
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import largest_differences
from tests.distributed.test_parity import NORMS, STRATEGIES, WEIGHTS, assert_equal_metrics, norm_difference
from tests.models.test_classes import TEXT, TOKENS, VISION

KINDS = ("sft", "grpo", "rm")
NAMES = ("rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_2", "rlhf_deepspeed_stage_3")
FROZEN = ("visual", "vision", "multi_modal_projector")


def write_checkpoint(name, directory):
    """Write a small vision-language model whose weights are large enough to matter."""
    torch.manual_seed(0)
    wide = {"initializer_range": 0.2}
    config = CONFIG_MAPPING[name](text_config=TEXT | wide, vision_config=VISION | wide, **TOKENS, **wide)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)


def described(kind, name, folder, **options):
    """Return a run that writes its weights, a checkpoint after two of three steps, and an export."""
    run = {
        "kind": kind,
        "strategy": STRATEGIES.get(name, name),
        "module": {"checkpoint": f"{folder.parent}/model"},
        "weights": f"{folder}/{name}-{kind}.safetensors",
        "save": f"{folder}/{name}-{kind}.ckpt",
        "save_at": 2,
        "export": f"{folder}/{name}-{kind}",
    }
    return {key: value for key, value in (run | options).items() if value is not None}


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def alone(request, tmp_path_factory):
    """Results of one process in plain Lightning, which those of all ranks must equal."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, folder / "model")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    runs = [described(kind, "auto", folder / "one") for kind in KINDS]
    return dict(zip(KINDS, run_ranks("tests.distributed.tasks:train", 1, runs)[0], strict=True)), folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_text_model_is_trained_like_in_one_process_and_towers_do_not_change(name, alone):
    expected, folder = alone
    runs = [described(kind, name, folder / "two") for kind in KINDS]
    resumed = [
        run
        | {
            "ckpt": run["save"],
            "save": None,
            "weights": run["weights"].replace(".safe", "-resumed.safe"),
            "export": None,
        }
        for run in runs
    ]
    answers = run_ranks("tests.distributed.tasks:train", 2, [*runs, *resumed])
    for run, again, kind in zip(runs, resumed, KINDS, strict=True):
        for rank in answers:
            answer = rank[runs.index(run)]
            assert answer["frozen"]
            assert norm_difference(answer, expected[kind]) <= NORMS
            assert_equal_metrics(answer, expected[kind])
            assert len(rank[len(runs) + runs.index(run)]["steps"]) == 1
        reference = folder / f"one/auto-{kind}.safetensors"
        assert max(largest_differences(run["weights"], reference).values()) <= WEIGHTS
        assert max(largest_differences(again["weights"], run["weights"]).values()) <= WEIGHTS
        check_towers(load_file(run["weights"]), Pretrained(f"{folder}/model"))
    start = load_file(folder / "model/model.safetensors")
    for kind in ("sft", "grpo"):
        export = load_file(folder / f"two/{name}-{kind}/model.safetensors")
        assert export.keys() == start.keys()
        assert {tensor.shape for tensor in export.values()} == {tensor.shape for tensor in start.values()}
        assert all(torch.equal(export[key], start[key]) for key in start if any(part in key for part in FROZEN))


def check_towers(weights, source):
    """Check that the towers equal those of the checkpoint, and that every matrix of the text model has changed."""
    moved, towers = 0, 0
    start = source.causal().lm.state_dict()
    for key, tensor in weights.items():
        before = start.get(key.partition(".")[2])
        if any(part in key for part in FROZEN):
            assert torch.equal(tensor, before), key
            towers += 1
        elif before is not None and before.ndim == 2:
            assert float((tensor - before).abs().max()) > 10 * WEIGHTS, key
            moved += 1
    assert towers > 5
    assert moved > 5
