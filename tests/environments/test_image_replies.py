"""Images in replies of environments and results of tools: accepted values, limits, tokens and records."""

import base64
import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments import EnvironmentSettings, Reply, ToolCall, Tools, Turn
from lightning_rlhf.environments.bridges import PlainBridge, TemplateBridge
from lightning_rlhf.environments.conversation import Conversation, Limits
from lightning_rlhf.environments.host import Call, Spec
from lightning_rlhf.environments.hosts import ProcessHost
from lightning_rlhf.environments.live import digest_of
from lightning_rlhf.environments.protocol import InvalidReplyError, as_reply
from lightning_rlhf.extras.algorithms.echo import environment_mask
from lightning_rlhf.extras.images.processor import load_processor
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import ImageSettings
from lightning_rlhf.rollout.ahead import packed_completions, unpacked_completions
from lightning_rlhf.rollout.assemble import assemble
from lightning_rlhf.rollout.generation import PendingCompletions
from lightning_rlhf.rollout.sampler import Sampling
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.rollout.vllm.requests import SentImages
from lightning_rlhf.types import Completion, ConversationRecord, PromptImages, TokenPrompt
from tests.stand_ins import prompt_batch
from tests.vision_models import tokenizer, write_checkpoint


def picture(number=0, size=(8, 6)):
    return Image.new("RGB", size, (number, 100, 50))


def encoded(number=0, size=(8, 6)):
    return read_image(picture(number, size), ImageSettings(), None)


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def contents(*content):
    return as_reply(Reply([{"role": "user", "content": list(content)}]), "step").messages[0]["content"]


# -- accepted values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        picture(),
        encoded(),
        {"type": "image", "image": picture()},
        {"type": "image", "image": png(picture())},
        {"type": "image", "bytes": png(picture())},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(picture())).decode()},
        },
    ],
    ids=["pillow", "encoded", "part", "bytes", "key", "openai"],
)
def test_forms_of_an_image(value):
    text, image = contents("a", value)
    assert text == {"type": "text", "text": "a"}
    assert image["type"] == "image"
    assert isinstance(image["image"], EncodedImage)
    assert (image["image"].width, image["image"].height) == (8, 6)
    assert image["image"].open().getpixel((0, 0)) == (0, 100, 50)


def test_special_tokens_are_found_over_the_ends_of_parts(processor):
    bridge = PlainBridge(processor.tokenizer)
    bridge.read_images(processor, writes_images=True)
    written = shown(picture(), "</", "s>", "<ima", "ge>")
    assert len(written[0]["content"]) == 2
    assert processor.tokenizer.eos_token_id not in bridge.between([5], written)
    assert bridge.between([5], written, expanded=False).count(4) == 1


def test_images_of_a_reply_that_ends_the_conversation_are_ignored():
    assert as_reply(Reply([{"role": "user", "content": [b"no image"]}], 1.0, done=True), "step") == Reply("", 1.0, True)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_images_with_an_unknown_range_of_values_are_rejected(mode):
    with pytest.raises(InvalidReplyError, match=f"the mode {mode}, whose range of values is not known"):
        contents(Image.new(mode, (4, 4)))


def test_images_of_16_bits_are_the_same_for_servers():
    deep = Image.new("I;16", (4, 1))
    for x in range(4):
        deep.putpixel((x, 0), 20000 * x)
    image = read_image(deep, ImageSettings(), None)
    sent = base64.b64decode(image.data_url().partition(",")[2])
    assert Image.open(io.BytesIO(sent)).convert("RGB").tobytes() == image.open().tobytes()


def test_an_image_inside_of_a_result_of_a_tool_is_an_error():
    def look(number: int):
        """Look.

        Args:
            number: colour
        """
        return {"screenshot": picture(number)}

    with pytest.raises(ValueError, match="a tool returned an image inside of another value"):
        Tools([look]).step(Turn("", (ToolCall("look", {"number": 1}),)))


def test_parts_of_a_message_are_results_of_tools():
    def look(number: int):
        """Look.

        Args:
            number: colour
        """
        return [{"type": "text", "text": "a"}, {"type": "image", "image": picture(number)}]

    message = Tools([look]).step(Turn("", (ToolCall("look", {"number": 1}),))).messages[0]
    assert as_reply(Reply([message]), "step").messages[0]["content"][1]["image"] == encoded(1)


def test_texts_alone_become_one_text():
    assert contents("a", {"type": "text", "text": "b"}) == "ab"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "image", "image": "/etc/passwd"}, "an image as '/etc/passwd', expected an image of Pillow, its"),
        ({"type": "image", "url": "http://127.0.0.1/x.png"}, "an image as 'http://127.0.0.1/x.png', expected"),
        ({"type": "image", "image": {"path": "/x.png"}}, "an image as None, expected an image of"),
        ({"type": "image", "image": b"no image"}, "an image that cannot be used: an image cannot be decoded; at most"),
        (
            {"type": "image", "image": Image.new("L", (5000, 5000))},
            "an image has more than max_pixels; at most 16777216 pixels",
        ),
        ({"type": "video", "video": "x"}, "a part of type 'video'"),
        ({"type": "image"}, "an image as None, expected an image of Pillow"),
        (7, r"returned the content \[7\], expected a text, or a list of texts and images"),
    ],
)
def test_other_values_are_rejected(value, message):
    with pytest.raises(InvalidReplyError, match=message):
        contents(value)


