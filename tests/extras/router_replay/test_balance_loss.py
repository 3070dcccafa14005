"""The balance loss of routers equals transformers' own, a loop, and itself in any micro-batches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lightning_rlhf import GRPOModule
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.algorithms.distillation import DistillationModule
from lightning_rlhf.extras.router_replay.replay import RouterReplay
from lightning_rlhf.extras.router_replay.routers import ForcedRouters
from lightning_rlhf.models.causal import hidden_states
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import RoutedExperts
from tests.extras.router_replay.test_replay import LOOP, MOE, Mixture, Silent, trained
from tests.extras.router_replay.test_routers import chosen, others
from tests.models.architectures import tiny
from tests.stand_ins import Response, fit, responses, rollout_of

SGD = partial(torch.optim.SGD, lr=1.0)  # the step is the gradient
COEF = 0.5


def rollout_with(given, model, **changes):
    """Return responses with equal rewards, so that the balance loss is the only one, and the experts of each text."""
    rows = responses(6, seed=4)
    rows = [Response(rows[i - i % 3].prompt, row.tokens, 1.0) for i, row in enumerate(rows)]
    texts = [torch.tensor([*row.prompt, *row.tokens]) for row in rows]
    experts = [given(chosen(model.lm, text[None]))[0] for text in texts]
    for i in range(6):  # all responses to a prompt share its experts
        experts[i][: len(rows[i].prompt)] = experts[i - i % 3][: len(rows[i].prompt)]
    made = rollout_of(rows)
    made.group[:] = torch.arange(6) // 3
    return replace(made, experts=RoutedExperts.of([each[:-1] for each in experts]), **changes), texts, experts, rows


def step(rollout, architecture, callback=None, **options):
    """Return the gradient of each weight in one step, and the metrics."""
    options = {"optimizer": SGD, "max_grad_norm": None, "aggregation": TokenMean(), "kl_loss": KLTerm(), **options}
    module = GRPOModule(Mixture(architecture), **options)
    module.configure_model()
    before = {name: value.clone() for name, value in module.actor.lm.state_dict().items()}
    metrics = fit(module, [rollout], callbacks=[callback or RouterReplay(COEF)]).callback_metrics
    return {name: before[name] - value for name, value in module.actor.lm.state_dict().items()}, metrics


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: value.grad for name, value in model.lm.named_parameters() if value.grad is not None}


def assert_equal_gradients(ours, expected, atol=2e-6):
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=atol)


def test_gradient_is_that_of_transformers_loss_where_the_routers_choose():
    architecture = {**MOE, "decoder_sparse_step": 2}  # transformers averages over the tokens of all layers together
    model = Mixture(architecture).causal()
    rollout, texts, _, rows = rollout_with(lambda own: own, model)
    ours, metrics = step(rollout, architecture)
    logits = []
    for text, row in zip(texts, rows, strict=True):
        (router,) = model.lm(text[None], output_router_logits=True).router_logits
        logits.append(router.view(len(text), -1)[len(row.prompt) - 1 : -1])
    loss = load_balancing_loss_func((torch.cat(logits),), 4, 2)
    assert metrics["loss/balance"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_equal_gradients(ours, gradients_of(model, COEF * loss))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # they choose from probabilities, and from logits
def test_gradient_is_that_of_a_loop_with_other_experts(name):
    architecture = {**tiny(name), "vocab_size": 11}
    model = FromConfig(architecture, seed=0).causal()
    rollout, texts, experts, rows = rollout_with(others, model)
    ours, metrics = step(rollout, architecture)
    routers = [layer.mlp.gate if name == "qwen3_moe" else layer.mlp.router for layer in model.lm.model.layers]
    seen = [[], []]
    handles = [
        router.register_forward_hook(lambda module, args, output, layer=layer: seen[layer].append(args[0]))
        for layer, router in enumerate(routers)
    ]
    ForcedRouters(model.lm)
    counts, tokens = torch.zeros(2, 4), 0
    for text, each, row in zip(texts, experts, rows, strict=True):
        hidden_states(model.lm, text[None], None, experts=RoutedExperts.of([each]))
        for position in range(len(row.prompt) - 1, len(text) - 1):
            tokens += 1
            for layer in range(2):
                for expert in each[position, layer]:
                    counts[layer, expert] += 1
    loss = 0
    for layer, router in enumerate(routers):
        for text, row in enumerate(rows):
            states = seen[layer][text].view(-1, 32)
            logits = states @ router.weight.T + getattr(router, "bias", torch.zeros(4))
            for position in range(len(row.prompt) - 1, len(texts[text]) - 1):
                shares = logits[position].exp() / logits[position].exp().sum()
                loss = loss + 4 * sum(counts[layer, i] / tokens * shares[i] for i in range(4)) / (2 * tokens)
    for handle in handles:
        handle.remove()
    assert metrics["loss/balance"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_equal_gradients(ours, gradients_of(model, COEF * loss))


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 20}, {"packing": False}, {"minibatch_size": 6}])
def test_layout_changes_nothing(options):
    model = Mixture().causal()
    rollout, *_ = rollout_with(others, model)
    whole, metrics = step(rollout, MOE)
    parts, metrics_of_parts = step(rollout, MOE, **options)
    assert metrics_of_parts["loss/balance"] == pytest.approx(float(metrics["loss/balance"]), rel=1e-5)
    assert_equal_gradients(parts, whole)


def test_checkpointing_of_activations_changes_nothing():
    rollout, *_ = rollout_with(others, Mixture().causal())
    whole, _ = step(rollout, MOE)

    class Checkpointing(RouterReplay):
        def on_fit_start(self, trainer, pl_module):
            pl_module.actor.lm.gradient_checkpointing_enable({"use_reentrant": False})
            super().on_fit_start(trainer, pl_module)

    again, _ = step(rollout, MOE, Checkpointing(COEF), micro_batch_tokens=20)
    assert_equal_gradients(again, whole)


def nothing(completions):
    return [0.0] * len(completions)


class Violations(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.values.append(float(trainer.callback_metrics["router/max_violation_mean"]))


@pytest.mark.slow
def test_experts_are_used_more_evenly_with_it(run):
    def violation(coef):
        violations = Violations()
        run(
            loop={"engine": TransformersEngine(), **LOOP, "rewards": [RewardFunction(nothing)]}
            | {"max_response_tokens": 40, "group_size": 8},
            model={"actor": Mixture(), "minibatch_size": 32, "update_epochs": 1, "optimizer": partial(SGD, lr=0.3)},
            data={"batch_size": 4},
            trainer={"max_steps": 20, "max_epochs": -1, "enable_checkpointing": False},
            callbacks=[RouterReplay(coef), violations],
        ).fit()
        return sum(violations.values[-8:]) / 8

    assert violation(5.0) < 0.6 * violation(0.0)


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_steps_without_an_update_of_the_actor_are_no_error(run, coef):
    model = {"critic_warmup_steps": 2, "correction": RolloutCorrection(bypass=True), "policy_loss": ReinforceLoss()}
    done, steps = trained(run, TransformersEngine(), [RouterReplay(coef)], model=model)
    assert len(steps) == 3
    assert done.metrics["router/replaced_fraction"] == 0


def test_missing_experts_are_named_before_the_first_update(run):
    with pytest.raises(RunError, match="nothing to balance: the engine returned no experts"):
        trained(run, Silent(), [RouterReplay(0.1)])


def test_what_cannot_have_it_is_rejected(run):
    dots = {**tiny("dots1"), "vocab_size": 11}
    with pytest.raises(UsageError, match="'dots1' has no such loss for its routers"):
        trained(run, TransformersEngine(), [RouterReplay(0.1)], model={"actor": Mixture(dots)})
    with pytest.raises(ValueError, match="balance_coef must be at least 0"):
        RouterReplay(-1.0)
    model = DistillationModule(Mixture(), Mixture(seed=1))
    rollout, *_ = rollout_with(others, Mixture().causal())
    with pytest.raises(RunError, match="DistillationModule does not add those of callbacks: remove balance_coef"):
        fit(model, [rollout], callbacks=[RouterReplay(0.1)])
