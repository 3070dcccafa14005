"""Two steps of every module on a simulated GPU: tensors stay on one device, and the host seldom waits."""

from functools import partial

import pytest
import torch

from lightning_rlhf import (
    ConversationDataModule,
    DAPOModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SFTModule,
    UnpairedDataModule,
)
from lightning_rlhf.batching.packing import PackedLengths
from lightning_rlhf.callbacks import KLControl, RolloutLog, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.packed_attention import packed_attention
from lightning_rlhf.models.packed_calls import layout_of_calls
from lightning_rlhf.modules.optimizers import use_fused_kernels
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL, KLTerm
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.gpu_simulated.pretend import CUDA, Pretend, pretended_cuda
from tests.helpers import assert_close
from tests.stand_ins import TinyModel

LETTERS = CharacterTokenizer("abcdefg")
ADAM = partial(torch.optim.AdamW, lr=1e-3)
LEARNING = {"optimizer": ADAM, "micro_batch_tokens": 64}
# Per forward: the lengths of the texts and the number of scored tokens.
WAITS_PER_FORWARD = 2
# Per mini-batch and role: its rows, denominator and gradient norm, and whether there is anything to learn.
WAITS_PER_UPDATE = 6
WAITS_PER_STEP = 30  # metrics, each reduction read once


def share_of_a(completions):
    return [text.count("a") / max(len(text), 1) for text in completions]


def rollouts(group_size=1):
    engine = TransformersEngine()
    return RolloutLoop([RewardFunction(share_of_a)], engine, group_size=group_size, max_response_tokens=8)


def prompts():
    rows, val = InMemory([{"prompt": "abc"}] * 16), InMemory([{"prompt": "ab"}] * 2)
    return PromptDataModule(rows, LETTERS, val=val, batch_size=8, max_tokens=8)


def texts(kind, rows):
    return kind(InMemory(rows * 16), LETTERS, val=InMemory(rows * 2), batch_size=8, max_tokens=16)


def answered():
    rows = [{"prompt": "abc", "completion": "defg", "label": True}, {"prompt": "ab", "completion": "c", "label": False}]
    return texts(ConversationDataModule, rows), texts(UnpairedDataModule, rows)


def pairs():
    return texts(PreferenceDataModule, [{"prompt": "abc", "chosen": "de", "rejected": "fgab"}])


def ppo(tokens=32):
    return PPOModule(
        TinyModel(),
        reward_model=TinyModel(seed=5),
        kl_reward=KLTerm(coef=0.1),
        optimizer=ADAM,
        critic_optimizer=ADAM,
        minibatch_size=4,
        update_epochs=2,
        micro_batch_tokens=tokens,
    )


GROUPS = {"actor": TinyModel(), "optimizer": ADAM, "minibatch_size": 16, "micro_batch_tokens": 64}
RUNS = {
    "ppo": lambda: (ppo(), prompts(), rollouts(), RolloutLog(), KLControl(AdaptiveKL(target=0.1, horizon=9))),
    "grpo": lambda: (GRPOModule(**GROUPS, kl_loss=KLTerm(coef=0.1, estimator="k3")), prompts(), rollouts(4)),
    "dapo": lambda: (DAPOModule(**GROUPS), prompts(), rollouts(4)),
    "dpo": lambda: (DPOModule(TinyModel(), **LEARNING), pairs()),
    "kto": lambda: (KTOModule(TinyModel(), **LEARNING), answered()[1]),
    "sft": lambda: (SFTModule(TinyModel(), **LEARNING), answered()[0]),
    "reward": lambda: (RewardModule(TinyModel(), **LEARNING), pairs()),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", RUNS)
def test_operations_use_tensors_of_one_device(on_gpu, name):
    waits, forwards = on_gpu(*RUNS[name]())
    updates = 2 * 8 if name == "ppo" else 2 * 4
    assert 0 < sum(waits.values()) <= WAITS_PER_FORWARD * forwards + WAITS_PER_UPDATE * updates + WAITS_PER_STEP * 2


@pytest.mark.slow
def test_micro_batch_makes_the_host_wait_at_most_twice(on_gpu):
    runs = (GRPOModule(**GROUPS | {"micro_batch_tokens": tokens}) for tokens in (128, 32))
    (few, fewer), (many, more) = (on_gpu(module, prompts(), rollouts(4)) for module in runs)
    assert more > 2 * fewer
    assert sum(many.values()) - sum(few.values()) <= WAITS_PER_FORWARD * (more - fewer)


@pytest.mark.parametrize("window", [None, 4])
def test_texts_that_share_calls_of_attention_stay_on_the_device_without_waits(window):
    lengths = PackedLengths((3, 5, 4), ((4, 5), (6,), (5, 3)))
    tensors = [torch.randn(1, 2, lengths.tokens, 8) for _ in range(3)]
    layer = torch.nn.Module()
    options = {"attention_mask": None, "packed_lengths": lengths, "sliding_window": window}
    expected, _ = packed_attention(layer, *tensors, **options)
    with pretended_cuda() as waits:
        layout = layout_of_calls(lengths, window, torch.float32, CUDA)
        assert any(call.mask is not None for call in layout.calls)
        there = [tensor.to(CUDA) for tensor in tensors]
        waits.on = True
        output, _ = packed_attention(layer, *there, **options)
        assert (output.device, dict(waits)) == (CUDA, {})
    layout_of_calls.cache_clear()
    assert_close(output.inner, expected, atol=1e-6)


# -- the pretended device itself --------------------------------------------------------------------------------------


def test_mixed_devices_raise_and_reading_a_value_counts_as_a_wait():
    with pretended_cuda() as waits:
        there, here = torch.ones(3, device=CUDA), torch.ones(3)
        assert isinstance(there, Pretend)
        assert there.device == CUDA
        for mixed in (lambda: there + here, lambda: here[there > 0], lambda: torch.cat([there, here])):
            with pytest.raises(RuntimeError, match="mixed devices"):
                mixed()
        assert (there + 1).sum() == (there * torch.tensor(2.0)).sum()  # numbers may be anywhere
        waits.clear()
        waits.on = True
        there.to("cpu"), there.sum().item(), float(there[0]), there.tolist(), there[there > 0]
        there.masked_fill(there > 0, 0), there[1:], there.copy_(here)
        assert sum(waits.values()) == 5


def optimizer_settings(optimizer, device, **arguments):
    with pretended_cuda():
        made = optimizer([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))], **arguments)
        for group in made.param_groups:
            group["params"] = [parameter.data.to(device) for parameter in group["params"]]
        use_fused_kernels(made)
    return made.param_groups[0].get("fused")


@pytest.mark.parametrize(
    ("optimizer", "device", "arguments", "fused"),
    [
        (torch.optim.AdamW, CUDA, {}, True),
        (torch.optim.Adam, CUDA, {}, True),
        (torch.optim.AdamW, "cpu", {}, True),
        (torch.optim.AdamW, "cpu", {"foreach": True}, None),
        (torch.optim.AdamW, CUDA, {"foreach": True}, None),
        (torch.optim.AdamW, CUDA, {"fused": False}, False),
        (torch.optim.SGD, CUDA, {}, None),
    ],
    ids=["AdamW", "Adam", "CPU", "CPU, foreach", "foreach", "not fused", "SGD"],
)
def test_adam_uses_fused_kernels_unless_another_implementation_is_configured(optimizer, device, arguments, fused):
    assert optimizer_settings(optimizer, device, lr=0.1, **arguments) == fused
