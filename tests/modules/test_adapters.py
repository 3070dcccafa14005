"""Roles with adapters: one model is actor and reference, and only trained weights are saved."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import FromConfig, GRPOModule, PPOModule, RewardModule, SFTModule
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.strategies.roles import SingleDeviceRoles
from tests.stand_ins import TINY_LLAMA, TinyModel, fit, responses, rollout_of

LORA = LoRA(rank=4, alpha=8)
ACTOR = TinyModel(lora=LORA)
ELSEWHERE = FromConfig(TINY_LLAMA, seed=0)  # the same weights as the actor's, from a separate source
SGD = partial(torch.optim.SGD, lr=0.5)
BATCHES = [rollout_of(responses(6, seed=seed)) for seed in range(4)]


def made(kind=PPOModule, actor=ACTOR, **options):
    optimizers = {"optimizer": SGD} | ({"critic_optimizer": SGD} if kind is PPOModule else {})
    inputs = {"kl_loss": KLTerm(0.3, "k3"), "minibatch_size": 3, "micro_batch_tokens": 15} | optimizers | options
    if kind is PPOModule:
        inputs = {"kl_reward": KLTerm(0.2)} | inputs
    return kind(actor, **inputs)


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_reference_is_the_actor_without_adapters_and_no_second_copy_is_loaded():
    module = made()
    assert set(module.sources) == {"actor", "critic"}
    assert module.frozen_roles == ()
    metrics = fit(module, BATCHES).callback_metrics
    assert not hasattr(module, "ref")
    assert metrics["kl/ref"] != 0
    experience = module.last_step.experience
    base = replace(ACTOR, lora=None).causal()
    module.build_role = lambda name: base  # a module with the base as actor gives the expected reference
    expected = made(actor=replace(ACTOR, lora=None))
    expected.configure_model()
    with torch.no_grad():
        requested = expected.micro_batches.map(partial(expected.actor_scores, "actor"), experience.rollout)[0]
    assert torch.equal(experience.ref_logprobs, requested)
    assert not torch.equal(experience.old_logprobs, requested)


@pytest.mark.slow
def test_run_with_a_second_copy_of_the_reference_is_bitwise_equal():
    one, two = made(), made(ref=ELSEWHERE)
    assert two.frozen_roles == ("ref",)
    ours, theirs = fit(one, BATCHES).callback_metrics, fit(two, BATCHES).callback_metrics
    assert ours["kl/ref"] != 0
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if not name.startswith("time/"):
            torch.testing.assert_close(value, theirs[name], atol=0, rtol=0, equal_nan=True, msg=name)
    assert equal(weights(one), {name: t for name, t in weights(two).items() if not name.startswith("ref.")})


@pytest.mark.parametrize("ref", [None, ACTOR, replace(ACTOR, lora=None)], ids=["none", "same", "without lora"])
def test_source_of_the_actor_is_not_loaded_twice_in_any_notation(ref):
    assert "ref" not in made(ref=ref).sources


def test_module_without_kl_has_no_reference():
    module = made(kl_loss=KLTerm(), kl_reward=KLTerm())
    assert "kl/ref" not in fit(module, BATCHES[:1]).callback_metrics


@pytest.mark.parametrize("kind", [PPOModule, GRPOModule, SFTModule, RewardModule])
def test_optimizers_hold_only_adapters_and_the_head_of_scalar_models(kind):
    module = made(kind) if kind in (PPOModule, GRPOModule) else kind(ACTOR)
    module.configure_model()
    optimizers = module.configure_optimizers()
    for role, entry in zip(module.trained_roles, optimizers, strict=True):
        named = {id(parameter): name for name, parameter in getattr(module, role).lm.named_parameters()}
        held = {named[id(p)] for group in entry["optimizer"].param_groups for p in group["params"]}
        head = {"score.weight"} if role in ("critic", "reward_model") else set()
        assert held == {name for name in named.values() if is_adapter(name)} | head


def test_critic_has_adapters_if_it_starts_from_the_actor_and_not_with_a_separate_source():
    for critic, adapted in ((None, True), ("actor", True), (ELSEWHERE, False)):
        module = made(critic=critic)
        module.configure_model()
        assert any(is_adapter(name) for name, _ in module.critic.lm.named_parameters()) == adapted


@pytest.mark.parametrize("role", ["ref", "reward_model"])
def test_frozen_role_has_no_adapters(role):
    with pytest.raises(ValueError, match=f"^the {role} is not trained, so its source cannot have lora"):
        made(**{role: TinyModel(seed=7, lora=LORA)})


@pytest.mark.slow
def test_engine_receives_merged_weights_and_a_push_changes_nothing():
    module = made()
    fit(module, BATCHES)
    before, roles = weights(module), SingleDeviceRoles(module)
    merged = {name: tensor.clone() for name, tensor in roles.iter_full_params("actor")}
    base = {name: tensor.clone() for name, tensor in roles.iter_base_params("actor")}
    adapters = dict(roles.iter_adapters("actor"))
    assert equal(weights(module), before)
    source = {name: tensor.detach() for name, tensor in replace(ACTOR, lora=None).causal().lm.named_parameters()}
    assert equal(base, source)
    assert list(merged) == list(source)
    assert {name for name in merged if not torch.equal(merged[name], base[name])} == {
        f"{name.partition('.lora_')[0]}.weight" for name in adapters
    }


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "rlhf_single"])
def test_resumed_run_equals_the_uninterrupted_one_and_frozen_weights_are_not_saved(strategy, tmp_path):
    adam = {"optimizer": torch.optim.AdamW, "critic_optimizer": torch.optim.AdamW}
    whole, first, second = (made(**adam) for _ in range(3))
    options = {"strategy": strategy, "default_root_dir": tmp_path, "max_epochs": -1}
    fit(whole, BATCHES[:1], max_steps=4, **options)
    fit(first, BATCHES[:1], max_steps=2, **options).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, BATCHES[:1], max_steps=4, ckpt=tmp_path / "half.ckpt", **options)
    assert equal(weights(second), weights(whole))
    assert not equal(weights(first), weights(whole))
    files = [path for path in (tmp_path / "half.ckpt").rglob("*") if path.is_file()] or [tmp_path / "half.ckpt"]
    assert not any(b"base_layer" in path.read_bytes() or b"lm_head" in path.read_bytes() for path in files)
    assert any(b"lora_A" in path.read_bytes() for path in files)
    with pytest.raises(ValueError, match=r"written with lora \{'rank': 4, 'alpha': 8,.*\} for the actor, but this run"):
        fit(
            made(actor=TinyModel(lora=LoRA(4, 9)), **adam),
            BATCHES[:1],
            max_steps=4,
            ckpt=tmp_path / "half.ckpt",
            **options,
        )
