"""Each recipe for one GPU takes a complete step with real vLLM, whose adapters are then those of the actor."""

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.cli.after_the_step import take_a_step
from tests.cli.small_recipes import RECIPES, load_config, saved_tokenizer, shrunk

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
    engine = {"class_path": loop["init_args"]["engine"]["class_path"]}  # its options are for a GPU
    assert engine["class_path"].endswith("VLLMAdapterEngine")
    config = shrunk(path, saved_tokenizer(tmp_path / "tokenizer"), other_reward_model=None, engine=engine)
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.05  # so that old weights would be noticed
    config["model"]["init_args"].pop("critic_warmup_steps", None)  # the only step trains the actor
    recorded = take_a_step(fit, config)  # also asserts that the engine answers as the actor
    assert recorded["moved"]
    assert all(".lora_" in name for name in recorded["moved"])
