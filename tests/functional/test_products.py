"""Products of linear layers by oneDNN equal those of torch, and are left to torch where oneDNN has no advantage."""

import pytest
import torch
from torch.nn import functional

from lightning_rlhf.functional import products


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """Use oneDNN on every CPU; return the shapes of the weights that it multiplies."""
    shapes = []
    product = products._onednn

    def counted(states, weight, bias=None):
        shapes.append(tuple(weight.shape))
        return product(states, weight, bias)

    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    monkeypatch.setattr(products, "_onednn", counted)
    return shapes


def _layer(rows, bias):
    torch.manual_seed(0)
    tensors = [torch.randn(*rows, 96), torch.randn(80, 96) / 10, torch.randn(80) if bias else None]
    return [None if each is None else each.requires_grad_() for each in tensors]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(7,), (2, 5), (1, 300), (0,)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_values_and_gradients_are_those_of_float64(rows, bias, transpose, onednn):
    ours, exact = _layer(rows, bias), [None if each is None else each.double() for each in _layer(rows, bias)]
    results = []
    for states, weight, shift, function in (
        (*ours, products.linear),
        (*[None if each is None else each.detach().requires_grad_() for each in exact], functional.linear),
    ):
        inputs = [each for each in (states, weight, shift) if each is not None]
        if transpose:  # any strides
            weight = weight.T.contiguous().T
            states = states.transpose(0, -1).contiguous().transpose(0, -1)
        output = function(states, weight, shift)
        loss = (output * torch.linspace(-1, 1, 80, dtype=output.dtype)).sum()
        results.append([output, *torch.autograd.grad(loss, inputs)])
    assert onednn or rows == (0,)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_in_given_memory_has_the_same_bits_in_any_slices(bias, dtype, onednn, monkeypatch):
    states, weight, shift = (None if each is None else each.detach() for each in _layer((7,), bias))
    weight, shift = weight.repeat(3, 1), None if shift is None else shift.repeat(3)
    expected = products.linear(states, weight, shift).to(dtype)
    monkeypatch.setattr(products, "_SLICE_BYTES", 7 * 4 * 100)  # slices of 100, 100 and 40 columns
    onednn.clear()
    out = torch.empty(7, 240, dtype=dtype)
    assert products.linear_into(out, states, weight, shift) is out
    assert onednn == [(100, 96), (100, 96), (40, 96)]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "of_out"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_product_of_other_dtypes_in_given_memory_is_that_of_torch(bias, dtype, of_out, onednn):
    tensors = [None if each is None else each.detach().to(dtype) for each in _layer((7,), bias)]
    out = products.linear_into(torch.empty(7, 80, dtype=of_out), *tensors)
    assert not onednn
    torch.testing.assert_close(out, functional.linear(*tensors).to(of_out))


def test_gradient_expanded_from_one_number_is_supported():
    states, weight, _ = _layer((5,), bias=False)
    products.linear(states, weight).sum().backward()
    torch.testing.assert_close(states.grad, weight.detach().sum(dim=0).expand(5, -1))
    torch.testing.assert_close(weight.grad, states.detach().sum(dim=0).expand(80, -1))


def test_gradients_have_gradients():
    results = []
    for function in (products.linear, functional.linear):
        tensors = _layer((70,), bias=True)
        gradients = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        sum(each.square().sum() for each in gradients).backward()
        results.append([each.grad for each in tensors])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-2)


def test_single_state_and_functional_gradients_equal_those_of_torch():
    states, weight, _ = (None if each is None else each.detach() for each in _layer((70,), bias=False))
    torch.testing.assert_close(products.linear(states[0], weight), functional.linear(states[0], weight))
    actual, expected = (
        torch.func.grad(lambda instance, function=function: function(states, instance).square().sum())(weight)
        for function in (products.linear, functional.linear)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_required_gradients_are_computed(frozen, onednn):
    tensors = _layer((70,), bias=True)
    tensors[frozen].requires_grad_(False)
    products.linear(*tensors).sum().backward()
    assert [each.grad is None for each in tensors] == [index == frozen for index in range(3)]
    assert len(onednn) == (3 if frozen == 2 else 2)


def test_forward_pass_without_gradients_keeps_no_graph():
    with torch.no_grad():
        assert not products.linear(*_layer((5,), bias=True)).requires_grad


class _Sharded(torch.Tensor):
    """A tensor subclass, like the shards of tensor parallelism."""


@pytest.mark.parametrize("case", ["float64", "bfloat16", "autocast", "small", "subclass", "disabled", "old CPU"])
def test_other_products_are_left_to_torch(case, onednn, monkeypatch):
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    width = 16 if case == "small" else 96
    states, weight = torch.randn(5, width, dtype=dtype), torch.randn(80, width, dtype=dtype)
    if case == "subclass":
        weight = weight.as_subclass(_Sharded)
    if case == "old CPU":
        monkeypatch.undo()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        products._has_onednn.cache_clear()
        assert not products.uses_onednn(states, weight)
        products._has_onednn.cache_clear()
        return
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", case != "disabled")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        product = products.linear(states, weight)
        expected = functional.linear(states, weight)
    assert not onednn
    assert product.dtype == expected.dtype
    assert torch.equal(product, expected)
