import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.functional import logprobs as module
from lightning_rlhf.functional.logprobs import (
    Float32Logits,
    chunk_bytes_on,
    chunked_token_scores,
    head_logits,
    keep_bytes_on,
    token_scores,
)
from tests.helpers import assert_close, float64, golden, normal, properties, seeds
from tests.shapes import unchecked

HIDDEN, VOCABULARY = 4, 7


def _head(tokens, seed, bias=True, dtype=torch.float32):
    """Return hidden states, weight and bias of a head, all with gradient, and targets."""
    hidden = normal(tokens, HIDDEN, seed=seed, dtype=dtype).requires_grad_()
    weight = normal(VOCABULARY, HIDDEN, seed=seed + 1, dtype=dtype).requires_grad_()
    offset = normal(VOCABULARY, seed=seed + 2, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))
    return hidden, weight, offset, targets


def chunk_of(tokens, weight):
    """Return the bytes of the logits of some tokens."""
    return 4 * len(weight) * tokens


def test_logprobs_and_entropy_of_a_case_worked_by_hand():
    # probabilities 1/8, 2/8, 5/8 and a uniform quarter;  H = ln 8 / 8 + ln 4 / 4 + 5/8 ln 1.6
    logits = torch.tensor([[1.0, 2.0, 5.0, 0.0], [3.0, 3.0, 3.0, 3.0]]).log().clamp(min=-100)
    logprobs, entropy = token_scores(logits, torch.tensor([1, 3]))[:2]
    assert_close(logprobs, [-1.3862944, -1.3862944])
    assert_close(entropy, [0.9002561, 1.3862944])


@properties
@given(seeds, st.sampled_from([0.1, 1.0, 10.0]))
def test_logprobs_and_entropy_follow_the_definition(seed, scale):
    logits, targets = scale * normal(5, 6, seed=seed), torch.tensor([0, 5, 2, 2, 4])
    logprobs, entropy = token_scores(logits, targets)[:2]
    for i, row in enumerate(logits.tolist()):
        total = math.fsum(math.exp(z) for z in row)
        probabilities = [math.exp(z) / total for z in row]
        assert_close(logprobs[i], math.log(probabilities[targets[i]]), atol=1e-5)
        assert_close(entropy[i], -math.fsum(p * math.log(p) for p in probabilities), atol=1e-5)


def test_logprobs_and_entropy_equal_those_of_verl_and_torch():
    recorded = golden("verl")
    logits, targets = float64(recorded["inputs"]["logits"]), torch.tensor(recorded["inputs"]["targets"])
    logprobs, entropy = token_scores(logits, targets)[:2]
    assert_close(logprobs, recorded["outputs"]["token_logprobs"], atol=1e-6)
    assert_close(entropy, recorded["outputs"]["token_entropy"], atol=1e-6)
    assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-6)


def test_half_precision_logits_are_computed_in_float32():
    logits = normal(3, 50, seed=0).bfloat16()
    targets = torch.tensor([4, 0, 49])
    logprobs, entropy = token_scores(logits, targets)[:2]
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = token_scores(logits.double(), targets)
    assert_close(logprobs, expected[0])
    assert_close(entropy, expected[1])


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    logprobs, entropy = token_scores(logits, torch.tensor([1, 0]))[:2]
    assert_close(logprobs, [-2e4, -math.log(3)], rtol=1e-3)
    assert_close(entropy, [0.0, math.log(3)], atol=1e-3)


def logits_of(hidden, weight, *options):
    return head_logits(hidden, weight, *options, out=torch.empty(len(hidden), len(weight)))


def test_head_caps_before_it_scales():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, -1.0]])
    bias = torch.tensor([0.5, 1.0])
    # 1 + 2 + 0.5 = 3.5;  -2 + 1 = -1
    assert_close(logits_of(hidden, weight, None, 1.0, None), [[3, -2]])
    assert_close(logits_of(hidden, weight, bias, 1.0, None), [[3.5, -1]])
    assert_close(logits_of(hidden, weight, bias, 2.0, None), [[7, -2]])
    # 2 tanh(1.75) = 1.8827517, 2 tanh(-0.5) = -0.9242343; then halved
    assert_close(logits_of(hidden, weight, bias, 1.0, 2.0), [[1.8827517, -0.9242343]])
    assert_close(logits_of(hidden, weight, bias, 0.5, 2.0), [[0.9413759, -0.4621172]])


