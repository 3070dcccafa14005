"""Every estimator with every policy loss and every aggregation takes a real step, independent of micro-batches."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule, RLHFModule
from lightning_rlhf.extras.algorithms import group_advantages as rarer
from lightning_rlhf.extras.algorithms.advantages_by_source import AdvantagesBySource
from lightning_rlhf.extras.algorithms.group_advantages import BestAgainstWorst
from lightning_rlhf.extras.algorithms.policy_losses import DROLoss
from lightning_rlhf.extras.algorithms.teacher_advantages import NoAdvantages, TeacherLogRatio
from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline, ToolOptimalTokenBaseline
from lightning_rlhf.extras.algorithms.verl_corrections import VerlCorrection
from lightning_rlhf.objectives import group_advantages as groups
from lightning_rlhf.objectives import policy_losses as tokens
from lightning_rlhf.objectives import return_advantages as returns
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.aggregation import (
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
    TokenSum,
)
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import StepRollout
from tests.helpers import concrete_objectives
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer, responses, rollout_of

ESTIMATORS = [
    GAE(bootstrap_truncated=True),
    groups.GRPO(),
    groups.GRPO(normalize_std=False),
    rarer.GRPOPassK(),
    rarer.MaxRL(),
    groups.RLOO(),
    rarer.OPO(),
    rarer.GPG(),
    rarer.ReinforcePlusPlusBaseline(),
    rarer.GDPO(("given", "style")),
    returns.ReinforcePlusPlus(gamma=0.9),
    returns.ReMax(),
    OptimalTokenBaseline(),
    ToolOptimalTokenBaseline(),
]
SETTINGS = {tokens.ClippedPolicyLoss: {"clip_range": 0.05, "dual_clip": 1.1}, DROLoss: {"beta": 0.5}}
LOSSES = [kind(**SETTINGS.get(kind, {})) for kind in concrete_objectives(PolicyLoss)]
AGGREGATIONS = [TokenMean(), TokenSum(), SequenceMeanTokenSum(scale=7.0), SequenceMeanTokenMean()]
PAIRS = [(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS]
NAMES = [type(estimator).__name__ for estimator in ESTIMATORS]


def rollouts():
    """Return six responses to two prompts, and the two greedy ones."""
    rollout = rollout_of(responses(6, seed=3, observations=True), dtype=torch.float64)
    rollout.group[:] = torch.tensor([0, 0, 0, 1, 1, 1])
    rollout.rewards["style"] = torch.tensor([0.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    return rollout, rollout_of(responses(2, seed=4), dtype=torch.float64)


class EachPair(Callback):
    """Sets other objectives and the initial weights before each step, and records the change of the weights."""

    provides_rollouts = True

    def __init__(self, pairs):
        self.pairs, self.moves = pairs, []

    def on_train_start(self, trainer, module):
        self.first = copy.deepcopy(module.actor.state_dict())

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.actor.load_state_dict(self.first)
        module.policy_loss, module.aggregation = self.pairs[batch_idx]
        module.receive(StepRollout(*rollouts()))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = module.actor.state_dict()
        self.moves.append(torch.cat([(now[name] - self.first[name]).flatten() for name in now]))


SMALL = {**TINY_LLAMA, "num_hidden_layers": 1}


def moves(estimator, pairs, micro_batch_tokens):
    """Return the change of the actor's weights for each pair of loss and aggregation."""
    kind = PPOModule if estimator.needs_critic else RLHFModule
    sgd = partial(torch.optim.SGD, lr=0.05)
    options = {"critic_optimizer": partial(torch.optim.SGD, lr=0.0)} if estimator.needs_critic else {}
    module = kind(
        TinyModel(SMALL, dtype="float64"),
        ref=TinyModel(SMALL, seed=1, dtype="float64"),
        advantages=estimator,
        correction=VerlCorrection.decoupled_token_is(),
        kl_reward=KLTerm(0.1 if estimator.reads_total_reward else 0.0),
        kl_loss=KLTerm(0.01, "k3"),
        ent_coef=0.01,
        optimizer=sgd,
        update_epochs=1,
        minibatch_size=3,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=None,
        **options,
    )
    each_pair = EachPair(pairs)
    trainer = quiet_trainer(callbacks=[each_pair], max_steps=len(pairs))
    trainer.fit(module, torch.utils.data.DataLoader([0] * len(pairs), batch_size=None))
    return each_pair.moves


