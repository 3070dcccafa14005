"""A complete PPO step compared with a second implementation from the papers: row by row, token by token, unpadded."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf import PPOModule
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.objectives.value_losses import ClippedValueLoss
from lightning_rlhf.rewards.shaping import ScoreShaping
from tests.stand_ins import TinyModel, fit, responses, rollout_of

ROWS = responses(8, seed=3, observations=True)
SOURCES = {name: TinyModel(seed=seed, dtype="float64") for seed, name in enumerate(("actor", "ref", "critic", "rm"))}

# Learning rates high enough for ratios and values to leave their clip ranges.
BASE = SimpleNamespace(
    actor_lr=0.3, critic_lr=0.05, gamma=1.0, gae_lambda=0.95, whiten=True, clip_low=0.2, clip_high=0.2, dual_clip=None,
    value_clip=0.5, vf_coef=1.0, ent_coef=0.0, kl_reward=(0.0, "k1"), kl_loss=(0.0, "k3"), update_epochs=3,
    minibatch_size=4, max_grad_norm=None, temperature=1.0, reward_model=False, weight=1.0, clip=None,
    truncated_score=None,
)  # fmt: skip


def settings(**changes):
    return SimpleNamespace(**(vars(BASE) | changes))


# -- ours -------------------------------------------------------------------------------------------------------------


class Recorded(PPOModule):
    """Records the rows of each mini-batch."""

    def minibatches(self, experience):
        self.order = []
        for minibatch in super().minibatches(experience):
            self.order.append(minibatch.rollout.policy_version.amax(dim=1).tolist())
            yield minibatch


def trained(s, rows=ROWS, **options):
    """Return a module after one step on the rows."""
    module = Recorded(
        SOURCES["actor"],
        ref=SOURCES["ref"],
        critic=SOURCES["critic"],
        reward_model=SOURCES["rm"] if s.reward_model else None,
        advantages=GAE(s.gamma, s.gae_lambda, s.whiten),
        policy_loss=ClippedPolicyLoss(clip_range_low=s.clip_low, clip_range_high=s.clip_high, dual_clip=s.dual_clip),
        value_loss=ClippedValueLoss(s.value_clip),
        vf_coef=s.vf_coef,
        ent_coef=s.ent_coef,
        kl_reward=KLTerm(*s.kl_reward),
        kl_loss=KLTerm(*s.kl_loss),
        score_shaping=ScoreShaping(s.weight, s.clip, s.truncated_score),
        optimizer=partial(torch.optim.SGD, lr=s.actor_lr),
        critic_optimizer=partial(torch.optim.SGD, lr=s.critic_lr),
        update_epochs=s.update_epochs,
        minibatch_size=s.minibatch_size,
        max_grad_norm=s.max_grad_norm,
        **({"micro_batch_tokens": 13} | options),
    )
    rollout = rollout_of(rows, dtype=torch.float64, extra_columns=2, temperature=s.temperature)
    module.metrics = fit(module, [rollout]).callback_metrics
    return module


# -- the same, from the papers ----------------------------------------------------------------------------------------


def policy(lm, row, temperature):
    """Return log-probability of each response token, and entropy of the distribution that it was sampled from."""
    ids = torch.tensor(row.prompt + row.tokens)
    every = (lm(ids[None]).logits[0] / temperature).log_softmax(-1)[len(row.prompt) - 1 : -1]
    return every[range(len(row.tokens)), row.tokens], -(every.exp() * every).sum(-1)


def scalars(lm, row):
    """Return the scalar model's output at each token of prompt and response."""
    ids = torch.tensor(row.prompt + row.tokens)
    return lm.score(lm.model(ids[None]).last_hidden_state)[0, :, 0]


def kl(lp, ref, kind):
    d = lp - ref
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}[kind]


def gae(rewards, values, s):
    """Return advantages of the policy's tokens: eq. 16 of Schulman et al. 2016 as a sum."""
    deltas = [
        reward + s.gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        for t, reward in enumerate(rewards)
    ]
    return [
        sum((s.gamma * s.gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))
    ]


@torch.no_grad()
def targets_of(models, rows, s):
    """Return old and reference log-probabilities, values, advantages and returns of policy tokens, for each row."""
    learnt = []
    for row in rows:
        instance = torch.tensor(row.mask)
        lp, ref = (policy(models[name], row, s.temperature)[0][instance] for name in ("actor", "ref"))
        values = scalars(models["critic"], row)[len(row.prompt) - 1 : -1][instance]
        total = row.reward
        if s.reward_model:
            score = float(scalars(models["rm"], row)[-1])
            if row.truncated and s.truncated_score is not None:
                score = s.truncated_score
            if s.clip is not None:
                score = min(max(score, -s.clip), s.clip)
            total += s.weight * score
        coef, kind = s.kl_reward
        rewards = [-coef * float(value) for value in kl(lp, ref, kind)]
        rewards[-1] += total
        advantages = torch.tensor(gae(rewards, values.tolist(), s))
        learnt.append({"lp": lp, "ref": ref, "values": values, "advantages": advantages, "own": instance})
        learnt[-1]["returns"] = advantages + values
    if s.whiten:
        every = torch.cat([row["advantages"] for row in learnt])
        for row in learnt:
            row["advantages"] = (row["advantages"] - every.mean()) / (every.var() + 1e-8).sqrt()
    return learnt


