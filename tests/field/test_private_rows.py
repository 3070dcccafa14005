"""Whatever code of users changes reaches no other response, no other reward and no later epoch."""

import copy
import threading
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

from lightning_rlhf import FromConfig, GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.calls.private import private
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments.protocol import Reply
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.stand_ins import TINY_LLAMA, quiet_trainer

ROWS = [
    {"prompt": "ab", "extra_info": {"tests": [1, 2, 3]}, "tags": ["x"], "answer": "a", "shelf": {"cards": [[1], [2]]}}
] * 2
SEEN = []


def damage(value):
    """Change everything in a value that can be changed."""
    if isinstance(value, list):
        for item in value:
            damage(item)
        value.append("changed")
    elif isinstance(value, dict):
        for item in list(value.values()):
            damage(item)
        value["changed"] = True


def damaging(completions, prompts, completion_ids, finished, extra_info, tags, shelf, limits):
    SEEN.append(copy.deepcopy((extra_info, tags, shelf, limits, [len(ids) for ids in completion_ids])))
    count = len(completions)
    for value in (completions, prompts, completion_ids, finished, extra_info, tags, shelf, limits):
        damage(value)
    return [0.0] * count


def of_verl(solution_str, ground_truth, extra_info=None):
    SEEN.append(copy.deepcopy(extra_info))
    damage(extra_info)
    return 0.0


@dataclass
class Damages:
    """An environment that changes all that it is given."""

    cards: list = field(default_factory=list)

    async def reset(self, row, seed):
        SEEN.append(copy.deepcopy({name: row[name] for name in ("extra_info", "tags", "shelf")} | {"own": self.cards}))
        damage(row)
        damage(self.cards)
        return ""

    async def step(self, turn):
        damage(turn.calls)
        return Reply(reward=0.0, done=True)


def train(tmp_path, rewards, **loop):
    data = PromptDataModule(InMemory(copy.deepcopy(ROWS)), CharacterTokenizer("abcd"), batch_size=2)
    module = GRPOModule(FromConfig({**TINY_LLAMA, "vocab_size": 8}, seed=0), minibatch_size=4)
    callback = RolloutLoop(rewards=rewards, engine=TransformersEngine(), group_size=2, max_response_tokens=3, **loop)
    options = {"max_epochs": 3, "default_root_dir": tmp_path, "use_distributed_sampler": False}
    quiet_trainer(callbacks=[callback], **options).fit(module, datamodule=data)
    return module


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def test_a_reward_changes_its_own_arguments_only(tmp_path):
    limits = {"limits": [1]}
    rewards = [RewardFunction(damaging, name=name, arguments=limits, dry_call=False) for name in ("one", "two")]
    module = train(tmp_path, rewards)
    whole = ([ROWS[0]["extra_info"]] * 4, [["x"]] * 4, [ROWS[0]["shelf"]] * 4, [1])
    assert [seen[:4] for seen in SEEN] == [whole] * 6
    lengths = module.last_step.experience.rollout.response_lengths.tolist()
    assert SEEN[-1][4] == SEEN[-2][4] == lengths
    assert limits == {"limits": [1]}


@pytest.mark.parametrize("per_sample", [True, None])
def test_a_reward_of_verl_changes_its_own_row_only(tmp_path, per_sample):
    train(tmp_path, [RewardFunction(of_verl, per_sample=per_sample, dry_call=False)])
    assert [ROWS[0]["extra_info"]] * 12 == SEEN


def test_an_environment_in_the_event_loop_changes_its_own_row_only(tmp_path):
    arguments = {"cards": [1, 2]}
    settings = EnvironmentSettings(Damages, arguments, bridge="plain", max_turn_tokens=3)
    train(tmp_path, [], environment=settings)
    expected = {name: ROWS[0][name] for name in ("extra_info", "tags", "shelf")} | {"own": [1, 2]}
    assert [expected] * 12 == SEEN
    assert arguments == {"cards": [1, 2]}


def test_entries_that_are_one_object_become_two():
    shared = {"tests": [1]}
    first, second = private([shared, shared])
    assert first == second == shared
    assert first is not second
    assert first["tests"] is not second["tests"]


@pytest.mark.parametrize("objects", [True, False])
def test_a_read_only_mapping_becomes_a_dictionary_of_its_own(objects):
    tests = [1]
    copied = private([MappingProxyType({"tests": tests})], objects)
    assert copied == [{"tests": [1]}]
    assert type(copied[0]) is dict
    assert copied[0]["tests"] is not tests


def test_an_object_that_cannot_be_copied_is_passed_on():
    lock = threading.Lock()
    assert private([{"lock": lock, "tests": [1]}]) == [{"lock": lock, "tests": [1]}]