def check(estimator, pairs):
    both = zip(moves(estimator, pairs, 13), moves(estimator, pairs, 10**6), strict=True)
    for (loss, aggregation), (small, large) in zip(pairs, both, strict=True):
        name = f"{type(loss).__name__} with {type(aggregation).__name__}"
        assert large.isfinite().all(), name
        assert large.abs().max() > 1e-6, name
        assert (small - large).abs().max() <= 1e-8, name


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("number", range(len(ESTIMATORS)), ids=NAMES)
def test_every_estimator_steps_with_one_pair_of_loss_and_aggregation(number):
    """Estimators and losses share only tensors of one shape, so that each is tested with a few of the others."""
    check(ESTIMATORS[number], [PAIRS[7 * number % len(PAIRS)], PAIRS[(7 * number + 30) % len(PAIRS)]])


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_every_pair_of_loss_and_aggregation_steps_with_one_estimator():
    check(groups.GRPO(), PAIRS)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_every_combination_steps_independent_of_micro_batches(estimator):
    check(estimator, PAIRS)


def test_matrix_holds_all_objectives():
    # BestAgainstWorst marks responses for online DPO, which combines with no policy loss; NoAdvantages has no loss.
    # TeacherLogRatio needs a teacher, AdvantagesBySource sources: tests/extras/algorithms has them.
    others = {BestAgainstWorst, NoAdvantages, TeacherLogRatio, AdvantagesBySource}
    assert set(concrete_objectives(AdvantageEstimator)) - others == {type(estimator) for estimator in ESTIMATORS}
    assert len(LOSSES) >= 14


# -- combinations that make no sense --------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if not e.needs_critic], ids=NAMES[1:])
def test_unused_critic_is_rejected(estimator):
    name = type(estimator).__name__
    with pytest.raises(
        ValueError, match=f"^PPOModule needs an advantage estimator with a critic such as GAE, got {name}: use the"
    ):
        PPOModule(TinyModel(), advantages=estimator)


def test_estimator_without_its_critic_is_rejected():
    with pytest.raises(
        ValueError, match=r"^GAE needs a critic, which RLHFModule does not have: use PPOModule, or an est"
    ):
        RLHFModule(TinyModel(), advantages=GAE())


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.uses_ratio], ids=lambda loss: type(loss).__name__)
def test_importance_weights_with_a_constant_ratio_are_rejected(loss):
    correction = RolloutCorrection(level="token", bypass=True)
    with pytest.raises(ValueError, match=f"the ratio of {type(loss).__name__} is the importance weight already"):
        RLHFModule(TinyModel(), policy_loss=loss, correction=correction)
    RLHFModule(TinyModel(), policy_loss=loss, correction=RolloutCorrection(bypass=True))
    RLHFModule(TinyModel(), policy_loss=tokens.ReinforceLoss(), correction=correction)


def test_token_baseline_without_a_pass_of_the_actor_is_rejected():
    with pytest.raises(
        ValueError, match=r"^OptimalTokenBaseline evaluates the actor on every response, which bypass leaves"
    ):
        RLHFModule(TinyModel(), advantages=OptimalTokenBaseline(), correction=RolloutCorrection(bypass=True))


@pytest.mark.parametrize("unseen", [{"reward_model": TinyModel()}, {"kl_reward": KLTerm(0.1)}])
def test_options_that_gdpo_ignores_are_rejected(unseen):
    with pytest.raises(ValueError, match=r"^GDPO uses only its own reward keys, so reward_model and kl_reward"):
        RLHFModule(TinyModel(), advantages=rarer.GDPO(("given",)), **unseen)
    RLHFModule(TinyModel(), advantages=rarer.GDPO(("given",)), kl_loss=KLTerm(0.1, "k3"))
