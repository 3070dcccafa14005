import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.extras.algorithms.divergence import TeacherHead, distillation_scores, top_tokens
from lightning_rlhf.functional.logprobs import token_scores
from lightning_rlhf.types import TopTokens
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

ROOT = Path(__file__).resolve().parents[3]
WIDTH, VOCABULARY, TEACHER_WIDTH = 4, 7, 3
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
EYE = torch.eye(3, dtype=torch.float64)


def models(tokens, seed, *, teacher_vocabulary=VOCABULARY, bias=True):
    """Return hidden states, weight and bias of a student with gradient, targets, and a teacher."""
    hidden = normal(tokens, WIDTH, seed=seed).requires_grad_()
    weight = normal(VOCABULARY, WIDTH, seed=seed + 1).requires_grad_()
    offset = normal(VOCABULARY, seed=seed + 2).requires_grad_() if bias else None
    targets = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))
    head = normal(teacher_vocabulary, TEACHER_WIDTH, seed=seed + 4), normal(teacher_vocabulary, seed=seed + 5)
    return hidden, weight, offset, targets, TeacherHead(normal(tokens, TEACHER_WIDTH, seed=seed + 3), *head)


def of_probabilities(student, teacher, beta):
    """Return the divergence of each row of probabilities, by the functions that models call."""
    student, teacher = float64(student).log(), float64(teacher).log()
    identity = torch.eye(student.shape[1], dtype=torch.float64)
    ones = torch.ones(len(student), dtype=torch.float64)
    targets = torch.zeros(len(student), dtype=torch.long)
    head = TeacherHead(teacher, identity)
    return distillation_scores(student, identity, None, targets, head, ones, beta=beta).divergence


def loop(student, teacher, beta):
    """Return the divergence of one pair of distributions, written from equation 1 of Agarwal et al. 2023."""
    total = 0.0
    for p, q in zip(student, teacher, strict=True):
        if beta == 0:
            total += q * math.log(q / p)
        elif beta == 1:
            total += p * math.log(p / q)
        else:
            m = beta * q + (1 - beta) * p
            total += beta * q * math.log(q / m) + (1 - beta) * p * math.log(p / m)
    return total


def events(probabilities, ids):
    """Return the probabilities of some tokens and of all others together."""
    return [*(probabilities[i] for i in ids), sum(p for i, p in enumerate(probabilities) if i not in ids)]


# -- values -----------------------------------------------------------------------------------------------------------


