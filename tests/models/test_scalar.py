"""ScalarModel evaluates the classifier of transformers at any position, and stores its scale with its weights."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.scalar import ScalarModel
from tests.helpers import assert_close, normal
from tests.stand_ins import TINY_LLAMA, VOCABULARY, TinyModel

LENGTHS = torch.tensor([7, 3, 5])


def texts():
    """Return texts padded on the right with the padding token, which is not used elsewhere."""
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(torch.arange(7) >= LENGTHS.unsqueeze(1), 0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_score_of_the_last_token_equals_that_of_the_classifier(family):
    model = FromConfig(TINY_LLAMA | {"model_type": family}, seed=0).scalar()
    torch.nn.init.normal_(model.lm.score.weight)
    ids = texts()
    ours = model(ids, (LENGTHS - 1).unsqueeze(1)).squeeze(1)
    theirs = model.lm(ids, attention_mask=(torch.arange(7) < LENGTHS.unsqueeze(1)).long()).logits.squeeze(1)
    assert_close(ours, theirs, atol=1e-6)
    parameters = list(model.parameters())
    for one, other in zip(*(torch.autograd.grad(scores.sum(), parameters) for scores in (ours, theirs)), strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_each_position_has_the_score_of_the_text_up_to_it():
    model, ids = TinyModel().scalar(), texts()
    every = model(ids, torch.arange(7).expand(3, 7))
    for t in range(7):
        assert_close(every[:, t], model(ids[:, : t + 1], torch.full((3, 1), t)).squeeze(1), atol=1e-6)


def test_positions_may_be_repeated_and_in_any_order():
    model, ids = TinyModel().scalar(), texts()
    every = model(ids, torch.arange(7).expand(3, 7))
    index = torch.tensor([[3, 0, 3], [2, 2, 1], [6, 4, 5]])
    assert torch.equal(model(ids, index), every.gather(1, index))


def test_normalized_scores_have_mean_0_and_deviation_1_after_repeated_calls():
    model, ids = TinyModel().scalar(), texts()
    ends = (LENGTHS - 1).unsqueeze(1)
    raw = model(ids, ends).squeeze(1).detach()
    for _ in range(3):
        model.fit_normalization(model(ids, ends).squeeze(1))
        scores = model(ids, ends).squeeze(1)
        assert_close(scores.mean(), 0.0, atol=1e-5)
        assert_close(scores.std(), 1.0)
    assert_close(model.score_mean, raw.mean(), rtol=1e-4)
    assert_close(model.score_std, raw.std(), rtol=1e-4)


def test_normalizing_equal_scores_does_not_divide_by_0():
    model = TinyModel().scalar()
    model.fit_normalization(torch.ones(4))
    assert model(texts(), torch.zeros(3, 1).long()).isfinite().all()


def test_scale_is_saved_with_the_weights(tmp_path):
    model, ids = TinyModel().scalar(), texts()
    model.fit_normalization(normal(5, seed=1, dtype=torch.float32) * 3 + 2)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    again = Pretrained(str(tmp_path)).scalar()
    assert again.score_mean == model.score_mean != 0
    assert again.score_std == model.score_std != 1
    index = torch.arange(7).expand(3, 7)
    # Copied: safetensors maps weights into memory at any offset, and on some CPUs that changes the rounding.
    assert torch.equal(copy.deepcopy(again)(ids, index), model(ids, index))
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(head.score.weight, model.lm.score.weight)


def test_scale_is_part_of_a_checkpoint_and_is_not_trained():
    model = TinyModel().scalar()
    assert {"score_mean", "score_std"} <= model.state_dict().keys()
    assert {"score_mean", "score_std"}.isdisjoint(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("labels", [2, 3])
def test_classifier_of_several_labels_is_rejected(labels):
    config = TinyModel().hf_config()
    config.num_labels = labels
    lm = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match=rf"^LlamaForSequenceClassification has {labels} outputs; a critic or reward"):
        ScalarModel(lm)


def test_language_model_is_not_a_scalar_model():
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM has no linear head named 'score'; a critic or reward model"
    ):
        ScalarModel(TinyModel().causal().lm)


def test_classifier_without_a_backbone_raises():
    model = TinyModel().scalar().lm
    model.base_model_prefix = "absent"
    model.backbone, model.model = model.model, None
    with pytest.raises(
        ValueError, match=r"^LlamaForSequenceClassification has no backbone under its head: use another"
    ):
        ScalarModel(model)
