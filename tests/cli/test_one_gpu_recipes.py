"""Each recipe for one GPU takes a complete step with real vLLM, whose adapters are then those of the actor."""

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.cli.after_the_step import RECORDED
from tests.cli.small_recipes import RECIPES, load_config, saved_tokenizer, shrunk, write_data

ONE_GPU = [path for path in RECIPES if path.parent.name == "one_gpu"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_there_are_two_for_each_of_four_sizes():
    assert {path.stem for path in ONE_GPU} == {
        f"{kind}_{size}" for kind in ("grpo", "ppo") for size in ("0.5b", "1.5b", "7b", "14b")
    }


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("path", ONE_GPU, ids=lambda path: path.stem)
def test_vllm_answers_with_the_adapters_after_a_step(path, fit, tmp_path):
    pytest.importorskip("math_verify")
    (loop,) = (entry for entry in load_config(path)["trainer"]["callbacks"] if "RolloutLoop" in str(entry))
    engine = {"class_path": loop["init_args"]["engine"]["class_path"]}
    assert engine["class_path"].endswith("VLLMAdapterEngine")
    config = shrunk(path, saved_tokenizer(tmp_path / "tokenizer"), None, engine)
    config["model"]["init_args"]["actor_optimizer"]["init_args"]["lr"] = 0.05  # so that old weights would be noticed
    config["model"]["init_args"].pop("critic_warmup_steps", None)  # the only step trains the actor
    config["trainer"]["callbacks"].append({"class_path": "tests.cli.after_the_step.RecordAfterStep"})
    write_data(config)
    RECORDED.clear()
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert (result.code, result.err) == (0, "")
    assert RECORDED["engine"] == RECORDED["actor"]
    assert RECORDED["gap"] < 1e-4
    assert RECORDED["gap_before"] > 0.01
    assert all(".lora_" in name for name in RECORDED["moved"])
    assert RECORDED["moved"]
