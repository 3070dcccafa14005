"""Vision-language models on texts with images: features once per image, padded and packed rows as one row alone."""

import math

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from lightning_rlhf import Pretrained
from lightning_rlhf.batching.packing import pack_responses, pack_texts, pad_parts
from lightning_rlhf.extras.images.model import FeatureCache, TextImages, check_reads_images, encode_images
from lightning_rlhf.models.classes import backbone_of
from lightning_rlhf.models.packed_attention import has_packed_attention
from tests.helpers import assert_close
from tests.vision_models import config, drawing, tensors_of, token_ids

ARCHITECTURES = (
    "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "mistral3",
    "llava_next",
)  # fmt: skip
IMAGES = [drawing(1), drawing(2, 20, 40), drawing(3)]
ROWS = (("ab", 0, "c", 1, "def"), ("only text",), (2, "what?"), (0, "another text"))


PADDED = {"pixel_values", "pixel_attention_mask"}


def load(name, directory):
    """Return a name, a small model in float64, rows of tokens, and the tensors of the images."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config(name)).save_pretrained(directory)
    role = Pretrained(str(directory), train_vision=True).causal().double()
    for weights in role.parameters():
        if not weights.any():  # the projector of Gemma 3 begins at zero, and hides the images
            torch.nn.init.normal_(weights, std=0.2)
    tensors = [
        {key: values.double() if values.is_floating_point() else values for key, values in image.items()}
        for image in tensors_of(name, IMAGES)
    ]
    return name, role, [token_ids(name, row, IMAGES) for row in ROWS], tensors


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("idefics3", "qwen2_5_vl", "gemma3", "llava_next") else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def model(request, tmp_path_factory):
    """A model of each architecture."""
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A model of one architecture, for tests that do not depend on the architecture."""
    return load("llava", tmp_path_factory.mktemp("llava"))


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def of_rows():
    return torch.tensor([[0, 1], [-1, -1], [2, -1], [0, -1]])


def padded_pixels(tensors):
    """Pad the rows and columns of pixels, whose sizes differ in Pixtral."""
    height, width = (max(values.shape[axis] for values in tensors) for axis in (-2, -1))
    if tensors[0].ndim < 4:
        return tensors
    return [
        torch.nn.functional.pad(values, (0, width - values.shape[-1], 0, height - values.shape[-2]))
        for values in tensors
    ]


def padded_parts(tensors):
    """Pad the parts of images, whose numbers differ in LLaVA-NeXT, as its processor does."""
    most = max(values.shape[1] for values in tensors)
    return [torch.nn.functional.pad(values, (0, 0) * 3 + (0, most - values.shape[1])) for values in tensors]


def own_logprobs(name, role, ids, tensors):
    """Return the log-probs of a text's tokens by the model's own forward pass with pixels."""
    arguments = {}
    if tensors:
        axis = 1 if tensors[0]["pixel_values"].ndim == 5 and "image_sizes" not in tensors[0] else 0
        pad = padded_parts if name == "llava_next" else padded_pixels
        arguments = {key: torch.cat([image[key] for image in tensors], axis) for key in tensors[0].keys() - PADDED}
        arguments |= {
            key: torch.cat(pad([image[key] for image in tensors]), axis) for key in tensors[0].keys() & PADDED
        }
        is_image = (torch.tensor([ids]) == role.lm.config.image_token_id).long()
        if name.startswith("qwen"):
            arguments["mm_token_type_ids"] = is_image
        if name == "gemma3":
            arguments["token_type_ids"] = is_image
    logits = role.lm(input_ids=torch.tensor([ids]), use_cache=False, **arguments).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def our_logprobs(role, rows, tensors, packing):
    ids = padded(rows)
    index = torch.arange(ids.shape[1] - 1).expand(len(rows), -1)
    mask = index < torch.tensor([[len(row) - 1] for row in rows])
    images = TextImages(tensors, of_rows())
    return role(ids, index, ids[:, 1:], mask, packing=packing, images=images).logprobs.double()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_logprobs_and_gradients_are_those_of_one_text_at_a_time(model, layout):
    name, role, rows, tensors = model
    weights = torch.randn(len(rows), max(map(len, rows)), generator=torch.Generator().manual_seed(1)).double()
    packing = pack_texts([len(row) for row in rows], max(map(len, rows))) if layout == "packed" else None
    ours = our_logprobs(role, rows, tensors, packing)
    role.zero_grad()
    (ours * weights[:, :-1]).sum().backward()
    gradients = {key: value.grad.clone() for key, value in role.named_parameters() if value.grad is not None}
    role.zero_grad()
    for number, row in enumerate(rows):
        alone = own_logprobs(name, role, row, [tensors[k] for k in of_rows()[number].tolist() if k >= 0])
        assert_close(ours[number, : len(row) - 1], alone, atol=1e-6)
        (alone * weights[number, : len(row) - 1]).sum().backward()
    assert any("vision" in key or "visual" in key for key in gradients)
    for key, value in role.named_parameters():
        if value.grad is not None and value.grad.abs().max() > 1e-9:
            assert_close(gradients[key], value.grad, rtol=1e-5, atol=1e-5)


