"""Rollouts with images: engines see the trainer's tokens and pictures, and give its log-probs."""

from dataclasses import replace

import pytest
import torch

from lightning_rlhf import Pretrained
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.extras.images.model import TextImages
from lightning_rlhf.extras.images.processor import load_processor
from lightning_rlhf.models.loading import save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import PromptImages, SamplingParams, TokenPrompt
from tests.helpers import assert_close
from tests.vision_models import drawing, write_checkpoint

pytestmark = pytest.mark.timeout(600)
IMAGES = [drawing(number, 24 if number % 3 else 40, 16) for number in range(5)]
LOADED = ("idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl")  # without more packages
real_vllm = pytest.mark.vllm
SAMPLING = SamplingParams(6, temperature=0.8, stop_token_ids=(2,), never_sampled=(4,))


def prompts_of(processor, count):
    """Return prompts with no image, one and two, and their images; pictures are in several prompts."""
    marker = processor.placeholder
    texts = (f"look: {marker} what?", "only text", f"a {marker} and b {marker}!")
    numbers = ([0], [], [1, 2])
    prompts, images = [], []
    for index in range(count):
        text = f"{texts[index % 3]} {index}"
        shown = tuple(IMAGES[(number + index) % len(IMAGES)] for number in numbers[index % 3])

        def tokens(written):
            return processor.tokenizer(written, add_special_tokens=False)["input_ids"]

        images.append(PromptImages(shown, tuple(range(len(shown))), tuple(tokens(text))))
        prompts.append(TokenPrompt(tokens(processor.expand(text, shown)), images[-1]))
    return prompts, images


def logprobs_of(role, processor, prompts, images, completions):
    """Return the trainer's log-probs of completions, one text at a time."""
    role.never_sampled = SAMPLING.never_sampled
    result = []
    for prompt, shown, completion in zip(prompts, images, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        index = torch.arange(len(prompt) - 1, ids.shape[1] - 1).unsqueeze(0)
        targets = torch.tensor([completion.token_ids])
        pictures = pictures_of(processor, shown)
        marked = torch.ones_like(targets, dtype=torch.bool)
        with torch.no_grad():
            scores = role(ids, index, targets, marked, temperature=SAMPLING.temperature, images=pictures)
        result.append(scores.logprobs[0])
    return result


def started(engine, directory, processor, source, **fields):
    save_architecture(source, directory / "engine")
    engine.start(
        EngineSetup(
            directory / "engine",
            "float32",
            160,
            directory / "engine.log",
            processor=processor,
            images_per_prompt=2,
            **fields,
        )
    )
    engine.wait()
    return engine


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("qwen2_5_vl", "gemma3") else pytest.mark.slow) for name in LOADED],
)
def test_transformers_generates_with_the_logprobs_of_the_trainer(name, tmp_path):
    source = Pretrained(str(write_checkpoint(name, tmp_path / "model")))
    processor, role = load_processor(source.path), source.causal()
    for weights in role.parameters():
        if not weights.any():  # the projector of Gemma 3
            torch.nn.init.normal_(weights, std=0.2)
    engine = started(TransformersEngine(batch_size=4), tmp_path, processor, source)
    engine.update_weights(whole_tensors(role.lm), 0)
    prompts, images = prompts_of(processor, 7)
    completions = generate(engine, prompts, SAMPLING, range(7))
    expected = logprobs_of(role, processor, prompts, images, completions)
    for completion, logprobs in zip(completions, expected, strict=True):
        assert_close(torch.tensor(completion.logprobs), logprobs, atol=2e-5)
        assert 4 not in completion.token_ids
    assert_echo(engine, processor, role, prompts, images, atol=2e-5)
    engine.close()


def assert_echo(engine, processor, role, prompts, images, atol):
    """Assert that the log-probs of the prompts' tokens are the trainer's, with a probability for every token."""
    excluded, role.never_sampled = role.never_sampled, ()
    echoed = generate(engine, prompts, SamplingParams(1, echo=True, never_sampled=(4,)), range(len(prompts)))
    for prompt, shown, completion in zip(prompts, images, echoed, strict=True):
        assert completion.token_ids[:-1] == prompt[1:]
        ids = torch.tensor([prompt])
        index, targets = torch.arange(len(prompt) - 1).unsqueeze(0), ids[:, 1:]
        marked = torch.ones_like(targets, dtype=torch.bool)
        with torch.no_grad():
            logprobs = role(ids, index, targets, marked, images=pictures_of(processor, shown)).logprobs[0]
        assert_close(torch.tensor(completion.logprobs[:-1]), logprobs, atol=atol)
    role.never_sampled = excluded


def pictures_of(processor, shown):
    """Return the images of a prompt for the trainer's model; None without images."""
    if not shown.images:
        return None
    tensors = [processor.tensors(image) for image in shown.images]
    return TextImages(tensors, torch.arange(len(tensors)).unsqueeze(0))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A vLLM engine with its processor and the trainer's model, for all tests."""
    directory = tmp_path_factory.mktemp("vllm")
    source = Pretrained(str(write_checkpoint("idefics3", directory / "model")), train_vision=True)
    processor, role = load_processor(source.path), source.causal()
    engine = started(VLLMEngine(), directory, processor, source)
    engine.update_weights(whole_tensors(role.lm), 0)
    yield engine, processor, role
    engine.close()


