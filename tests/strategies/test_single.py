"""The role interface in one process, and the strategies that support it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlhf import PPOModule
from lightning_rlhf.strategies.roles import SingleDeviceRoles, role_strategy_of
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import OneOfTwoRanks, TinyModel, fit, quiet_trainer, responses, rollout_of


@pytest.fixture
def module():
    module = PPOModule(TinyModel(), critic=TinyModel(seed=1))
    module.configure_model()
    return module


def test_role_is_the_plain_model(module):
    assert SingleDeviceRoles(module).role("actor") is module.actor
    assert SingleDeviceRoles(module).role("critic") is module.critic


def test_single_rank_exchanges_nothing_and_gradients_are_not_scaled(module):
    value, ranks = torch.tensor([1.0, 2.0]), SingleDeviceRoles(module).data_ranks
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.sum(value) is ranks.max(value) is ranks.gather(value) is value
    assert SingleDeviceRoles(module).gradient_scale == 1.0


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_clipping_changes_one_role_and_returns_the_norm_before_it(module, max_norm):
    for role in (module.actor, module.critic):
        for parameter in role.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    count = sum(parameter.numel() for parameter in module.actor.parameters())
    norm = SingleDeviceRoles(module).clip_role("actor", max_norm)
    assert float(norm) == pytest.approx(0.5 * count**0.5, rel=1e-4)
    after = torch.cat([parameter.grad.flatten() for parameter in module.actor.parameters()]).norm()
    assert float(after) == pytest.approx(float(norm) if max_norm is None else 1.0, rel=1e-4)
    assert all((parameter.grad == 0.5).all() for parameter in module.critic.parameters())


def test_parameters_without_a_gradient_are_not_in_the_norm(module):
    parameters = list(module.actor.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    assert float(SingleDeviceRoles(module).clip_role("actor", None)) == pytest.approx(parameters[0].numel() ** 0.5)


def test_full_parameters_have_the_names_of_save_pretrained_and_no_graph(module, tmp_path):
    full = dict(SingleDeviceRoles(module).iter_full_params("actor"))
    assert full.keys() == dict(module.actor.lm.named_parameters()).keys()
    assert not any(tensor.requires_grad for tensor in full.values())
    assert full["model.norm.weight"].data_ptr() == module.actor.lm.model.norm.weight.data_ptr()


@pytest.mark.parametrize(("tied", "names"), [(True, {"model.embed_tokens.weight"}), (False, None)])
def test_tied_weights_are_yielded_once(tied, names):
    source = TinyModel()
    source.architecture["tie_word_embeddings"] = tied
    model = PPOModule(source)
    model.configure_model()
    heads = {
        name for name, _ in SingleDeviceRoles(model).iter_full_params("actor") if "embed" in name or "head" in name
    }
    assert heads == (names or {"model.embed_tokens.weight", "lm_head.weight"})


def test_step_updates_one_role_with_its_optimizer():
    steps = []

    class Watch(PPOModule):
        def training_step(self, batch, batch_idx):
            for role in ("actor", "critic"):
                before = {name: next(getattr(self, name).parameters()).clone() for name in ("actor", "critic")}
                for parameter in getattr(self, role).parameters():
                    parameter.grad = torch.ones_like(parameter)
                self.role_strategy.step_role(role)
                for name in before:
                    moved = before[name] - next(getattr(self, name).parameters())
                    steps.append((role, name, round(float(moved.detach().mean()), 4)))
                assert all(parameter.grad is None for parameter in getattr(self, role).parameters())

    rates = {"optimizer": partial(torch.optim.SGD, lr=0.1), "critic_optimizer": partial(torch.optim.SGD, lr=0.01)}
    fit(Watch(TinyModel(), **rates), [rollout_of(responses(2, seed=0))])
    assert steps == [
        ("actor", "actor", 0.1),
        ("actor", "critic", 0.0),
        ("critic", "actor", 0.0),
        ("critic", "critic", 0.01),
    ]


def test_strategy_that_supports_roles_is_used_directly(module):
    strategy = OneOfTwoRanks(SimpleNamespace(maximum=torch.clone))
    module.trainer = quiet_trainer(strategy=strategy)
    assert role_strategy_of(module) is strategy


def test_any_single_device_strategy_is_supported(module):
    module.trainer = quiet_trainer(strategy=SingleDeviceStrategy("cpu"))
    assert isinstance(role_strategy_of(module), SingleDeviceRoles)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("DDPStrategy", "rlhf_ddp"), ("FSDPStrategy", "rlhf_fsdp"), ("DeepSpeedStrategy", "rlhf_deepspeed_stage_3")],
)
def test_several_processes_without_roles_are_rejected_with_a_suggestion(theirs, ours):
    strategy = type(theirs, (), {})()
    module = SimpleNamespace(_trainer=SimpleNamespace(strategy=strategy, world_size=2))
    with pytest.raises(RuntimeError, match=rf"^{theirs} wraps the whole module, but actor.* use strategy='{ours}'$"):
        role_strategy_of(module)


def test_activation_checkpointing_gives_the_same_weights():
    weights = []
    for again in (False, True):
        module = PPOModule(TinyModel(), critic=TinyModel(seed=1), optimizer=partial(torch.optim.SGD, lr=0.1))
        strategy = RLHFSingleDeviceStrategy(activation_checkpointing=again)
        fit(module, [rollout_of(responses(4, seed=0))], strategy=strategy, devices=1)
        assert module.actor.lm.is_gradient_checkpointing == module.critic.lm.is_gradient_checkpointing == again
        weights.append(module.actor.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