def test_every_image_is_encoded_once(model):
    _, role, rows, tensors = model
    calls = []
    backbone = backbone_of(role.lm)
    original = backbone.get_image_features

    def counted(**arguments):
        calls.append(arguments["pixel_values"])
        return original(**arguments)

    backbone.get_image_features = counted
    try:
        our_logprobs(role, rows, tensors, None)
    finally:
        del backbone.get_image_features
    encoded = sum(math.prod(pixels.shape[: 2 if pixels.ndim == 5 else 1]) for pixels in calls)
    pixel_values = (image["pixel_values"] for image in tensors)
    assert encoded == sum(math.prod(pixels.shape[: 2 if pixels.ndim == 5 else 1]) for pixels in pixel_values)


def test_responses_that_share_a_prompt_with_an_image_equal_separate_ones(model):
    name, role, rows, tensors = model
    prompt, answers = rows[2], ([40, 41, 42], [43, 44])
    texts = [[*prompt, *answer] for answer in answers]
    ids = padded(texts)
    index = torch.arange(len(prompt) - 1, ids.shape[1] - 1).expand(2, -1)
    mask = index < torch.tensor([[len(text) - 1] for text in texts])
    targets = torch.tensor([[40, 41, 42], [43, 44, 0]])
    images = TextImages(tensors, torch.tensor([[2], [2]]))
    apart = role(ids, index, targets, mask, images=images).logprobs
    if not has_packed_attention(role.lm):
        assert name == "gemma3"  # pads texts that share a prompt
        return
    packing = pack_responses([len(prompt)] * 2, [3, 2], [0, 0], ids.shape[1])
    shared = role(ids, index, targets, mask, images=images, packing=packing).logprobs
    in_row = ids.flatten()[packing.tokens] == role.lm.config.image_token_id
    assert int(in_row.sum()) == encode_images(role.lm, tensors).counts[2]  # the prompt is laid out once
    assert_close(shared, apart, atol=1e-6)


def test_texts_with_other_images_have_other_logprobs(model):
    _, role, rows, tensors = model
    one = our_logprobs(role, rows, tensors, None)
    two = our_logprobs(role, rows, [tensors[2], tensors[1], tensors[0]], None)
    assert (one[2] - two[2]).abs().max() > 1e-3
    assert_close(one[1], two[1], atol=1e-9)  # only text


def test_a_text_whose_image_tokens_do_not_fit_its_images_is_an_error(llava):
    _, role, rows, tensors = llava
    ids = padded([rows[2]])
    index = torch.zeros(1, 1, dtype=torch.long)
    for numbers in ([[2, 0]], [[-1, -1]]):
        with pytest.raises(ValueError, match=r"a text has \d+ image tokens, but its images have \d+ features"):
            role(ids, index, ids[:, :1], index == 0, images=TextImages(tensors, torch.tensor(numbers)))


def test_conversations_with_branches_reject_images(llava):
    _, role, rows, tensors = llava
    ids = padded([rows[2]])
    packing = pad_parts([ids.shape[1]], [[2]], ids.shape[1])
    index = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="several branches cannot have images"):
        role(ids, index, ids[:, :1], index == 0, packing=packing, images=TextImages(tensors, torch.tensor([[2]])))


def test_towers_are_frozen_by_default_and_trained_on_request(tmp_path):
    transformers.set_seed(0)
    AutoModelForImageTextToText.from_config(config("llava")).save_pretrained(tmp_path)
    frozen = Pretrained(str(tmp_path)).causal().lm
    trained = Pretrained(str(tmp_path), train_vision=True).causal().lm
    towers = ("vision_tower", "multi_modal_projector")
    assert not any(p.requires_grad for key, p in frozen.named_parameters() if any(part in key for part in towers))
    assert all(p.requires_grad for p in trained.parameters())


def test_tokens_of_images_have_no_probability(llava):
    _, role, rows, tensors = llava
    ids = padded(rows)
    vocabulary = role.lm.config.get_text_config().vocab_size
    index = torch.zeros(len(rows), vocabulary, dtype=torch.long)
    targets = torch.arange(vocabulary).expand(len(rows), -1)
    images, every = TextImages(tensors, of_rows()), torch.ones_like(targets, dtype=torch.bool)
    role.never_sampled = (role.lm.config.image_token_id,)
    try:
        logprobs = role(ids, index, targets, every, images=images).logprobs
    finally:
        role.never_sampled = ()
    before = role(ids, index, targets, every, images=images).logprobs
    assert (logprobs[:, role.lm.config.image_token_id] < -80).all()
    assert_close(logprobs.exp().sum(1), torch.ones(len(rows)), atol=1e-6)
    others = torch.arange(vocabulary) != role.lm.config.image_token_id
    assert_close(logprobs[:, others], before[:, others].log_softmax(1), atol=1e-6)


