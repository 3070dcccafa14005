"""Every metric that runs log has a row in docs/metrics.md, and every row is logged by some run."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_rlhf import (
    DistillationModule,
    DPOModule,
    ECHOModule,
    KTOModule,
    MixtureModule,
    OnlineDPOModule,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RankingDataModule,
    RankingRewardModule,
    REBELModule,
    RewardModule,
    RLHFModule,
    SFTModule,
    UnpairedDataModule,
)
from lightning_rlhf.callbacks import (
    DynamicSampling,
    EntropyControl,
    PolicyCheck,
    RolloutLog,
    RolloutLoop,
    RouterReplay,
    Throughput,
)
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.extras.algorithms.mixture import RewardObjective, SupervisedObjective
from lightning_rlhf.extras.algorithms.policy_losses import DROLoss
from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline
from lightning_rlhf.extras.records import throughput
from lightning_rlhf.extras.report.definitions import definitions, expanded
from lightning_rlhf.extras.samplers.adaptive import Adaptive
from lightning_rlhf.extras.samplers.row_weights import Pools
from lightning_rlhf.objectives.base import PolicyLoss
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.rejections import Rejection
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus
from lightning_rlhf.rewards.function import _RESERVED_LABELS, RewardFunction, check_rewards
from lightning_rlhf.rollout.engine import EngineTraits
from lightning_rlhf.rollout.given_responses import GivenResponses
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import SequenceBatch
from tests.environments import worlds
from tests.extras.router_replay.test_replay import Mixture
from tests.helpers import concrete_objectives
from tests.metric_definitions import WRITTEN, content, table
from tests.stand_ins import ScriptedEngine, TinyModel, fit, quiet_trainer, responses, rollout_of

ROOT = Path(__file__).resolve().parents[1]
SGD = partial(torch.optim.SGD, lr=0.01)
LETTERS = CharacterTokenizer("abcdefg")
PROMPTS = [{"prompt": letter, "source": "one" if letter < "c" else "two"} for letter in "abcd"]
PAIRS = InMemory([{"prompt": "a", "chosen": "bb", "rejected": "cc"}] * 4)
RANKED = InMemory([{"prompt": "a", "responses": ["b", "ab", "bb"], "ranks": [1, 2, 2]}] * 2)
JUDGED = InMemory([{"prompt": "a", "completion": "bb", "label": label} for label in (True, False)] * 2)


def style(completions, log_metric):
    log_metric("words", 1.0)
    return [float(len(text)) for text in completions]


def right(completions):
    return [float(text.startswith("a")) for text in completions]


def votes(completions):
    return [text[:1] for text in completions]


def run(directory, module, data, callbacks, steps=1):
    trainer = quiet_trainer(default_root_dir=directory, callbacks=callbacks, max_steps=steps, val_check_interval=1)
    trainer.fit(module, datamodule=data)
    return trainer.callback_metrics


def a_whole_ppo_run(directory):
    """Run PPO with all optional parts: reference, reward model, validation with majority votes and sources."""
    engine = ScriptedEngine(["a", "bb", "ab", "c", "abcdefg"], LETTERS.load())
    rewards = [RewardFunction(style, on_error="skip"), RewardFunction(right)]
    loop = RolloutLoop(
        rewards, engine, group_size=2, max_response_tokens=4, val_samples=3, val_metric="right", val_answer=votes,
        max_logprob_diff=100.0,
    )  # fmt: skip
    module = PPOModule(
        TinyModel(), ref=TinyModel(seed=1), reward_model=TinyModel(seed=2), kl_reward=KLTerm(0.1),
        kl_loss=KLTerm(0.1, "k3"), minibatch_size=4,
    )  # fmt: skip
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, val=InMemory(PROMPTS), batch_size=2, max_tokens=4)
    return run(directory, module, data, [Throughput(1.0), loop, RolloutLog(table_every_n_steps=0)])


def dynamic_sampling(directory):
    loop = RolloutLoop(
        [RewardFunction(right)], ScriptedEngine("ab", LETTERS.load()), group_size=2, max_response_tokens=4,
        check_rows=0, dynamic_sampling=DynamicSampling(2),
    )  # fmt: skip
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, batch_size=4, max_tokens=4, sampler=Adaptive([Pools()]))
    return run(directory, RLHFModule(TinyModel(), advantages=GRPO(), minibatch_size=4), data, [loop])


def mixture_of_experts(directory):
    loop = RolloutLoop([RewardFunction(right)], TransformersEngine(), group_size=2, max_response_tokens=4, top_k=6)
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, batch_size=4, max_tokens=4)
    module = RLHFModule(Mixture(), advantages=GRPO(), minibatch_size=4)
    return run(directory, module, data, [loop, RouterReplay(0.1)])


class RestartedEngine(ScriptedEngine):
    """Engine that starts again after a failure."""

    @property
    def traits(self):
        return EngineTraits(restarts=True)


def rollouts_ahead(directory):
    engine = RestartedEngine("ab", LETTERS.load())
    loop = RolloutLoop([RewardFunction(right)], engine, max_response_tokens=4, check_rows=0, max_staleness=1)
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, batch_size=2, max_tokens=4)
    module = RLHFModule(TinyModel(), correction=RolloutCorrection("token"), minibatch_size=2)
    return run(directory, module, data, [loop], steps=2)


def conversations(directory):
    loop = RolloutLoop(
        [], ScriptedEngine(["a", "bb"], LETTERS.load()), group_size=2, max_response_tokens=8, check_rows=0,
        environment=EnvironmentSettings(worlds.Guess, bridge="plain", max_turns=2, timeout_s=None),
    )  # fmt: skip
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, val=InMemory(PROMPTS), batch_size=2, max_tokens=4)
    module = ECHOModule(TinyModel(), minibatch_size=4)
    return run(directory, module, data, [loop])


def distillation(directory):
    loop = RolloutLoop([], ScriptedEngine("ab", LETTERS.load()), max_response_tokens=4, check_rows=0)
    data = PromptDataModule(InMemory(PROMPTS), LETTERS, val=InMemory(PROMPTS), batch_size=2, max_tokens=4)
    return run(directory, DistillationModule(TinyModel(), TinyModel(seed=1), minibatch_size=2), data, [loop])


def mixture(directory):
    loop = RolloutLoop(
        [RewardFunction(right)],
        ScriptedEngine("ab", LETTERS.load()),
        group_size=2,
        max_response_tokens=4,
        check_rows=0,
        given_responses=GivenResponses(on_policy={"two": 0.0}),
    )
    objectives = {"one": RewardObjective(), "two": SupervisedObjective()}
    rows = [{**row, "completion": "ab"} for row in PROMPTS]
    data = PromptDataModule(InMemory(rows), LETTERS, batch_size=4, max_tokens=4)
    return run(directory, MixtureModule(TinyModel(), objectives, minibatch_size=8), data, [loop])


def adapted_entropy(directory):
    module = RLHFModule(TinyModel(), minibatch_size=4)
    return fit(module, [rollout()], callbacks=[EntropyControl(target=0.5)]).callback_metrics


def policy_losses(directory):
    result = {}
    for kind in concrete_objectives(PolicyLoss):
        loss = kind(beta=0.5) if kind is DROLoss else kind()
        result |= fit(RLHFModule(TinyModel(), policy_loss=loss, minibatch_size=4), [rollout()]).callback_metrics
    return result


def corrections(directory):
    rejections = [Rejection(k, level, 2.0) for level, k in (("token", "k1"), ("sequence_mean", "k3"))]
    correction = RolloutCorrection("token", batch_normalize=True, rejections=tuple(rejections))
    result = {}
    for advantages, chosen in (
        (OptimalTokenBaseline(), correction),
        (ReinforcePlusPlus(), RolloutCorrection(bypass=True)),
    ):
        module = RLHFModule(TinyModel(), advantages=advantages, correction=chosen, minibatch_size=4)
        result |= fit(module, [rollout()]).callback_metrics
    return result


def supervised(directory):
    ids = torch.tensor([[1, 3, 4, 2], [1, 5, 2, 0]])
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    texts = SequenceBatch(ids, torch.tensor([4, 3]), mask)
    result = dict(fit(SFTModule(TinyModel(), optimizer=SGD), [texts], val=[texts]).callback_metrics)
    check = PolicyCheck(TinyModel(seed=1), InMemory(PROMPTS), rule=RewardFunction(right), max_response_tokens=6)
    data = PreferenceDataModule(PAIRS, LETTERS, val=PAIRS, batch_size=2)
    return result | run(directory, RewardModule(TinyModel(), optimizer=SGD), data, [check])


def preferences(directory):
    pairs = PreferenceDataModule(PAIRS, LETTERS, val=PAIRS, batch_size=2)
    judged = UnpairedDataModule(JUDGED, LETTERS, val=JUDGED, batch_size=2)
    result = dict(run(directory, DPOModule(TinyModel(), optimizer=SGD, sft_coef=1.0), pairs, []))
    result |= run(directory, KTOModule(TinyModel(), optimizer=SGD), judged, [])
    ranked = RankingDataModule(RANKED, LETTERS, val=RANKED, batch_size=2)
    result |= run(directory, RankingRewardModule(TinyModel(), optimizer=SGD), ranked, [])
    for module in (OnlineDPOModule, REBELModule):
        result |= fit(module(TinyModel(), minibatch_size=8), [rollout()]).callback_metrics
    return result


def rollout():
    made = rollout_of(responses(8, seed=5))
    made.group[:] = torch.arange(8) // 2
    return made


RUNS = (
    a_whole_ppo_run, dynamic_sampling, rollouts_ahead, conversations, distillation, mixture, mixture_of_experts,
    adapted_entropy, policy_losses, corrections, supervised, preferences,
)  # fmt: skip


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Names of the metrics that each run logs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("max_memory_allocated", "max_memory_reserved"):
            patch.setattr(torch.cuda, name, lambda _: 2**30)
        result = {"memory of a GPU": set(throughput.memory(torch.device("cuda")))}
    return result | {kind.__name__: set(kind(tmp_path_factory.mktemp(kind.__name__))) for kind in RUNS}


REWARDS = ("style", "right", "given", "environment")
PLACEHOLDERS = {
    "<reward>": f"({'|'.join(sorted(REWARDS))})",
    "<role>": "[a-z_]+",
    "<source>": "(one|two)",
    "<k>": "[0-9]+",
    "<n>": "[0-9]+",
    "<option>": "(token|sequence_sum|sequence_mean|sequence_max)_k[123]",
    "<metric>": "found",
    "<key>": "(?!not_applicable$|errors$|timeouts$)[^/]+",
}
LOGGED, NOT_LOGGED = (ROOT / "docs/metrics.md").read_text().split("## Not logged")
ROWS = re.findall("^\\| `(.*?)` \\|", LOGGED, re.MULTILINE)


NAMES = [name for row in ROWS for name in expanded(row)]


def matches(row, name):
    """Return whether a logged name matches the row name, which may contain placeholders."""
    pattern = re.escape(row)
    for placeholder, values in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(placeholder), values)
    return re.fullmatch(pattern, name) is not None


def rows_of(name):
    """Return the rows that match a logged name; rows over all sources come before those of one source."""
    rows = [row for row in NAMES if matches(row, name)]
    of_source, of_conversations = re.sub("^val/(one|two)/", "val/", name), re.sub("^val/env/", "env/", name)
    return rows or [row for row in NAMES if matches(row, of_source) or matches(row, of_conversations)]


@pytest.mark.slow
def test_every_logged_metric_has_exactly_one_row(logged):
    every = set().union(*logged.values())
    assert {name: rows for name in every if len(rows := rows_of(name)) != 1} == {}
    assert any(name.startswith("val/one/") for name in every)


@pytest.mark.slow
def test_page_defines_every_metric_as_its_row_does(logged):
    assert WRITTEN.read_text() == content(), "run python -m tests.metric_definitions"
    rows = {name: item for row, item in table().items() for name in expanded(row)}
    for name in set().union(*logged.values()):
        (row,) = rows_of(name)
        unit, meaning = rows[row]
        assert unit
        assert meaning
        assert definitions([name]) == {name: {"unit": unit, "meaning": meaning}}, name


def test_user_metrics_have_no_definition():
    assert definitions(["mine", "val/eval/mine", "reward/a/b"]) == {}


@pytest.mark.slow
def test_every_row_is_logged_by_a_run(logged):
    seen = {row for result in logged.values() for name in result for row in rows_of(name)}
    assert set(NAMES) - seen == set()


def test_names_are_in_one_row_and_are_not_both_logged_and_excluded():
    assert len(NAMES) == len(set(NAMES)) > 150
    assert not set(NAMES) & set(re.findall("^\\| `(.*?)` \\|", NOT_LOGGED, re.MULTILINE))


def test_row_matches_values_of_its_placeholders():
    best, worst = expanded("val/<reward>_{best,worst}@<k>")
    assert matches(best, "val/right_best@16")
    assert matches(worst, "val/right_worst@2")
    for wrong in ("val/left_best@16", "val/right_best@", "val/right_best@k", "val/right_best@2_std", "right_best@2"):
        assert not matches(best, wrong)


def test_metric_names_are_not_allowed_as_reward_names():
    of_rewards = {name.removeprefix("reward/") for name in NAMES if name.startswith("reward/") and "<" not in name}
    assert of_rewards | {"score"} == _RESERVED_LABELS


def test_every_table_row_has_all_columns():
    for part, bars in ((LOGGED, 6), (NOT_LOGGED, 3)):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        assert rows
        assert all(len(re.findall(r"(?<!\\)\|", line)) == bars for line in rows)


def test_metric_name_is_not_a_folder_of_another_metric():
    """MLflow's file store turns names into files and folders."""
    assert [(one, other) for one in NAMES for other in NAMES if other.startswith(f"{one}/")] == []


def test_reward_name_makes_no_folder():
    with pytest.raises(ValueError, match="a reward cannot be called 'a/b': '/' creates folders"):
        check_rewards([RewardFunction(style, name="a/b")], [])