def test_divergences_of_a_case_worked_by_hand():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/4 ln 2 in both directions.
    # beta 1/2: m = (3/8, 1/4, 3/8), D = 1/2 (1/4 ln 2/3 + 1/2 ln 4/3) 2 = 1/4 ln 2/3 + 1/2 ln 4/3
    p, q = [[0.5, 0.25, 0.25]], [[0.25, 0.25, 0.5]]
    assert_close(of_probabilities(p, q, 0.0), [0.25 * math.log(2)])
    assert_close(of_probabilities(p, q, 1.0), [0.25 * math.log(2)])
    assert_close(of_probabilities(p, q, 0.5), [0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)])
    # p = (1/2, 1/2), q = (3/4, 1/4): the directions differ.
    p, q = [[0.5, 0.5]], [[0.75, 0.25]]
    assert_close(of_probabilities(p, q, 0.0), [0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert_close(of_probabilities(p, q, 1.0), [0.5 * math.log(2 / 3) + 0.5 * math.log(2)])
    # beta 1/4: m = 1/4 q + 3/4 p = (9/16, 7/16)
    kl_q = 0.75 * math.log(12 / 9) + 0.25 * math.log(4 / 7)
    kl_p = 0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)
    assert_close(of_probabilities(p, q, 0.25), [0.25 * kl_q + 0.75 * kl_p])


@properties
@given(seeds, st.sampled_from(BETAS), st.sampled_from([None, 5.0]), st.sampled_from([None, 2]))
def test_divergence_follows_the_definition(seed, beta, softcap, top_k):
    hidden, weight, bias, targets, teacher = models(5, seed)
    weights = normal(5, seed=seed + 9)
    with torch.no_grad():
        logits = hidden @ weight.T + bias
        logits = 0.8 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
        expected = (teacher.states @ teacher.weight.T + teacher.bias).softmax(-1)
    distributions = teacher
    if top_k:
        distributions = top_tokens(*teacher[:3], top_k)
    scores = distillation_scores(
        hidden, weight, bias, targets, distributions, weights, beta=beta, scale=0.8, softcap=softcap
    )
    pairs = [(p.tolist(), q.tolist()) for p, q in zip(logits.softmax(-1), expected, strict=True)]
    if top_k:
        pairs = [
            (events(p, ids), events(q, ids)) for (p, q), ids in zip(pairs, distributions.ids.tolist(), strict=True)
        ]
    divergence = float64([loop(p, q, beta) for p, q in pairs])
    assert_close(scores.divergence, divergence, rtol=1e-11, atol=1e-12)
    assert_close(scores.loss, (weights * divergence).sum(), rtol=1e-11, atol=1e-12)
    of_targets = token_scores(logits, targets)
    assert_close(scores.logprobs, of_targets.logprobs, rtol=1e-6, atol=1e-6)
    assert_close(scores.entropy, of_targets.entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_and_gradients_are_those_of_trl(beta):
    record = golden("distillation")
    given_values = {name: float64(values).float() for name, values in record["inputs"].items()}
    settings = record["settings"]
    expected = next(case for case in record["whole"] if case["beta"] == beta)
    hidden, weight = given_values["hidden"].requires_grad_(), given_values["weight"].requires_grad_()
    scale = settings["teacher_scale"] / settings["temperature"]
    teacher = TeacherHead(given_values["teacher_hidden"], given_values["teacher_weight"], scale=scale)
    scores = distillation_scores(
        hidden,
        weight,
        None,
        torch.zeros(len(hidden), dtype=torch.long),
        teacher,
        given_values["token_weights"],
        beta=beta,
        scale=1 / settings["temperature"],
        softcap=settings["softcap"],
    )
    scores.loss.backward()
    assert_close(scores.divergence, expected["divergence"], rtol=1e-4, atol=1e-6)
    assert_close(scores.entropy, expected["entropy"], rtol=1e-5)
    assert_close(hidden.grad, expected["hidden_gradient"], rtol=1e-4, atol=1e-6)
    assert_close(weight.grad, expected["weight_gradient"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_over_top_tokens_is_that_of_trl(beta):
    record = golden("distillation")
    values = {name: float64(rows) for name, rows in record["inputs"].items()}
    expected = next(case for case in record["top"] if case["beta"] == beta)
    tokens = top_tokens(values["teacher_hidden"], values["teacher_weight"], None, record["settings"]["top_k"])
    targets = torch.zeros(len(values["hidden"]), dtype=torch.long)
    scores = distillation_scores(
        values["hidden"], values["weight"], None, targets, tokens, values["token_weights"], beta=beta
    )
    assert_close(scores.divergence, expected["divergence"])


# -- gradients --------------------------------------------------------------------------------------------------------


@properties
@given(
    seeds,
    st.sampled_from(BETAS),
    st.sampled_from([None, 4.0]),
    st.sampled_from([None, 3]),
    st.sampled_from([1, 300, 1 << 20]),
)
def test_gradients_are_those_of_autograd_for_any_memory(seed, beta, softcap, top_k, memory):
    hidden, weight, bias, targets, teacher = models(6, seed)
    weights = normal(6, seed=seed + 9)
    logits = hidden @ weight.T + bias
    logits = 0.8 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
    student, expected = logits.softmax(-1), (teacher.states @ teacher.weight.T + teacher.bias).softmax(-1)
    distributions = teacher
    if top_k:
        distributions = top_tokens(*teacher[:3], top_k)
        student, expected = (
            torch.cat([top := p.gather(-1, distributions.ids), 1 - top.sum(-1, keepdim=True)], dim=-1)
            for p in (student, expected)
        )
    mixture = beta * expected + (1 - beta) * student
    from_teacher, from_student = ((p * (p / mixture).log()).sum(-1) for p in (expected, student))
    if beta == 0:
        divergence = (expected * (expected / student).log()).sum(-1)
    elif beta == 1:
        divergence = (student * (student / expected).log()).sum(-1)
    else:
        divergence = beta * from_teacher + (1 - beta) * from_student
    parameters = (hidden, weight, bias)
    by_autograd = torch.autograd.grad(2.5 * (divergence * weights).sum(), parameters)
    scores = distillation_scores(
        *(hidden, weight, bias, targets, distributions, weights),
        beta=beta,
        scale=0.8,
        softcap=softcap,
        memory_bytes=memory,
    )
    for ours, theirs in zip(torch.autograd.grad(2.5 * scores.loss, parameters), by_autograd, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [None, 2, VOCABULARY])
def test_student_equal_to_its_teacher_has_no_divergence_and_no_gradient(beta, top_k):
    hidden, weight, bias, targets, _ = models(5, seed=3)
    teacher = TeacherHead(hidden.detach(), weight.detach(), bias.detach())
    if top_k:
        teacher = top_tokens(*teacher[:3], top_k)
    scores = distillation_scores(hidden, weight, bias, targets, teacher, torch.ones(5), beta=beta)
    assert_close(scores.divergence, torch.zeros(5), atol=1e-14)
    for gradient in torch.autograd.grad(scores.loss, (hidden, weight, bias)):
        assert_close(gradient, torch.zeros_like(gradient), atol=1e-14)


# -- properties -------------------------------------------------------------------------------------------------------


@properties
@given(seeds)
def test_divergence_approaches_both_kl_divergences_at_its_limits(seed):
    student, teacher = (normal(4, 6, seed=seed + i).softmax(-1).tolist() for i in range(2))
    forward, reverse = (of_probabilities(student, teacher, beta) for beta in (0.0, 1.0))
    small = 1e-6
    assert_close(of_probabilities(student, teacher, small) / small, forward, rtol=1e-3)
    assert_close(of_probabilities(student, teacher, 1 - small) / small, reverse, rtol=1e-3)


@properties
@given(seeds, st.sampled_from(BETAS))
def test_all_tokens_as_top_ones_are_the_whole_distribution_and_fewer_hide_some_of_it(seed, beta):
    hidden, weight, bias, targets, teacher = models(5, seed)
    arguments = (hidden, weight, bias, targets)
    whole = distillation_scores(*arguments, teacher, torch.ones(5), beta=beta)
    by_count = [
        distillation_scores(*arguments, top_tokens(*teacher[:3], count), torch.ones(5), beta=beta).divergence
        for count in range(1, VOCABULARY + 1)
    ]
    assert_close(by_count[-1], whole.divergence, rtol=1e-5, atol=1e-6)  # the rest has at least 1e-7
    for fewer, more in itertools.pairwise(by_count):
        assert (fewer <= more + 1e-6).all()
    assert (whole.divergence >= 0).all()


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("rounded", [(False, False), (True, False), (False, True), (True, True)])
def test_logits_of_a_head_in_bfloat16_are_rounded_if_they_shall_be(rounded, top_k, monkeypatch):
    monkeypatch.undo()  # bfloat16 needs the dtypes of the code
    torch.set_default_dtype(torch.float32)
    hidden, states = (normal(5, 32, seed=seed).bfloat16() for seed in (1, 2))
    weight, head = ((0.3 * normal(VOCABULARY, 32, seed=seed)).bfloat16() for seed in (3, 4))
    targets = torch.arange(5)
    logits = [x.double() @ y.double().T for x, y in ((hidden, weight), (states, head))]
    logits = [x.bfloat16().double() if rounds else x for x, rounds in zip(logits, rounded, strict=True)]
    p, q = (x.log_softmax(-1) for x in logits)
    own = p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if top_k:
        ids = q.topk(top_k).indices
        p, q = (torch.cat([t := x.gather(-1, ids), (1 - t.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
        teacher = top_tokens(states, head, None, top_k, float32_logits=not rounded[1])
    else:
        teacher = TeacherHead(states, head, rounds_to=torch.bfloat16 if rounded[1] else None)
    ones = torch.ones(5)
    scores = distillation_scores(hidden, weight, None, targets, teacher, ones, beta=0.0, float32_logits=not rounded[0])
    assert_close(scores.divergence.double(), (q.exp() * (q - p)).sum(-1), rtol=0, atol=1e-5)
    assert_close(scores.logprobs.double(), own, rtol=0, atol=1e-5)


def test_padding_tokens_of_one_model_do_not_count():
    hidden, weight, bias, targets, teacher = models(5, seed=11, teacher_vocabulary=VOCABULARY + 2)
    shorter = teacher._replace(weight=teacher.weight[:VOCABULARY], bias=teacher.bias[:VOCABULARY])
    long, same = (
        distillation_scores(hidden, weight, bias, targets, each, torch.ones(5), beta=0.5) for each in (teacher, shorter)
    )
    assert torch.equal(long.divergence, same.divergence)
    wide = torch.cat([weight, normal(2, WIDTH, seed=1)]).detach().requires_grad_()
    offset = torch.cat([bias, normal(2, seed=2)]).detach().requires_grad_()
    scores = distillation_scores(hidden, wide, offset, targets, shorter, torch.ones(5), beta=0.5)
    assert_close(scores.divergence, same.divergence, rtol=1e-12)
    scores.loss.backward()
    assert not wide.grad[VOCABULARY:].any()
    assert_close(scores.logprobs, (hidden @ wide.T + offset).log_softmax(-1).gather(1, targets[:, None])[:, 0])


def test_infinite_logits_of_both_models_have_no_probability():
    logits = float64([[1.0, 2.0, -math.inf]])
    teacher = TeacherHead(float64([[2.0, 1.0, -math.inf]]).clamp(min=-1e300), EYE)
    for beta in BETAS:
        hidden = logits.clamp(min=-1e300).requires_grad_()
        scores = distillation_scores(hidden, EYE, None, torch.tensor([0]), teacher, torch.ones(1), beta=beta)
        scores.loss.backward()
        expected = of_probabilities([[0.2689414, 0.7310586]], [[0.7310586, 0.2689414]], beta)
        assert_close(scores.divergence, expected, rtol=1e-6)
        assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
def test_top_tokens_without_probability_do_not_count(beta):
    impossible = TopTokens(
        torch.tensor([[0, 1]]), float64([[-0.5, -math.inf]]), float64([math.log(1 - math.exp(-0.5))])
    )
    alone = TopTokens(torch.tensor([[0]]), impossible.logprobs[:, :1], impossible.rest)
    hidden = float64([[1.0, -800.0, 0.5]]).requires_grad_()
    results = [
        distillation_scores(hidden, EYE, None, torch.tensor([0]), tokens, torch.ones(1), beta=beta)
        for tokens in (impossible, alone)
    ]
    assert_close(results[0].divergence, results[1].divergence)
    gradients = [torch.autograd.grad(result.loss, hidden)[0] for result in results]
    assert_close(*gradients, atol=1e-12)


def test_second_backward_pass_raises():
    hidden, weight, bias, targets, teacher = models(3, seed=2)
    loss = distillation_scores(hidden, weight, bias, targets, teacher, torch.ones(3), beta=0.5).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_without_tokens_have_a_loss_of_0_and_gradients_of_0():
    hidden, weight, bias, targets, teacher = models(0, seed=1)
    scores = distillation_scores(hidden, weight, bias, targets, teacher, torch.ones(0), beta=0.5)
    scores.loss.backward()
    assert scores.loss == 0
    assert not weight.grad.any()
    assert top_tokens(*teacher[:3], 2).ids.shape == (0, 2)


def test_rest_of_given_log_probs_is_all_other_probability():
    logprobs = torch.tensor([[0.5, 0.25], [0.75, 0.25]]).log()
    tokens = TopTokens.of(torch.tensor([[0, 1], [0, 1]]), logprobs)
    assert_close(tokens.rest, [math.log(0.25), math.log(1e-7)], rtol=1e-4)


def test_no_gradient_is_computed_without_grad_mode():
    hidden, weight, bias, targets, teacher = models(5, seed=4)
    with torch.no_grad():
        scores = distillation_scores(hidden, weight, bias, targets, teacher, torch.ones(5), beta=1.0)
    assert not scores.loss.requires_grad


def test_frozen_head_gets_no_gradient():
    hidden, weight, bias, targets, teacher = models(5, seed=4)
    frozen = weight.detach(), bias.detach()
    scores = distillation_scores(hidden, *frozen, targets, teacher, torch.ones(5), beta=1.0)
    scores.loss.backward()
    assert hidden.grad.any()


class _Allocations(TorchDispatchMode):
    """Records the bytes of the results of all operations, those of empty memory separately."""

    def __init__(self):
        super().__init__()
        self.storages, self.empty, self.computed = {}, [], []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        tensors = [leaf for leaf in tree_leaves((result, arguments)) if isinstance(leaf, torch.Tensor)]
        seen = self.empty if function.overloadpacket is torch.ops.aten.empty else self.computed
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.storages:
                seen.append(leaf.untyped_storage().nbytes())
        for leaf in tensors:  # kept, so that no later storage has its address
            self.storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
        return result


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("tokens", [200, 1000])
def test_memory_of_a_large_vocabulary_stays_below_200_mb_at_any_length(tokens, softcap):
    vocabulary, width = 152064, 8
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, requires_grad=True)
        weight = torch.empty(vocabulary, width, requires_grad=True)
        teacher = TeacherHead(torch.empty(tokens, width), torch.empty(vocabulary, width))
        targets = torch.zeros(tokens, dtype=torch.long)
        with _Allocations() as seen:
            distillation_scores(hidden, weight, None, targets, teacher, torch.ones(tokens), beta=0.5, softcap=softcap)
    assert max(seen.empty) > 30e6  # the chunks are as large as the memory allows
    # With a soft cap, its slope is there beside another temporary result.
    assert sum(seen.empty) + (1 if softcap is None else 2) * max(seen.computed) < 200e6


RESIDENT = """
import torch
from benchmarks.compare.head_memory import peak
from lightning_rlhf.extras.algorithms.divergence import TeacherHead, distillation_scores
torch.set_num_threads(1)
def step(tokens, vocabulary):
    hidden, weight = torch.randn(tokens, 64, requires_grad=True), torch.randn(vocabulary, 64, requires_grad=True)
    teacher = TeacherHead(torch.randn(tokens, 64), torch.randn(vocabulary, 64))
    targets = torch.zeros(tokens, dtype=torch.long)
    distillation_scores(hidden, weight, None, targets, teacher, torch.ones(tokens), beta=0.5).loss.backward()
step(128, 512)  # libraries load
before = peak()
step(512, 152064)
print(peak() - before - 3 * 152064 * 64 * 4 / 2**20)  # without both heads and the gradient of one
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of resident memory is read from /proc")
def test_resident_memory_of_a_large_vocabulary_stays_below_200_mb():
    options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
    shown = subprocess.run([sys.executable, "-c", RESIDENT], **options).stdout
    assert 20 < float(shown) < 200


def test_memory_of_the_top_tokens_of_a_teacher_stays_below_200_mb():
    with FakeTensorMode(), _Allocations() as seen:
        top_tokens(torch.empty(1000, 8), torch.empty(152064, 8), None, 64)
    large = [size for size in (*seen.empty, *seen.computed) if size > 152064 * 8 * 4]
    assert 3 * max(large) < 200e6  # product, copy and one temporary result