def actor_token_losses(lm, row, learnt, s):
    lp, entropy = (value[learnt["own"]] for value in policy(lm, row, s.temperature))
    advantages, ratio = learnt["advantages"], (lp - learnt["lp"]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * advantages)
    if s.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, s.dual_clip * advantages), gain)
    return s.kl_loss[0] * kl(lp, learnt["ref"], s.kl_loss[1]) - gain - s.ent_coef * entropy


def critic_token_losses(lm, row, learnt, s):
    values = scalars(lm, row)[len(row.prompt) - 1 : -1][learnt["own"]]
    old, returns = learnt["values"], learnt["returns"]
    losses = (values - returns) ** 2
    if s.value_clip is not None:
        near = old + torch.clamp(values - old, -s.value_clip, s.value_clip)
        losses = torch.maximum(losses, (near - returns) ** 2)
    return s.vf_coef * losses / 2


def reference(s, order, rows=ROWS):
    """Return the models after one step of plain gradient descent."""
    models = {name: source.causal().lm for name, source in SOURCES.items() if name in ("actor", "ref")}
    models |= {name: source.scalar().lm for name, source in SOURCES.items() if name in ("critic", "rm")}
    learnt = targets_of(models, rows, s)
    for minibatch in order:
        for name, token_losses, rate in (
            ("critic", critic_token_losses, s.critic_lr),
            ("actor", actor_token_losses, s.actor_lr),
        ):
            losses = torch.cat([token_losses(models[name], rows[i], learnt[i], s) for i in minibatch])
            parameters = [p for p in models[name].parameters() if p.requires_grad]
            gradients = torch.autograd.grad(losses.mean(), parameters)
            size = math.sqrt(sum(float((g * g).sum()) for g in gradients))
            shrink = min(1.0, s.max_grad_norm / size) if s.max_grad_norm else 1.0
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= rate * shrink * gradient
    return models


def distance(one, other):
    """Return the largest difference between weights of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# -- the proofs -------------------------------------------------------------------------------------------------------

KNOBS = {
    "nothing": {},
    "gamma": {"gamma": 0.9},
    "gae_lambda": {"gae_lambda": 0.3},
    "whiten": {"whiten": False},
    "clip_low": {"clip_low": 0.02},
    "clip_high": {"clip_high": 0.02},
    "dual_clip": {"dual_clip": 1.01},
    "value_clip": {"value_clip": 0.05},
    "value_clip_off": {"value_clip": None},
    "vf_coef": {"vf_coef": 0.5},
    "ent_coef": {"ent_coef": 0.1},
    "kl_reward_k1": {"kl_reward": (0.3, "k1")},
    "kl_reward_k2": {"kl_reward": (0.3, "k2")},
    "kl_reward_k3": {"kl_reward": (0.3, "k3")},
    "kl_reward_abs": {"kl_reward": (0.3, "abs")},
    "kl_loss_k1": {"kl_loss": (0.1, "k1")},
    "kl_loss_k2": {"kl_loss": (0.1, "k2")},
    "kl_loss_k3": {"kl_loss": (0.01, "k3")},
    "kl_loss_abs": {"kl_loss": (0.1, "abs")},
    "update_epochs": {"update_epochs": 1},
    "minibatch_size": {"minibatch_size": 2},
    "minibatch_size_uneven": {"minibatch_size": 3},
    "max_grad_norm": {"max_grad_norm": 0.2},
    "temperature": {"temperature": 0.7},
    "reward_model": {"reward_model": True},
    "score_weight": {"reward_model": True, "weight": 0.25},
    "score_clip": {"reward_model": True, "clip": 0.1},
    "truncated_score": {"reward_model": True, "truncated_score": -2.0},
    "everything": {
        "gamma": 0.97, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "ent_coef": 0.01, "temperature": 1.3,
        "kl_reward": (0.1, "k1"), "kl_loss": (0.05, "k3"), "minibatch_size": 3, "max_grad_norm": 1.0,
        "reward_model": True, "clip": 1.0, "truncated_score": -1.0, "weight": 0.5, "vf_coef": 0.7,
    },
}  # fmt: skip
# The setting to compare an option with to show its effect, if it is not the base setting.
WITHOUT = {"score_weight": "reward_model", "score_clip": "reward_model", "truncated_score": "reward_model"}


@pytest.fixture(scope="module")
def unturned():
    """Weights of actor and critic after the base step, and with a reward model."""
    return {}


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("knob", KNOBS)
def test_step_equals_that_of_the_papers_and_every_option_has_an_effect(knob, unturned):
    s = settings(**KNOBS[knob])
    module = trained(s)
    models = reference(s, module.order)
    tolerance = 1e-9 if s.max_grad_norm is None else 1e-6  # torch adds 1e-6 to the norm it divides by
    assert distance(module.actor.lm, models["actor"]) <= tolerance
    assert distance(module.critic.lm, models["critic"]) <= tolerance

    name = WITHOUT.get(knob, "nothing")
    if name not in unturned:
        unturned[name] = trained(settings(**KNOBS[name]))
    other = unturned[name]
    moved = max(distance(module.actor.lm, other.actor.lm), distance(module.critic.lm, other.critic.lm))
    assert moved > 1e-5 or knob == "nothing"
