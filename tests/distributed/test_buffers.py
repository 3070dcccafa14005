"""Under sharding strategies, all ranks have the saved buffers of a model, with and without adapters."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import SFTModule
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.models.tensors import whole_tensors
from tests.cli.published_architectures import MOONLIGHT, SMALL
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import parts, strategy_of
from tests.distributed.test_parity import STRATEGIES
from tests.stand_ins import quiet_trainer

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def differing(strategy, model, lora):
    """Return the names of tensors that differ from the model after a step with learning rate 0, and a buffer."""
    wanted = dict(whole_tensors(Pretrained(model).causal().lm))
    result = []

    class Look(Callback):
        def on_train_end(self, trainer, pl_module):
            sent = {name: tensor.clone() for name, tensor in pl_module.role_strategy.iter_full_params("actor")}
            wrong = [name for name in sent if not torch.equal(sent[name].cpu(), wanted[name])]
            result.extend([sorted(wrong), sorted(sent.keys() ^ wanted.keys()), sent[BIAS].tolist()])

    _, data, _ = parts("sft")
    adapters = LoRA(2, 4, ["q_proj"]) if lora else None
    module = SFTModule(Pretrained(model, lora=adapters), optimizer=partial(torch.optim.SGD, lr=0.0))
    trainer = quiet_trainer(
        strategy=strategy_of(strategy), devices=2, max_steps=1, use_distributed_sampler=False, callbacks=[Look()],
        limit_val_batches=0, default_root_dir=Path(model).parent,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"), [("rlhf_fsdp", False), ("rlhf_deepspeed_stage_3", False), ("rlhf_deepspeed_stage_3", True)]
)
def test_every_rank_sends_the_saved_tensors(name, lora, tmp_path):
    model = FromConfig(MOONLIGHT | SMALL["deepseek_v3"] | {"vocab_size": 50}, seed=0).causal()
    bias = model.lm.get_buffer(BIAS)
    bias.copy_(torch.linspace(-1, 1, len(bias)))
    model.save_pretrained(tmp_path / "model")
    answers = run_ranks("tests.distributed.test_buffers:differing", 2, STRATEGIES[name], str(tmp_path / "model"), lora)
    assert answers == [[[], [], bias.tolist()]] * 2