@pytest.mark.slow
@real_vllm
def test_logprobs_of_200_responses_are_those_of_the_trainer(running):
    engine, processor, role = running
    prompts, images = prompts_of(processor, 200)
    completions = generate(engine, prompts, SAMPLING, range(200))
    expected = logprobs_of(role, processor, prompts, images, completions)
    gaps = [
        (torch.tensor(completion.logprobs) - logprobs).abs().max()
        for completion, logprobs in zip(completions, expected, strict=True)
    ]
    assert max(gaps) < 1e-4
    assert_echo(engine, processor, role, prompts[:6], images[:6], atol=1e-4)
    assert all(4 not in completion.token_ids for completion in completions)


@pytest.mark.slow
@real_vllm
def test_each_image_is_sent_once(running):
    engine, processor, _ = running
    prompts, images = prompts_of(processor, 6)
    sent = []
    command = engine._running.command
    engine._running.command = lambda kind, **fields: sent.append(fields) or command(kind, **fields)
    try:
        engine._sent_images._sent.clear()
        generate(engine, prompts, SAMPLING, range(6))
        generate(engine, prompts, SAMPLING, range(6, 12))
    finally:
        engine._running.command = command
    (message,) = sent
    assert sorted(each["sha256"] for each in message["new"]) == sorted({i.sha256 for p in images for i in p.images})


@pytest.mark.slow
@real_vllm
def test_the_same_seeds_give_the_same_responses_and_other_images_give_others(running):
    engine, processor, _ = running
    prompts, images = prompts_of(processor, 3)
    one = generate(engine, prompts, SAMPLING, range(3))
    two = generate(engine, prompts[::-1], SAMPLING, [2, 1, 0])[::-1]
    assert [c.token_ids for c in one] == [c.token_ids for c in two]
    other = PromptImages((IMAGES[3],), (0,), images[0].unexpanded_ids)
    (changed,) = generate(engine, [replace(prompts[0], images=other)], SAMPLING, [0])
    assert changed.logprobs != one[0].logprobs


@pytest.mark.slow
@real_vllm
def test_weights_of_the_image_encoder_are_pushed(running):
    engine, processor, role = running
    prompts, images = prompts_of(processor, 3)
    before = generate(engine, prompts, SAMPLING, range(3))
    weights = next(p for name, p in role.named_parameters() if "vision" in name and p.ndim == 2)
    before_change = weights.detach().clone()
    with torch.no_grad():
        weights.mul_(1.5)
    engine.update_weights(whole_tensors(role.lm), 1)
    after = generate(engine, prompts, SAMPLING, range(3))
    expected = logprobs_of(role, processor, prompts, images, after)
    assert after[0].logprobs != before[0].logprobs
    assert after[1].logprobs == before[1].logprobs  # without an image
    for completion, logprobs in zip(after, expected, strict=True):
        assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-4)
    with torch.no_grad():
        weights.copy_(before_change)
    engine.update_weights(whole_tensors(role.lm), 2)
    again = generate(engine, prompts, SAMPLING, range(3))
    assert [completion.logprobs for completion in again] == [completion.logprobs for completion in before]


@pytest.mark.slow
@real_vllm
def test_a_prompt_that_vllm_expands_otherwise_is_an_error_and_the_engine_continues(running):
    engine, processor, _ = running
    prompts, _ = prompts_of(processor, 3)
    with pytest.raises(RunError, match=r"vLLM expands a prompt with 1 images to \d+ tokens and the trainer to"):
        generate(engine, [replace(prompts[0], token_ids=prompts[0][:-1])], SAMPLING, [0])
    assert generate(engine, prompts, SAMPLING, range(3))


@pytest.mark.slow
@real_vllm
def test_texts_of_a_vision_language_model_need_no_processor_in_vllm(tmp_path):
    source = Pretrained(str(write_checkpoint("idefics3", tmp_path / "model")))
    processor, role = load_processor(source.path), source.causal()
    save_architecture(source, tmp_path / "engine")
    engine = VLLMEngine()
    engine.start(EngineSetup(tmp_path / "engine", "float32", 64, tmp_path / "engine.log"))
    engine.wait()
    engine.update_weights(whole_tensors(role.lm), 0)
    assert engine.first_difference(whole_tensors(role.lm)) is None
    ids = processor.tokenizer("user:what?", add_special_tokens=False)["input_ids"]
    none = [PromptImages((), (), tuple(ids))]
    completions = generate(engine, [ids], SAMPLING, [3])
    (expected,) = logprobs_of(role, processor, [ids], none, completions)
    assert_close(torch.tensor(completions[0].logprobs), expected, atol=1e-4)
    engine.close()
