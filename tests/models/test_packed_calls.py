"""Parts of packed rows that share a call of attention give the attention of each part alone."""

import random

import pytest
import torch

from lightning_rlhf.batching.packing import PackedLengths
from lightning_rlhf.models import packed_attention as attention
from lightning_rlhf.models.packed_calls import ALIGNMENT, Text, layout_of_calls, texts_of_calls
from tests.helpers import assert_close

CPU = torch.device("cpu")


def layout(lengths, window=None):
    return layout_of_calls(lengths, window, torch.float32, CPU)


def drawn_lengths(seed):
    """Return lengths of prompts with 0 to 4 responses, some of them empty, of few or many lengths."""
    draw = random.Random(seed)
    longest = draw.choice([4, 12, 40])
    prompts = tuple(draw.randint(1, longest) for _ in range(draw.randint(1, 9)))
    most = draw.choice([0, 1, 4])
    return PackedLengths(
        prompts, tuple(tuple(draw.randint(0, longest) for _ in range(draw.randint(0, most))) for _ in prompts)
    )


def places_of_parts(lengths):
    """Yield the places of the tokens of each part, and those of the prompt that it attends to."""
    starts, start = [], 0
    for prompt in lengths.prompts:
        starts.append(start)
        yield range(start, start + prompt), range(0)
        start += prompt
    for prompt, first, responses in zip(lengths.prompts, starts, lengths.responses, strict=True):
        for tokens in responses:
            yield range(start, start + tokens), range(first, first + prompt)
            start += tokens


def by_loop(query, key, value, lengths, scale, window, softcap):
    """Compute the attention of each token by itself."""
    output = torch.zeros(query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    heads_per_key = query.shape[1] // key.shape[1]
    for own, prompt in places_of_parts(lengths):
        for number, token in enumerate(own):
            seen = [*prompt, *own[: number + 1]][-(window or 10**6) :]
            for head in range(query.shape[1]):
                logits = key[0, head // heads_per_key, seen] @ query[0, head, token] * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                output[token, head] = logits.softmax(0) @ value[0, head // heads_per_key, seen]
    return output.unsqueeze(0)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (5, 2.0)])
@pytest.mark.parametrize("seed", range(8))
def test_attention_and_gradients_are_those_of_each_part_alone(seed, window, softcap):
    lengths = drawn_lengths(seed)
    draw = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(1, heads, lengths.tokens, width, dtype=torch.float64, generator=draw, requires_grad=True)
        for heads, width in ((4, 8), (2, 8), (2, 6))
    ]
    expected = by_loop(*tensors, lengths, 0.4, window, softcap)
    actual = attention._attend_in_row(*tensors, lengths, (0.4, window, softcap))
    weights = torch.linspace(-1, 2, actual.numel(), dtype=torch.float64).view_as(actual)
    single = softcap is not None  # whose weights are float32
    assert_close(actual, expected, rtol=0, atol=1e-6 if single else 1e-12)
    gradients = [torch.autograd.grad((each * weights).sum(), tensors) for each in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=0, atol=1e-5 if single else 1e-11)


@pytest.mark.parametrize("seed", range(30))
def test_every_part_is_in_one_call(seed):
    lengths = drawn_lengths(seed)
    texts = [text for call in texts_of_calls(lengths) for text in call]
    parts = [(own, prompt) for own, prompt in places_of_parts(lengths) if own]
    expected = {Text(len(prompt), len(own), prompt.start, own.start) for own, prompt in parts}
    assert set(texts) == expected
    assert len(texts) == len(expected)


def test_texts_of_similar_lengths_share_calls_and_others_do_not():
    calls = texts_of_calls(PackedLengths((100, 900, 101, 98, 100, 905), ((),) * 6))
    assert [[text.tokens for text in call] for call in calls] == [[900, 905], [98, 100, 100, 101]]
    prompts_of_unlike_lengths = PackedLengths((30, 34, 32), ((60, 58), (61,), (64, 57)))
    assert len(texts_of_calls(prompts_of_unlike_lengths)) == 2
    assert [call.mask is None for call in layout(prompts_of_unlike_lengths).calls] == [True, False]


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        pytest.param(PackedLengths((7,) * 128, ((),) * 128), 1, id="as many texts as allowed"),
        pytest.param(PackedLengths((7,) * 129, ((),) * 129), 2, id="one text more"),
        pytest.param(PackedLengths((16, 48), ((), ())), 1, id="2,048 weights of padding"),
        pytest.param(PackedLengths((15, 48), ((), ())), 2, id="more of them"),
        pytest.param(PackedLengths((678,), ((1, 4),)), 3, id="2,049 of them"),
        pytest.param(PackedLengths((511, 512), ((512,), (512,))), 2, id="a mask of a million weights"),
        pytest.param(PackedLengths((512, 513), ((512,), (512,))), 3, id="a larger mask"),
        pytest.param(PackedLengths((60, 2, 100), ((20, 80), (40, 20), (20,))), 6, id="sorted by all their tokens"),
    ],
)
def test_texts_share_calls_up_to_the_documented_costs(lengths, calls):
    assert len(texts_of_calls(lengths)) == calls


@pytest.mark.parametrize(
    "lengths",
    [PackedLengths((700,), ((),)), PackedLengths((64,) * 5, ((),) * 5), PackedLengths((300, 2000, 50), ((),) * 3)],
)
def test_texts_without_padding_stay_where_they_are(lengths):
    assert layout(lengths)[1:] == (None, None, None)


def test_long_responses_to_unlike_prompts_have_no_mask_of_their_own():
    lengths = PackedLengths((700, 710), ((1500, 1500), (1500,)))
    assert [call.mask for call in layout(lengths).calls] == [None] * 3
    assert [(call.texts, call.keys) for call in layout(lengths).calls[1:]] == [(2, 2200), (1, 2210)]


def test_masks_hide_padding_later_tokens_and_those_before_the_window():
    (prompts, responses) = layout(PackedLengths((1, 3), ((2,), (2,))), window=3).calls
    assert prompts.mask is None
    assert ALIGNMENT == 8  # elements of 2 bytes, of which torch's kernels read 16 bytes at a time
    assert responses.mask.stride(2) % ALIGNMENT == 0
    visible = [
        ["".join("x" if key == 0 else "." for key in row) for row in text[0].tolist()] for text in responses.mask
    ]
    assert visible == [["..xx.", "..xxx"], [".xxx.", "..xxx"]]


def test_padding_costs_little():
    draw = random.Random(0)
    for _ in range(20):
        prompts = tuple(draw.randint(20, 200) for _ in range(16))
        lengths = PackedLengths(prompts, tuple(tuple(draw.randint(5, 300) for _ in range(4)) for _ in prompts))
        calls = texts_of_calls(lengths)
        weights = sum(text.tokens * (text.prompt + text.tokens) for call in calls for text in call)
        padded = sum(call.texts * call.queries * call.keys for call in layout(lengths).calls)
        assert padded <= 1.3 * weights
        assert len(calls) < 60  # of 80 parts