@properties
@given(
    tokens=st.integers(0, 9),
    chunk_tokens=st.integers(1, 12),
    kept_tokens=st.integers(0, 12),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.7, 2.0]),
    softcap=st.sampled_from([None, 1.5]),
    seed=seeds,
)
def test_chunks_change_neither_values_nor_gradients(tokens, chunk_tokens, kept_tokens, bias, scale, softcap, seed):
    *inputs, targets = _head(tokens, seed, bias)
    hidden, weight, offset = inputs
    differentiable = [tensor for tensor in inputs if tensor is not None]

    # the definition, written out: all logits at once in float64
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    logits = scale * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
    every = logits.log_softmax(-1)
    expected = every[torch.arange(tokens), targets], -(every.exp() * every).sum(-1)
    actual = chunked_token_scores(
        hidden,
        weight,
        offset,
        targets,
        scale=scale,
        softcap=softcap,
        chunk_bytes=chunk_of(chunk_tokens, weight),
        keep_bytes=chunk_of(kept_tokens, weight),
    )[:2]

    outer = normal(2, tokens, seed=seed + 3)  # an arbitrary gradient from above, for both outputs
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.shape == (tokens,)
        assert ours.dtype == torch.float32
        assert_close(ours, exact, atol=1e-5)
    gradients, exact_gradients = (
        torch.autograd.grad((outer[0] * logprobs).sum() + (outer[1] * entropy).sum(), differentiable)
        for logprobs, entropy in (actual, expected)
    )
    for ours, exact in zip(gradients, exact_gradients, strict=True):
        assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_by_default_logits_are_neither_scaled_nor_capped_and_probabilities_not_squared():
    hidden, weight, bias, targets = _head(5, seed=5)
    expected = token_scores(hidden @ weight.T + bias, targets)
    assert expected.sum_pi_squared is chunked_token_scores(hidden, weight, bias, targets).sum_pi_squared is None
    for ours, exact in zip(chunked_token_scores(hidden, weight, bias, targets)[:2], expected[:2], strict=True):
        assert_close(ours, exact, atol=1e-6)


def test_mismatched_hidden_states_and_targets_are_rejected():
    hidden, weight, bias, targets = _head(6, seed=6)
    with unchecked(), pytest.raises(ValueError, match="one target for each hidden state expected, got 4 for 6"):
        chunked_token_scores(hidden, weight, bias, targets[:4])


def test_empty_input_still_reaches_every_parameter():
    # a rank that selects no token must take part in the gradient's collectives
    hidden, weight, bias, targets = _head(0, seed=0)
    logprobs, entropy = chunked_token_scores(hidden, weight, bias, targets)[:2]
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for parameter in (hidden, weight, bias):
        assert_close(parameter.grad, torch.zeros_like(parameter))


def test_values_without_gradients_are_equal_and_keep_no_graph():
    hidden, weight, bias, targets = _head(5, seed=1)
    with_graph = chunked_token_scores(hidden, weight, bias, targets, chunk_bytes=chunk_of(2, weight))
    with torch.no_grad():
        without = chunked_token_scores(hidden, weight, bias, targets, chunk_bytes=chunk_of(2, weight))
    for first, second in zip(with_graph[:2], without[:2], strict=True):
        assert first.requires_grad
        assert not second.requires_grad
        assert torch.equal(first, second)


def test_frozen_head_passes_gradients_on_to_the_hidden_states():
    hidden, weight, bias, targets = _head(5, seed=2)
    chunked_token_scores(hidden, weight.detach(), bias.detach(), targets, chunk_bytes=chunk_of(2, weight))[
        0
    ].sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert weight.grad is None


@pytest.fixture
def chunk_sizes(monkeypatch):
    """The number of rows of logits in each call of the head."""
    sizes = []

    def spy(hidden, *arguments, **options):
        sizes.append(len(hidden))
        return head_logits(hidden, *arguments, **options)

    monkeypatch.setattr(module, "head_logits", spy)
    return sizes


def test_only_one_chunk_of_logits_exists_and_backward_recomputes_discarded_ones(chunk_sizes):
    hidden, weight, bias, targets = _head(7, seed=3)
    chunks = {"chunk_bytes": chunk_of(3, weight), "keep_bytes": chunk_of(5, weight)}
    logprobs, _ = chunked_token_scores(hidden, weight, bias, targets, **chunks)[:2]
    assert chunk_sizes == [3, 3, 1]
    logprobs.sum().backward()
    assert chunk_sizes == [3, 3, 1, 3, 1]


