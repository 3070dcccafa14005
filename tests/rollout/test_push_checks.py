"""Runs on vLLM with responses of older weights: every push is checked, and a corrupted one ends the run."""

from functools import partial

import pytest
import torch

from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine, VLLMEngine
from tests.callbacks.conftest import Run
from tests.callbacks.test_staleness import Recorder
from tests.stand_ins import TinyModel

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
NAME = "model.layers.1.self_attn.v_proj.weight"


def run_with(directory, engine, check_rows=2, **model):
    sgd = partial(torch.optim.SGD, lr=0.5)
    model = {"correction": RolloutCorrection(level="token"), "optimizer": sgd, "minibatch_size": 2, **model}
    made = Run(
        directory,
        loop={"engine": engine, "max_staleness": 2, "check_rows": check_rows, "validate_at_ends": False},
        model=model,
        trainer={"max_steps": 6, "max_epochs": -1},
        callbacks=[recorder := Recorder()],
    )
    made.recorder = recorder
    torch.manual_seed(0)
    return made


def sampled(made):
    return [(rollout.policy_version.tolist(), rollout.response_ids.tolist()) for rollout in made.recorder.rollouts]


@pytest.mark.parametrize("unfinished", ["finish", "continue"])
def test_comparison_passes_and_does_not_change_the_samples(tmp_path, unfinished, monkeypatch):
    compared = []

    def record(engine, module, gaps, max_logprob_diff, version):
        compared.append((version, gaps))

    monkeypatch.setattr("lightning_rlhf.callbacks.loop.engine_comparison.check_gaps", record)
    with_checks = run_with(tmp_path / "with", VLLMEngine(unfinished=unfinished)).fit()
    assert [version for version, _ in compared] == [0, 1, 2, 3]  # of the first responses, then pushes that were used
    assert all(len(gaps) and gaps.max() < 1e-5 for _, gaps in compared)
    if unfinished == "finish":
        without = run_with(tmp_path / "without", VLLMEngine(), check_rows=0).fit()
        assert sampled(with_checks) == sampled(without)


def test_push_that_loses_a_parameter_ends_the_run_with_its_name(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGETFUL", str(fault))
    engine = VLLMEngine(arguments={"worker_extension_cls": "tests.rollout.forgetful.Forgetful"})
    made = run_with(tmp_path, engine)
    update = engine.update_weights

    def lose(parameters, version):
        fault.write_text(f"skip {NAME}" if version else "nothing")
        update(parameters, version)

    engine.update_weights = lose
    try:
        with pytest.raises(RuntimeError, match=f"the push of step 1 .*the first parameter that differs is {NAME}"):
            made.fit()
    finally:
        fault.write_text("nothing")
    assert made.trainer.global_step == 3
    assert sampled(made)[-1][0][0][0] == 0  # the last step learned from responses of the first push


def test_missing_adapters_end_the_run(tmp_path, monkeypatch):
    engine = VLLMAdapterEngine()
    sent = []

    def save_once(lora, tensors, directory):
        if not sent:
            save_adapter(lora, tensors, directory)
        sent.append(directory)

    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.save_adapter", save_once)
    made = run_with(tmp_path, engine, actor=TinyModel(lora=LoRA(rank=4, alpha=8)))
    with pytest.raises(RuntimeError, match=r"the push of step 1 .* differs is the adapters' lora_A, of which vLLM"):
        made.fit()
    assert made.trainer.global_step == 3
    assert len(sent) == 4


def test_complete_adapters_pass(tmp_path):
    made = run_with(tmp_path, VLLMAdapterEngine(), actor=TinyModel(lora=LoRA(rank=4, alpha=8))).fit()
    assert made.trainer.global_step == 6
