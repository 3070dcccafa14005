"""``ref: start`` of DPO: log-probs before the first update, compared with a reference that has the same weights."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import DPOModule, KTOModule, PreferenceDataModule
from lightning_rlhf.callbacks import RunCheckpoint, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.preference_losses import IPOLoss
from lightning_rlhf.extras.algorithms.start_logprobs import StartLogprobs, keys_of
from lightning_rlhf.types import SequenceBatch
from tests.helpers import assert_close
from tests.stand_ins import TinyModel, quiet_trainer

pytestmark = pytest.mark.usefixtures("exact")
ROWS = [
    {"prompt": "ab", "chosen": "cd", "rejected": "e"},
    {"prompt": "c", "chosen": "a", "rejected": "bbb"},
    {"prompt": "dd", "chosen": "gfe", "rejected": "a"},
    {"prompt": "e", "chosen": "b", "rejected": "g"},
    {"prompt": "f", "chosen": "abc", "rejected": "cba"},
]


class Watch(Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, *_):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def preference_data():
    letters = CharacterTokenizer("abcdefg")
    return PreferenceDataModule(InMemory(ROWS), letters, val=InMemory(ROWS[:2]), batch_size=2, max_tokens=16)


def run(directory, ref, steps=5, ckpt=None, **options):
    """Return the module and the metrics of each step."""
    module = DPOModule(TinyModel(dtype="float64"), ref=ref, optimizer=partial(torch.optim.SGD, lr=0.5), **options)
    watch = Watch()
    callbacks = complete([watch, RunCheckpoint(every_n_steps=1)])
    settings = {"default_root_dir": str(directory), "callbacks": callbacks, "max_steps": steps, "max_epochs": -1}
    trainer = quiet_trainer(strategy="rlhf_single", enable_checkpointing=True, val_check_interval=2, **settings)
    trainer.fit(module, datamodule=preference_data(), ckpt_path=ckpt)
    return module, watch.rows


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [{}, {"loss": IPOLoss()}, {"sft_coef": 0.5}])
def test_run_equals_that_with_a_copy_as_reference(tmp_path, options):
    copy, expected = run(tmp_path / "copy", None, **options)
    start, metrics = run(tmp_path / "start", "start", **options)
    assert set(copy.sources) == {"actor", "ref"}
    assert set(start.sources) == {"actor"}
    assert [row["train/loss"] for row in expected] != [expected[0]["train/loss"]] * 5
    for row, other in zip(metrics, expected, strict=True):
        for name in (name for name in other if name.startswith(("train/", "val/", "grad_norm"))):
            assert_close(row[name], other[name], rtol=1e-6, atol=1e-9, equal_nan=True)
    for name, weight in start.actor.state_dict().items():
        assert_close(weight, copy.actor.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_resumed_run_has_the_log_probs_of_the_start(tmp_path):
    whole, expected = run(tmp_path / "whole", "start", steps=6)
    run(tmp_path / "parts", "start", steps=3)
    resumed, metrics = run(tmp_path / "parts", "start", steps=6, ckpt=tmp_path / "parts/checkpoints/last.ckpt")
    assert [row["train/loss"] for row in metrics] == [row["train/loss"] for row in expected[3:]]
    for name, weight in resumed.actor.state_dict().items():
        assert torch.equal(weight, whole.actor.state_dict()[name])


def test_checkpoint_of_another_reference_is_an_error(tmp_path):
    run(tmp_path, None, steps=1)
    with pytest.raises(UsageError, match="the checkpoint has no log-probs for ref: start"):
        run(tmp_path, "start", steps=2, ckpt=tmp_path / "checkpoints/last.ckpt")


def test_validation_alone_compares_with_the_model_itself(tmp_path):
    module = DPOModule(TinyModel(dtype="float64"), ref="start")
    trainer = quiet_trainer(strategy="rlhf_single", default_root_dir=str(tmp_path))
    (metrics,) = trainer.validate(module, datamodule=preference_data(), verbose=False)
    assert metrics["val/reward_chosen"] == 0.0
    assert metrics["val/score_margin"] == 0.0
    assert metrics["val/logprob_chosen"] < 0.0


def test_texts_that_were_not_there_at_the_start_are_an_error(tmp_path):
    texts = SequenceBatch(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[False, True, True]]))
    with pytest.raises(RuntimeError, match="a text was not in the data at the start of the run"):
        StartLogprobs().of(texts)


def test_keys_are_those_of_tokens_and_masks_without_padding():
    ids, mask = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 9]]), torch.tensor([[False, True, True, False]] * 2)
    padded = SequenceBatch(ids, torch.tensor([3, 3]), mask)
    one, other = keys_of(padded)
    assert one == other
    masked = SequenceBatch(ids, torch.tensor([3, 3]), mask & torch.tensor([True, True, False, True]))
    assert keys_of(masked)[0] != one
    longer = SequenceBatch(ids, torch.tensor([4, 3]), mask)
    assert keys_of(longer)[0] != one


def test_kto_needs_another_reference():
    with pytest.raises(ValueError, match="KTO also evaluates prompts with responses to others"):
        KTOModule(TinyModel(), ref="start")