def test_features_of_a_frozen_encoder_are_kept_within_their_bound(llava):
    _, role, _, tensors = llava
    calls = []
    backbone = backbone_of(role.lm)
    original = backbone.get_image_features
    backbone.get_image_features = lambda **inputs: calls.append(len(inputs["pixel_values"])) or original(**inputs)
    one = encode_images(role.lm, tensors[:1])
    calls.clear()
    try:
        cache = FeatureCache(max_bytes=2 * one.nbytes)
        with torch.inference_mode():
            first = cache.of(role.lm, TextImages(tensors[:2], of_rows(), keys=[7, 8]))
        again = cache.of(role.lm, TextImages(tensors[:2], of_rows(), keys=[7, 8]))
        third = cache.of(role.lm, TextImages(tensors[1:], of_rows(), keys=[8, 9]))
        assert calls == [1, 1, 1]
        cache.of(role.lm, TextImages(tensors[:1], of_rows(), keys=[7]))  # the oldest was removed
        assert calls == [1, 1, 1, 1]
    finally:
        del backbone.get_image_features
    assert torch.equal(first.flat, again.flat)
    assert_close(third.flat, encode_images(role.lm, tensors[1:]).flat, atol=1e-9)
    assert not again.flat.requires_grad
    assert not again.flat.is_inference()


def test_models_that_cannot_read_the_images_are_named():
    check_reads_images("actor", config("llava"))
    for wrong, message in [
        (CONFIG_MAPPING["llama"](), "the actor is a llama, which reads texts only"),
        (config("paligemma"), "paligemma reads prompts in both directions"),
        (config("llava_onevision"), "llava_onevision computes other features for an image beside a second one"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_reads_images("actor", wrong)


def test_further_passes_change_no_feature_and_reach_the_encoder_in_backward(llava):
    _, role, _, tensors = llava
    one, two = (encode_images(role.lm, tensors, passes) for passes in (1, 3))
    assert torch.equal(one.flat, two.flat)
    gradients = []
    for features in (one, two):
        role.zero_grad()
        features.flat.square().sum().backward()
        gradients.append({name: p.grad for name, p in role.named_parameters() if p.grad is not None})
        role.zero_grad(set_to_none=True)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name], atol=1e-12)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_parts_that_transformers_joins_by_text_are_taken_apart(name, tmp_path, monkeypatch):
    _, role, _, tensors = load(name, tmp_path)
    backbone = backbone_of(role.lm)
    expected = encode_images(role.lm, tensors)
    encode = backbone.get_image_features

    def joined(**inputs):  # as transformers 5.20 does; earlier releases return a tensor of parts
        output = encode(**inputs)
        assert len(inputs["pixel_values"]) == 1  # text
        features = output.pooler_output
        output.pooler_output = [features.flatten(0, -2) if isinstance(features, torch.Tensor) else features[0]]
        return output

    monkeypatch.setattr(backbone, "get_image_features", joined)
    ours = encode_images(role.lm, [*tensors, {key: values[:, :1] for key, values in tensors[0].items()}])
    assert ours.counts[:3] == expected.counts
    assert ours.counts[3] == ours.counts[0] // tensors[0]["pixel_values"].shape[1]
    assert_close(ours.flat[: sum(expected.counts)], expected.flat, atol=1e-12)


def test_scalar_models_load_the_checkpoint_and_what_they_have_saved(model, tmp_path):
    _, role, rows, tensors = model
    role.lm.float().save_pretrained(tmp_path / "base")
    role.lm.double()
    scalar = Pretrained(str(tmp_path / "base")).scalar()
    torch.nn.init.normal_(scalar.lm.score.weight)
    ids, index = padded(rows), torch.arange(3).expand(len(rows), -1)
    images = TextImages(
        [{key: v.float() if v.is_floating_point() else v for key, v in image.items()} for image in tensors], of_rows()
    )
    scores = scalar(ids, index, images=images)
    inner = backbone_of(role.lm)(input_ids=torch.tensor([rows[1]]), use_cache=False).last_hidden_state.float()
    assert_close(scores[1], scalar.lm.score(inner)[0, :3, 0], atol=1e-3)  # the backbone's own weights
    scalar.save_pretrained(tmp_path / "saved")
    again = Pretrained(str(tmp_path / "saved")).scalar()
    assert_close(again(ids, index, images=images), scores, atol=1e-6)
