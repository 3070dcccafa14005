"""Attention with torch's variable-length kernel, replaced by its definition because the tests run without a GPU."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen

from lightning_rlhf.batching.packing import PackedLengths
from lightning_rlhf.models import packed_attention
from tests.helpers import assert_close, normal

LENGTHS = {
    "one prompt": PackedLengths((5,), ((3, 4, 2),)),
    "a prompt without responses": PackedLengths((5, 3, 7), ((3, 4), (), (2, 2, 6))),
    "texts": PackedLengths((6, 4, 4, 9), ((), (), (), ())),
    "single tokens": PackedLengths((1, 1), ((1,), (9, 1))),
}
SHAPES = {  # heads, heads of keys, channels of keys, channels of values
    "one key for each head": (4, 4, 8, 8),
    "shared keys": (6, 2, 8, 8),
    "narrow values": (4, 2, 12, 8),
}


def attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, grouped):
    """Compute attention of each text by its definition: causal, aligned to the last key, within a window."""
    bounds = [[0, *cu_seq.tolist()[1:]] for cu_seq in (cu_seq_q, cu_seq_k)]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert [bounds[0][-1], bounds[1][-1]] == [len(query), len(key)]
    assert [max_q, max_k] == [max(end - start for start, end in pairwise(bound)) for bound in bounds]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert grouped or query.shape[1] == key.shape[1]
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    left, right = window_size
    assert right == 0
    outputs = []
    for (q_start, q_end), (k_start, k_end) in zip(*map(pairwise, bounds), strict=True):
        q, k, v = query[q_start:q_end], key[k_start:k_end], value[k_start:k_end]
        distance = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q) - torch.arange(len(k))
        visible = (distance >= 0) & ((distance <= left) | (left < 0))
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


# The signatures of torch's releases, read in their sources.


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError("torch 2.10 has neither scale nor window")


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, grouped=False)


def torch_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False,
):  # fmt: skip
    return attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, grouped=enable_gqa)


@pytest.fixture
def kernel(monkeypatch):
    """Replace torch's function, and let tensors on the CPU use it like tensors on a GPU."""

    def replace(function, capability=(8, 0)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        monkeypatch.setattr(packed_attention, "_capability", lambda device: capability)
        packed_attention._varlen_arguments.cache_clear()

    yield replace
    monkeypatch.undo()
    packed_attention._varlen_arguments.cache_clear()


def inputs(lengths, shape):
    heads, keys, width, value_width = shape
    sizes = ((heads, width), (keys, width), (keys, value_width))
    return [
        normal(1, count, lengths.tokens, channels, seed=seed).requires_grad_()
        for seed, (count, channels) in enumerate(sizes)
    ]


def with_gradients(output, tensors):
    outer = normal(*output.shape, seed=9)
    return [output.detach(), *torch.autograd.grad((output * outer).sum(), tensors)]


@pytest.mark.parametrize("function", [torch_2_11, torch_2_12])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_outputs_and_gradients_equal_those_of_attention_by_texts(kernel, lengths, shape, window, function):
    tensors = inputs(lengths, shape)
    scale = shape[2] ** -0.5
    by_texts, _ = packed_attention.packed_attention(
        torch.nn.Module(), *tensors, None, scaling=scale, sliding_window=window, is_causal=True, packed_lengths=lengths
    )
    kernel(function)
    by_kernel = packed_attention._varlen(*tensors, lengths, scale=scale, window=window)
    for actual, expected in zip(with_gradients(by_kernel, tensors), with_gradients(by_texts, tensors), strict=True):
        assert_close(actual, expected, atol=5e-6)


def fake_tensors(device="cuda", dtype=torch.bfloat16, width=64):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.empty(1, 4, 10, width, device=device, dtype=dtype)


@pytest.mark.parametrize("function", [torch_2_11, torch_2_12, varlen.varlen_attn])
def test_kernel_is_used_in_half_precision_since_ampere(kernel, function):
    kernel(function)
    for dtype in (torch.bfloat16, torch.float16):
        query = fake_tensors(dtype=dtype)
        assert packed_attention._has_varlen_kernel(query, query)


def test_torch_without_the_scale_argument_computes_attention_by_texts(kernel):
    kernel(torch_2_10)
    query = fake_tensors()
    assert not packed_attention._has_varlen_kernel(query, query)


def test_gpu_before_ampere_computes_attention_by_texts(kernel):
    kernel(torch_2_12, capability=(7, 5))
    query = fake_tensors()
    assert not packed_attention._has_varlen_kernel(query, query)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float32}, {"width": 288}])
def test_other_devices_dtypes_and_wide_heads_compute_attention_by_texts(kernel, options):
    kernel(torch_2_12)
    query = fake_tensors(**options)
    assert not packed_attention._has_varlen_kernel(query, query)


def test_amd_gpus_have_no_nvidia_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    packed_attention._capability.cache_clear()
    assert packed_attention._capability(torch.device("cuda", 0)) == (0, 0)
    packed_attention._capability.cache_clear()
