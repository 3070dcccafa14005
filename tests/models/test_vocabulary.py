"""Token ids of models must agree with the run's tokenizer."""

import re

import pytest
from transformers import AutoTokenizer

from lightning_rlhf import PPOModule, PromptDataModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.stand_ins import TINY_LLAMA, HandOver, TinyModel, quiet_trainer


@pytest.fixture
def saved(tmp_path):
    """Write a tiny model of the given number of tokens, with a tokenizer of the given letters."""

    def saved(name, size=11, letters=None):
        TinyModel(TINY_LLAMA | {"vocab_size": size}).causal().save_pretrained(tmp_path / name)
        if letters is not None:
            CharacterTokenizer(letters).load().save_pretrained(tmp_path / name)
        return Pretrained(str(tmp_path / name))

    return saved


def refused(roles, tokenizer, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_vocabularies(roles, tokenizer)


def test_embedding_padded_to_another_size_is_accepted(saved, tokenizer):
    roles = {"the actor": saved("actor", 12, "abcdefg"), "the reward_model": saved("reward", 16, "abcdefg")}
    check_vocabularies(roles, tokenizer)
    check_vocabularies(roles, None)


def test_different_tokens_of_the_same_number_are_rejected_and_the_first_is_reported(saved, tokenizer):
    roles = {"the actor": saved("actor", letters="abcdefg"), "the reward_model": saved("reward", letters="abdcefg")}
    message = (
        "the reward_model was trained with another tokenizer: in its tokenizer 'c' is 7, in {} 'c' is 6; all roles must"
    )
    refused(roles, tokenizer, message.format("the run's"))
    refused(roles, None, message.format("the actor's"))


@pytest.mark.parametrize(
    ("letters", "message"),
    [
        ("abcdef", "in its tokenizer 'g' is unknown, in the run's 'g' is 10"),
        ("abcdefgh", "in its tokenizer 'h' is 11, in the run"),
    ],
)
def test_token_of_only_one_tokenizer_is_reported(saved, tokenizer, letters, message):
    roles = {"the actor": TinyModel(), "the critic": saved("critic", 16, letters)}
    refused(roles, tokenizer, f"the critic was trained with another tokenizer: {message}")


def test_tokenizer_of_the_actor_must_be_that_of_the_run(saved, tokenizer):
    roles = {"the actor": saved("actor", letters="gfedcba")}
    refused(
        roles,
        tokenizer,
        "the actor was trained with another tokenizer: in its tokenizer 'a' is 10, in the run's 'a' is 4",
    )


def test_model_without_a_tokenizer_must_be_as_large_as_the_actor(saved, tokenizer):
    actor = saved("actor", 12, "abcdefg")
    check_vocabularies({"the actor": actor, "the critic": saved("same", 12)}, tokenizer)
    for other in (saved("larger", 13), TinyModel(), TinyModel(TINY_LLAMA | {"vocab_size": 13})):
        size = other.hf_config().vocab_size
        message = f"vocabulary sizes differ (the critic {size}, the actor 12), and there is no tokenizer to compare"
        refused({"the actor": actor, "the critic": other}, tokenizer, message)


def test_model_with_fewer_tokens_than_the_tokenizer_is_rejected(saved, tokenizer):
    small = {"the actor": saved("actor", letters="abcdefg"), "the critic": saved("critic", 10, "abcdefg")}
    refused(small, tokenizer, "the tokenizer has 11 tokens, the critic only 10: use the tokenizer that belongs to")


def test_unreadable_tokenizer_is_reported(saved, tokenizer, tmp_path):
    actor = saved("actor")
    (tmp_path / "actor/tokenizer.json").write_text("{")
    message = f"the tokenizer of the actor at '{actor.path}' cannot be read, so it cannot be compared with the run's: "
    refused({"the actor": actor}, tokenizer, message)


# -- under a Trainer ---------------------------------------------------------------------------------------------------


class Fed(HandOver):
    def on_train_batch_start(self, *args):
        pytest.fail("it trained")


def set_up(module):
    data = PromptDataModule(InMemory([{"prompt": "a"}] * 2), CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=4)
    quiet_trainer(callbacks=[Fed()]).fit(module, datamodule=data)


def test_each_source_is_read_once_before_any_weight(saved, monkeypatch):
    actor, reward = saved("actor", 12, "abcdefg"), saved("reward", 16, "abcdefgh")
    module, read = PPOModule(actor, kl_reward=KLTerm(0.1), critic="actor", reward_model=reward), []
    real = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **how: read.append(path) or real(path, **how))
    with pytest.raises(
        ValueError, match=r"^the reward_model was trained with another tokenizer: in its tokenizer 'h' is 1"
    ):
        set_up(module)
    assert read == [actor.path, reward.path]
    assert not module.built


def test_roles_are_compared_with_the_tokenizer_of_the_run(saved):
    module = PPOModule(saved("actor", 12, "gfedcba"))
    with pytest.raises(
        ValueError, match=r"^the actor was trained with another tokenizer: in its tokenizer 'a' is 10, in the"
    ):
        set_up(module)
    assert not module.built
