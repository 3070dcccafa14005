"""Under every strategy, the engine receives the actor's weights: vLLM generates like the whole model in one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import SFTModule
from lightning_rlhf.models.loading import Pretrained, save_architecture
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import parts, strategy_of
from tests.distributed.test_parity import STRATEGIES
from tests.stand_ins import TinyModel, quiet_trainer

PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 4, 5]]
GREEDY = SamplingParams(8, temperature=0.0)


def push(strategy, folder):
    """Train one step under a strategy and return the greedy completions of each rank's engine after a push."""
    output = []

    class Generate(Callback):
        def on_train_end(self, trainer, pl_module):
            directory = Path(folder, f"rank{trainer.global_rank}")
            save_architecture(pl_module.sources["actor"], directory)
            engine = VLLMEngine()
            engine.start(EngineSetup(directory, "float32", 32, directory.with_suffix(".log")))
            try:
                engine.wait()
                engine.update_weights(pl_module.role_strategy.iter_full_params("actor"), 1)
                output.extend(generate(engine, PROMPTS, GREEDY, [0] * len(PROMPTS)))
            finally:
                engine.close()
            pl_module.export(f"{folder}/export", write=trainer.is_global_zero)

    _, data, _ = parts("sft")
    module = SFTModule(TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.5))
    trainer = quiet_trainer(
        strategy=strategy_of(strategy), devices=2, max_steps=1, use_distributed_sampler=False, callbacks=[Generate()],
        limit_val_batches=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return [[completion.token_ids, completion.logprobs] for completion in output]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", ["rlhf_ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_1", "rlhf_deepspeed_stage_3"])
def test_greedy_tokens_and_probabilities_after_a_push_are_those_of_the_whole_model(name, tmp_path):
    answers = run_ranks("tests.distributed.test_push:push", 2, STRATEGIES[name], str(tmp_path))
    lm = Pretrained(str(tmp_path / "export")).causal().lm
    for completions in answers:
        for prompt, (tokens, logprobs) in zip(PROMPTS, completions, strict=True):
            with torch.no_grad():
                logits = lm(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert logits.argmax(-1).tolist() == tokens
            expected = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)