def test_logits_are_computed_once_without_gradients(chunk_sizes):
    hidden, weight, bias, targets = _head(1025, seed=4)
    with torch.no_grad():
        chunked_token_scores(hidden, weight, bias, targets, chunk_bytes=chunk_of(1000, weight))
    assert chunk_sizes == [1000, 25]


def test_chunk_has_at_least_one_token_for_any_vocabulary(chunk_sizes):
    chunked_token_scores(*_head(3, seed=4), chunk_bytes=1)
    assert chunk_sizes == [1, 1, 1]


def test_second_backward_pass_gives_the_same_gradient():
    head = _head(3, seed=4)
    logprobs = chunked_token_scores(*head).logprobs
    first, second = (torch.autograd.grad(logprobs.sum(), head[:2], retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("wanted", ["logprobs", "entropy"])
def test_loss_of_one_output_has_the_gradient_of_that_output(wanted):
    hidden, weight, bias, targets = _head(5, seed=8)
    expected = getattr(token_scores(hidden @ weight.T + bias, targets), wanted)
    expected = torch.autograd.grad(expected.square().sum(), (hidden, weight, bias))
    actual = getattr(chunked_token_scores(hidden, weight, bias, targets), wanted)
    actual = torch.autograd.grad(actual.square().sum(), (hidden, weight, bias))
    for ours, exact in zip(actual, expected, strict=True):
        assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_head_padded_with_minus_infinity_has_finite_entropy_and_gradient():
    hidden = torch.ones(1, 1, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    scores = chunked_token_scores(hidden, torch.ones(3, 1), bias, torch.tensor([0]))
    (scores.logprobs + scores.entropy).sum().backward()
    assert_close(scores.entropy, torch.tensor([math.log(2)]))
    assert_close(scores.logprobs, torch.tensor([-math.log(2)]))
    assert hidden.grad.isfinite().all()


def test_head_in_bfloat16_has_the_float32_log_probabilities_of_its_rounded_values():
    """Peaked distributions: where logits are rounded to bfloat16, one of 20 is up to 0.06 off."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 32, generator=generator), torch.randn(200, 32, generator=generator)
    targets = (hidden @ weight.T).argmax(-1)
    low = [tensor.bfloat16() for tensor in (hidden, weight)]
    exact = (low[0].double() @ low[1].double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    scores = chunked_token_scores(*low, None, targets)
    assert_close(scores.logprobs, exact, rtol=0, atol=2e-5)
    rounded = (low[0].float() @ low[1].float().T).bfloat16()
    expected = rounded.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (expected - exact).abs().max() > 0.01
    scores = chunked_token_scores(*low, None, targets, float32_logits=False)
    assert_close(scores.logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_head_in_bfloat16_writes_no_bfloat16_logits_on_a_gpu(bias, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know "meta"
    with Dtypes(200) as dtypes:
        hidden = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(200, 32, dtype=torch.bfloat16, device="meta")
        bias = torch.empty(200, dtype=torch.bfloat16, device="meta") if bias else None
        with torch.no_grad():
            chunked_token_scores(hidden, weight, bias, torch.empty(64, dtype=torch.long, device="meta"))
    assert dtypes.of_logits == {torch.float32}


def test_plain_head_with_float32_results():
    head = torch.nn.Linear(32, 50).bfloat16().requires_grad_(False)
    head.__class__ = Float32Logits
    states = torch.randn(2, 3, 32).bfloat16()
    expected = torch.nn.functional.linear(*(tensor.double() for tensor in (states, head.weight, head.bias)))
    assert_close(head(states), expected, atol=1e-6)


def test_head_under_autocast_computes_in_bfloat16_and_adds_gradients_in_float32():
    hidden, weight, bias, targets = _head(64, seed=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = chunked_token_scores(hidden, weight, bias, targets, chunk_bytes=chunk_of(4, weight)).logprobs
    assert actual.dtype == torch.float32
    low = [tensor.detach().bfloat16() for tensor in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*(tensor.float() for tensor in low))
    assert_close(actual, token_scores(logits, targets).logprobs, atol=1e-5)
    gradients = torch.autograd.grad(actual.sum(), (hidden, weight, bias))
    rounded = [tensor.double().requires_grad_() for tensor in low]
    expected = token_scores(torch.nn.functional.linear(*rounded), targets).logprobs.sum()
    for ours, exact in zip(gradients, torch.autograd.grad(expected, rounded), strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - exact).norm() / exact.norm()) < 0.01


def test_vocabulary_padded_with_minus_infinity_has_finite_entropy_and_gradient():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropy = token_scores(logits, torch.tensor([0]))[:2]
    (logprobs + entropy).sum().backward()
    assert_close(entropy, torch.tensor([math.log(2)]))
    assert_close(logprobs, torch.tensor([-math.log(2)]))
    assert logits.grad.isfinite().all()


def test_sum_of_squared_probabilities_is_computed_on_request_without_gradient():
    logits = torch.tensor([[math.log(1.0), math.log(3.0)], [0.0, 0.0]], requires_grad=True)
    assert token_scores(logits, torch.tensor([0, 1])).sum_pi_squared is None
    squares = token_scores(logits, torch.tensor([0, 1]), squares=True).sum_pi_squared
    assert_close(squares, [1 / 16 + 9 / 16, 1 / 2])
    assert not squares.requires_grad


def test_chunks_give_the_sums_of_squared_probabilities_of_all_logits():
    hidden, weight, bias, targets = _head(7, seed=9)
    ours = chunked_token_scores(
        hidden, weight, bias, targets, squares=True, chunk_bytes=chunk_of(3, weight)
    ).sum_pi_squared
    assert_close(ours, ((hidden @ weight.T + bias).double().softmax(-1) ** 2).sum(-1), atol=1e-6)


def test_entropies_of_a_large_vocabulary_are_accurate():
    # float32 products of a row and a column as matrices were 1e-4 nats off at this size
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 64, generator=generator), torch.randn(50_000, 64, generator=generator) / 8
    targets = torch.zeros(9, dtype=torch.long)
    scores = chunked_token_scores(hidden, weight, None, targets, squares=True)
    every = (hidden.double() @ weight.double().T).log_softmax(-1)
    assert_close(scores.entropy, -(every.exp() * every).sum(-1), rtol=0, atol=4e-6)
    assert_close(scores.sum_pi_squared, (2 * every).exp().sum(-1), rtol=2e-6, atol=0)


class Dtypes(TorchDispatchMode):
    """Collects the dtypes of (64, V) tensors that kernels write."""

    def __init__(self, vocabulary):
        super().__init__()
        self.shape, self.of_logits = (64, vocabulary), set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        outputs = function(*arguments, **(keywords or {}))
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self.of_logits |= {tensor.dtype for tensor in tensors if tensor.shape == self.shape}
        return outputs


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that kernels read and write; views and allocations move none."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        outputs = function(*arguments, **(keywords or {}))
        returned = function._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if not is_view and "empty" not in function.name():
            tensors = {id(leaf): leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)}
            written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            self.count += sum(tensor.nbytes for tensor in (*tensors.values(), *written))
        return outputs


@pytest.mark.slow
def test_head_is_read_for_chunks_of_hundreds_of_tokens_on_a_gpu(monkeypatch):
    """Counted for a 7B model and 16,384 tokens in bfloat16 without a backward pass, which needs a GPU."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know "meta"
    tokens, vocabulary, width = 16_384, 152_064, 3_584
    moved = {}
    for device, place in (("cpu", "cpu"), ("cuda", "meta")):  # torch for CPUs has no graph of tensors on a GPU
        with FakeTensorMode():
            hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=place, requires_grad=True)
            weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device=place, requires_grad=True)
            targets = torch.empty(tokens, dtype=torch.long, device=place)
            sizes = {"chunk_bytes": chunk_bytes_on(device), "keep_bytes": keep_bytes_on(device)}
            with MovedBytes() as counted:
                chunked_token_scores(hidden, weight, None, targets, **sizes).logprobs.sum().backward()
            moved[device] = counted.count
    # all logits are 10 GB in float32, and the head is 1.1 GB
    assert moved["cuda"] < 0.8e12
    assert moved["cpu"] > 5e12


def test_scores_of_tokens_in_rows_are_those_of_the_tokens_alone():
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(5, (2, 3))
    rows, alone = token_scores(logits, targets), token_scores(logits.flatten(0, 1), targets.flatten())
    assert torch.equal(rows.logprobs.flatten(), alone.logprobs)
    assert torch.equal(rows.entropy.flatten(), alone.entropy)
