"""Roles with the same frozen source share its weights, and compute what separate copies compute."""

import shutil

import pytest
import torch

from lightning_rlhf import FromConfig, GRPOModule, PPOModule, Pretrained
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.models.shared_bases import sharing
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.distributed.tasks import weight_bytes
from tests.models.architectures import tiny
from tests.models.test_lora import IDS, INDEX, logprobs, parameters_of, randomize_adapters
from tests.stand_ins import TINY_LLAMA

LORA = LoRA(4, 8)
KL = KLTerm(0.1, "k3")


@pytest.fixture
def base(tmp_path):
    """The directory of a base model."""
    FromConfig(TINY_LLAMA, seed=0).causal().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def built(module):
    module.configure_model()
    return module


def pointers(model):
    return {parameter.data_ptr() for name, parameter in model.named_parameters() if not is_adapter(name)}


def adapter_of(base, directory, scalar=False):
    source = Pretrained(base, lora=LORA)
    model = randomize_adapters(source.scalar() if scalar else source.causal())
    if scalar:
        model.lm.score.weight.data.fill_(0.1)
    wanted = [name for name in parameters_of(model.lm) if is_adapter(name) or name == "score.weight"]
    weights = {name: parameters_of(model.lm)[name] for name in wanted}
    save_adapter(LORA, weights, directory, base, model.adapter_metadata)
    return Pretrained(base, adapter=str(directory))


def test_four_roles_have_one_copy_of_the_base(base, tmp_path):
    start, judge = adapter_of(base, tmp_path / "sft"), adapter_of(base, tmp_path / "judge", scalar=True)
    module = built(PPOModule(start, critic=Pretrained(base, lora=LORA), ref=start, reward_model=judge, kl_loss=KL))
    assert module.frozen_roles == ("ref", "reward_model")
    actor = pointers(module.actor)
    assert pointers(module.ref) == actor
    for role in (module.critic, module.reward_model):
        head = role.lm.score.weight.data_ptr()
        assert pointers(role) - {head} < actor  # all but the output head
        assert head not in actor
    separate = sum(
        p.numel() * 4 for role in ("actor", "critic", "ref", "reward_model") for p in getattr(module, role).parameters()
    )
    assert weight_bytes(module) < 0.5 * separate
    assert all(p.requires_grad == is_adapter(name) for name, p in module.actor.named_parameters())
    assert not [name for name, p in module.ref.named_parameters() if p.requires_grad]
    adapters = [parameters_of(role.lm)["model.layers.0.self_attn.q_proj.lora_B.default.weight"] for role in (
        module.actor, module.critic, module.ref, module.reward_model)]  # fmt: skip
    assert len({adapter.data_ptr() for adapter in adapters}) == 4
    assert torch.equal(adapters[0], adapters[2])
    assert not adapters[1].any()


@pytest.mark.slow
def test_roles_compute_what_separate_copies_compute(base, tmp_path):
    start, judge = adapter_of(base, tmp_path / "sft"), adapter_of(base, tmp_path / "judge", scalar=True)
    critic = Pretrained(base, lora=LORA)
    module = built(PPOModule(start, critic=critic, ref=start, reward_model=judge, kl_loss=KL))
    assert torch.equal(logprobs(module.actor), logprobs(start.causal()))
    assert torch.equal(logprobs(module.ref), logprobs(start.causal()))
    for role, source in ((module.critic, critic), (module.reward_model, judge)):
        assert torch.equal(role(IDS, INDEX), source.scalar()(IDS, INDEX))


def test_switching_adapters_off_in_one_role_leaves_the_others_as_they_are(base, tmp_path):
    start = adapter_of(base, tmp_path / "sft")
    module = built(GRPOModule(start, ref=start, kl_loss=KL))
    before = logprobs(module.ref)
    without = logprobs(module.actor, adapters=False)
    assert torch.equal(without, logprobs(Pretrained(base).causal()))
    assert torch.equal(logprobs(module.ref), before)
    assert not torch.equal(without, before)


def test_reference_without_an_adapter_is_the_actor_without_it(base, tmp_path):
    module = built(GRPOModule(adapter_of(base, tmp_path / "sft"), ref=base, kl_loss=KL))
    assert module.frozen_roles == ()
    assert torch.equal(logprobs(module.actor, adapters=False), logprobs(Pretrained(base).causal()))


def test_trained_weights_are_not_shared(base):
    module = built(PPOModule(base, critic=Pretrained(base, lora=LORA), ref=base, kl_loss=KL))
    assert module.shared_base_of("actor") is None
    assert module.shared_base_of("critic") == module.shared_base_of("ref") == "critic"
    assert not pointers(module.actor) & (pointers(module.critic) | pointers(module.ref))
    head = module.critic.lm.score.weight.data_ptr()
    assert pointers(module.critic) - {head} < pointers(module.ref)
    # The critic came first and has no output head, so that of the reference is loaded.
    assert torch.equal(logprobs(module.ref), logprobs(Pretrained(base).causal()))


def test_critic_that_starts_from_the_reward_model_has_another_head(base, tmp_path):
    reward_model = Pretrained(base).scalar()
    reward_model.lm.score.weight.data.fill_(0.2)
    reward_model.save_pretrained(tmp_path / "judge")
    judge = str(tmp_path / "judge")
    module = built(PPOModule(base, critic=Pretrained(judge, lora=LORA), reward_model=judge))
    assert module.shared_base_of("reward_model") == "critic"
    module.critic.lm.score.weight.data.fill_(9.0)
    torch.testing.assert_close(module.reward_model(IDS, INDEX), Pretrained(judge).scalar()(IDS, INDEX))
    heads = {role.lm.score.weight.data_ptr() for role in (module.critic, module.reward_model)}
    assert pointers(module.critic) - heads == pointers(module.reward_model) - heads


def test_sources_that_differ_are_not_shared(base, tmp_path):
    shutil.copytree(base, tmp_path / "copy")
    other = Pretrained(str(tmp_path / "copy"), lora=LORA)
    module = PPOModule(Pretrained(base, lora=LORA), critic=other, reward_model=Pretrained(base, dtype="bfloat16"))
    assert {role: module.shared_base_of(role) for role in module.sources} == dict.fromkeys(module.sources)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "mamba"])
def test_architectures_share_backbones(kind, tmp_path):
    FromConfig(tiny(kind), seed=0).causal().save_pretrained(tmp_path)
    ids = torch.randint(3, 11, (2, 6))
    index = torch.arange(5).expand(2, -1)
    source = Pretrained(str(tmp_path))
    with sharing({}):
        model, critic = source.causal(), source.scalar()
    heads = {name for name, parameter in critic.named_parameters() if parameter.data_ptr() not in pointers(model)}
    assert heads == {"lm.score.weight"}
    assert torch.equal(critic(ids, index), torch.zeros(2, 5))
    critic.lm.score.weight.data.fill_(0.3)
    separate = source.scalar()
    separate.lm.score.weight.data.fill_(0.3)
    assert torch.equal(critic(ids, index), separate(ids, index))