def test_long_texts_beside_an_image_are_cut():
    first, image, second = contents("a" * 999_990, picture(), "b" * 100)
    assert (len(first["text"]), len(second["text"])) == (999_990, 10)
    assert image["image"] == encoded()


def show(number: int):
    """Show a picture.

    Args:
        number: colour
    """
    return picture(number)


def compare(number: int):
    """Show a picture with a text.

    Args:
        number: colour
    """
    return [f"colour {number}", picture(number), {"n": number}]


@pytest.mark.slow
def test_tools_return_images_from_worker_processes():
    host = ProcessHost(Spec(Tools, {"functions": [show, compare]}), 30.0, 1)
    try:
        start = host.call(Call("a", {}, 0)).result(120)
        calls = (ToolCall("show", {"number": 3}, "c"), ToolCall("compare", {"number": 4}))
        reply = host.call(Call("a", {}, 0, (Turn("", calls),), (digest_of(start),))).result(120)
    finally:
        host.close()
    first, second = reply.messages
    assert first == {
        "role": "tool", "name": "show", "tool_call_id": "c", "content": [{"type": "image", "image": encoded(3)}]
    }  # fmt: skip
    assert [part.get("text", part.get("image")) for part in second["content"]] == ["colour 4", encoded(4), '{"n": 4}']


def test_digest_depends_on_the_image():
    digests = {digest_of(as_reply(Reply([{"role": "user", "content": [picture(n)]}]), "step")) for n in (0, 1, 0)}
    assert len(digests) == 2


# -- tokens ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return load_processor(str(write_checkpoint("idefics3", tmp_path_factory.mktemp("model"))))


def shown(*content, role="user"):
    return as_reply(Reply([{"role": role, "content": list(content)}]), "step").messages


@pytest.mark.parametrize("kind", [PlainBridge, TemplateBridge])
def test_image_is_expanded_between_turns(processor, kind):
    bridge = kind(processor.tokenizer)
    bridge.read_images(processor, writes_images=True)
    written = shown("x", picture(), "y<image>z")
    expanded, unexpanded = (bridge.between([5], written, expanded=expanded) for expanded in (True, False))
    decode = processor.tokenizer.decode
    assert decode(unexpanded).count("<image>") == 1
    assert "image<unk>z" in decode(unexpanded)  # "< image>", whose brackets are not in the vocabulary
    assert decode(unexpanded).replace("<image>", processor.expand("<image>", [encoded()])) == decode(expanded)


def test_messages_are_cut_but_not_their_images(processor):
    bridge = PlainBridge(processor.tokenizer, max_message_tokens=20)
    bridge.read_images(processor, writes_images=True)
    text = processor.tokenizer.decode(bridge.between([5], shown("a" * 50, picture(), "b" * 50), expanded=False))
    assert text.count("<image>") == 1
    assert text.count("a") <= 10
    assert text.count("b") <= 10


def test_template_that_renders_no_images_is_rejected_before_the_run(processor):
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
        "m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    )
    bridge = TemplateBridge(tokenizer(chat=template))
    with pytest.raises(ValueError, match=r"renders a message of role 'user' with an image and a text as 0 images"):
        bridge.read_images(processor, writes_images=True)
    bridge = TemplateBridge(tokenizer(chat=template))
    bridge.read_images(processor)  # prompts alone are checked with the data


def test_template_that_rejects_parts_is_rejected_before_the_run(processor):
    template = "{% for m in messages %}{{ m.role + ':' + m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="chat template rejects"):
        TemplateBridge(tokenizer(chat=template)).read_images(processor, writes_images=True)


# -- limits ----------------------------------------------------------------------------------------------------


def test_conversation_ends_where_an_image_would_be_too_many():
    conversation = Conversation(TokenPrompt([1], PromptImages((), (), (1,))), Limits(5, 100, max_images=1))
    conversation.add_turn(Completion([5], [0.0], "stop", 0))
    conversation.add_written([7, 7, 7], [encoded()], [7])
    assert conversation.request.images.unexpanded_ids == (1, 5, 7)
    assert conversation.request.images.images == (encoded(),)
    assert conversation.written_images == ()
    conversation.add_turn(Completion([6], [0.0], "stop", 0))
    assert conversation.written_images == (encoded(),)
    conversation.add_written([7, 7, 7], [encoded(1)], [7])
    assert conversation.stop == "images"
    assert conversation.written_images == (encoded(),)
    assert conversation.completion.token_ids == [5, 7, 7, 7, 6]
    assert conversation.completion.finish_reason == "length"


