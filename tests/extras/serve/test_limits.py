"""Any request is rejected with a message, or is within all limits."""

import base64
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.extras.serve.limits import BODIES, Limits, Rejected, check, parse
from tests.vision_models import drawing

LIMITS = Limits(max_prompt_tokens=6, max_tokens=8, max_responses=4)
TEXTS = st.text("ab é\u2028\U0001f600\ud800", max_size=7)  # half a letter too
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=10
)
SMALL = st.integers(1, 16)
NUMBERS = st.floats(0, 2) | st.integers(0, 9) | st.just(1e999) | st.just(2**63)
OPTIONAL = {
    "n": st.integers(1, 5), "max_tokens": SMALL, "max_completion_tokens": SMALL, "temperature": NUMBERS,
    "logprobs": st.integers(0, 6) | st.booleans(), "top_logprobs": st.integers(0, 6), "stop": TEXTS, "user": TEXTS,
}  # fmt: skip
IDS = st.lists(SMALL, min_size=1, max_size=7)
PROMPTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=5) | IDS | st.lists(IDS, min_size=1, max_size=5)
PARTS = TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
ROLES = st.sampled_from(["user", "system", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": PARTS}), min_size=1, max_size=3)


FIELDS = {route: set(model.model_fields) for route, model in BODIES.items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("route", FIELDS)
@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_accepted_request_is_within_every_limit(route, data):
    requested = {"prompt": PROMPTS} if route == "/v1/completions" else {"messages": MESSAGES}
    optional = {name: values for name, values in OPTIONAL.items() if name in FIELDS[route]}
    body = data.draw(st.fixed_dictionaries(requested, optional=optional))
    if data.draw(st.integers(0, 3)) == 0:
        body[data.draw(st.sampled_from(sorted(FIELDS[route])) | TEXTS)] = data.draw(VALUES)
    try:
        body = parse(json.dumps(body).encode())
        check(route, body, LIMITS, len)
    except Rejected:  # and nothing else is raised
        return
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    assert body.keys() <= FIELDS[route]
    prompt = body.get("prompt", "")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert len(prompts) * (body.get("n") or 1) <= LIMITS.max_responses
    assert max(len(one) for one in prompts) <= LIMITS.max_prompt_tokens
    assert sum(len(part) for part in output(body)) <= LIMITS.max_prompt_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        assert (body.get(name) or 1) <= LIMITS.max_tokens
    for name in ("logprobs", "top_logprobs"):
        assert (body.get(name) or 0) <= 5
    assert abs(body.get("temperature") or 0) < 2**63


def output(body):
    """Return the texts of messages."""
    contents = [message["content"] for message in body.get("messages", [])]
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    return [part["text"] for some in parts for part in some]


PNG = "data:image/png;base64," + base64.b64encode(drawing(1).data).decode()


def show(*urls, text="x", **more):
    parts = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def test_images_within_the_limit_are_accepted():
    limits = Limits(max_prompt_tokens=6, max_images=2)
    check("/v1/chat/completions", show(PNG, PNG, detail="low"), limits, len)  # images do not count as text


@pytest.mark.parametrize(
    ("body", "images", "message"),
    [
        (show(PNG), 0, "1 images in a request, allowed are 0; serve --max-images sets the limit"),
        (show(PNG, PNG), 1, "2 images in a request, allowed are 1"),
        (show("http://127.0.0.1/x.png"), 1, "an image must be a data: URL"),
        (show("file:///etc/passwd"), 1, "an image must be a data: URL"),
        (show("data:image/png;base64,AAAA"), 1, "an image cannot be used: an image cannot be decoded"),
        (show("data:text/html,x"), 1, "an image cannot be used: an image's data: URL has no base64 content"),
        (show(PNG, uuid="x"), 1, "messages.0.content"),
    ],
)
def test_other_images_are_rejected(body, images, message):
    with pytest.raises(Rejected, match=re.escape(message)) as rejected:
        check("/v1/chat/completions", body, Limits(max_images=images), len)
    assert rejected.value.status == 422


def test_number_of_images_is_not_negative():
    with pytest.raises(ValueError, match="max_images must be at least 0, got -1"):
        Limits(max_images=-1)