def test_tokens_of_an_image_count():
    conversation = Conversation(TokenPrompt([1], PromptImages((), (), (1,))), Limits(5, 4, max_images=1))
    conversation.add_turn(Completion([5], [0.0], "stop", 0))
    conversation.add_written([7, 7, 7], [encoded()], [7])
    assert conversation.stop == "tokens"


@pytest.mark.parametrize(
    "arguments",
    [{"max_images": -1}, {"max_images": 1, "factory": "tests.extras.agents.agents:Agent", "arguments": {}}],
)
def test_settings_reject_wrong_limits(arguments):
    with pytest.raises(ValueError, match="max_images"):
        EnvironmentSettings(**{"factory": Tools, "arguments": {"functions": [show]}, **arguments})


# -- records ---------------------------------------------------------------------------------------------------


def completion(images=()):
    ids = [5, 7, 7, 6]
    messages = [{"role": "assistant", "content": "a"}, *(shown("x", *images) if images else [])]
    record = ConversationRecord([1, 2], messages, [1, 4], [0.0, 0.0], "done", images=tuple(images))
    return Completion(ids, [0.0] * 4, "stop", 0, sampled=(True, False, False, True), conversation=record)


def prompts(numbers=(-1, -1)):
    return prompt_batch([0], [[1, 2]], ["p"], {}, images=[PromptImages((), tuple(numbers), (1, 2))])


def test_rollout_has_the_images_of_its_conversations():
    of_prompt = encoded(9).number
    rollout = assemble(prompts((of_prompt, -1, -1)), [completion([encoded(1), encoded(2)]), completion()])
    assert rollout.images.numbers.tolist() == [[of_prompt, encoded(1).number, encoded(2).number], [of_prompt, -1, -1]]
    assert rollout.images.written == {encoded(n).number: encoded(n) for n in (1, 2)}
    assert rollout[[1]].images.written == rollout.images.written


def test_prompts_with_other_images_are_not_shared():
    def record(first, later):
        messages = shown("x", first, later)
        record = ConversationRecord(
            [1, 2], messages, [1, 4], [0.0, 0.0], "done", images=(first, later), images_in_prompt=1
        )
        return replace(completion(), conversation=record)

    one, two, three = encoded(1), encoded(2), encoded(3)
    rollout = assemble(prompts(), [record(one, two), record(one, three), record(two, three)])
    assert rollout.images.in_prompt.tolist() == [1, 1, 1]
    assert rollout.prompt_numbers()[0].tolist() == [0, 0, 2]


@pytest.mark.parametrize("batch", [prompts((-1,)), prompt_batch([0], [[1, 2]], ["p"], {})])
def test_more_images_than_the_run_allows_are_an_error(batch):
    with pytest.raises(ValueError, match="has 2 images, more than max_images of the environment allows: resume with"):
        assemble(batch, [completion([encoded(1), encoded(2)])])


def test_checkpoints_contain_the_images_of_conversations():
    completions = [completion([encoded(1), encoded(2), encoded(1)]), completion()]
    pending = PendingCompletions(lambda: completions)
    (packed,) = [packed_completions(StepRequests(3, prompts(), Sampling(2, 1.0), pending, None))]
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    ((_, restored),) = unpacked_completions(torch.load(buffer, weights_only=True))
    assert restored == completions
    assert restored[0].conversation.images[1].data == encoded(2).data


def test_checkpoint_of_conversations_without_a_field_of_images_is_read():
    packed = packed_completions(
        StepRequests(3, prompts(), Sampling(1, 1.0), PendingCompletions(lambda: [completion()]), None)
    )
    for name in ("images", "encoded_images"):
        del packed["conversations"][0][name]
    ((_, restored),) = unpacked_completions(packed)
    assert restored == [completion()]


def test_loss_of_environment_tokens_leaves_out_images():
    rollout = assemble(prompts(), [completion([encoded(1)])])
    assert environment_mask(rollout).tolist() == [[False, True, True, False]]
    assert environment_mask(rollout, (7,)).tolist() == [[False] * 4]


def test_engine_process_keeps_the_last_images_only():
    size = len(encoded(1).data)
    sent, held = SentImages(max_bytes=2 * size + 10), {}
    for step in range(20):
        of_step = [encoded(step), encoded(step + 1)]
        message = sent.message([TokenPrompt([], PromptImages((image,), (), ())) for image in of_step])
        message = json.loads(json.dumps(message))
        held |= {fields["sha256"]: EncodedImage.of_fields(fields) for fields in message.get("new", ())}
        for sha256 in message.get("dropped", ()):
            del held[sha256]
        assert {image.sha256 for image in of_step} <= set(held)
        assert len(held) <= 3
    assert sent.message([TokenPrompt([], PromptImages((encoded(20),), (), ()))]) == {}
    # Another process also needs those of unfinished requests.
    needed = sent.all([TokenPrompt([], PromptImages((encoded(3),), (), ()))])
    assert {encoded(step).sha256 for step in (3, 20)} <= {fields["sha256"] for fields in needed}
    assert len(needed) == len(held) + 1
