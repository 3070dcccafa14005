"""Limits of the sampling: cases by hand, transformers' own limits, a loop in float64, and what must always hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightning_rlhf.functional.allowed_tokens import EVERY_TOKEN, Found, Known, allowed_tokens, of_all_ranks
from lightning_rlhf.functional.logprobs import chunked_token_scores
from lightning_rlhf.types import AllowedTokens, SamplingLimits
from tests.helpers import assert_close, normal, over_ranks

HALVES = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]]).log()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (SamplingLimits(top_k=1), [1]),
        (SamplingLimits(top_k=3), [0, 1, 3]),
        (SamplingLimits(top_k=4), [0, 1, 2, 3, 4]),  # the fourth and the fifth are equally likely
        (SamplingLimits(top_k=9), [0, 1, 2, 3, 4]),
        (SamplingLimits(top_p=0.5), [1]),
        (SamplingLimits(top_p=0.51), [1, 3]),
        (SamplingLimits(top_p=0.75), [1, 3]),
        (SamplingLimits(top_p=0.8), [0, 1, 3]),
        (SamplingLimits(min_p=0.5), [1, 3]),
        (SamplingLimits(min_p=0.51), [1]),
        (SamplingLimits(min_p=0.2), [0, 1, 3]),
        # Of 1/2 and 1/4 alone, 1/2 has two thirds: the limits before top-p decide what its probability is a part of.
        (SamplingLimits(top_k=2, top_p=0.6), [1]),
        (SamplingLimits(top_p=0.6), [1, 3]),
        (SamplingLimits(min_p=0.5, top_p=0.6), [1]),
        (SamplingLimits(top_k=4, min_p=0.2), [0, 1, 3]),
    ],
)
def test_cases_by_hand(limits, expected):
    assert allowed_tokens(HALVES, limits).nonzero()[:, 1].tolist() == expected


@pytest.mark.parametrize(
    ("limits", "theirs"),
    [
        (SamplingLimits(top_k=13), [TopKLogitsWarper(13)]),
        (SamplingLimits(top_p=0.37), [TopPLogitsWarper(0.37)]),
        (SamplingLimits(top_p=0.999), [TopPLogitsWarper(0.999)]),
        (SamplingLimits(min_p=0.07), [MinPLogitsWarper(0.07)]),
        (SamplingLimits(0.8, 20, 0.01), [MinPLogitsWarper(0.01), TopKLogitsWarper(20), TopPLogitsWarper(0.8)]),
    ],
)
def test_limits_are_those_of_transformers_in_our_order(limits, theirs):
    logits = 3 * normal(50, 700, seed=1)  # more tokens than are sorted at first
    kept = logits
    for limit in theirs:
        kept = limit(torch.zeros(50, 1, dtype=torch.long), kept)
    ours = allowed_tokens(logits, limits)
    assert torch.equal(ours, kept.isfinite())
    assert 0 < ours.sum() < ours.numel()


def test_a_flat_distribution_needs_more_tokens_than_are_sorted_at_first():
    probabilities = torch.arange(1, 5001, dtype=torch.float64)
    kept = allowed_tokens(probabilities.log().unsqueeze(0), SamplingLimits(top_p=0.9))
    # sum of the tokens above n: at least 0.9 of 5000 * 5001 / 2
    smallest = next(n for n in range(5000, 0, -1) if sum(range(n, 5001)) >= 0.9 * 5000 * 5001 / 2)
    assert kept[0].nonzero().flatten().tolist() == list(range(smallest - 1, 5000))


@given(
    p=st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
    k=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    least=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_the_most_likely_token_stays_and_wider_limits_keep_more(p, k, least, seed):
    logits = normal(7, 40, seed=seed)
    narrow, wide = (SamplingLimits(of_p(p), k[0], least) for of_p in (min, max))
    kept = allowed_tokens(logits, narrow)
    assert kept[torch.arange(7), logits.argmax(dim=1)].all()
    assert not (kept & ~allowed_tokens(logits, wide)).any()
    narrow, wide = (SamplingLimits(top_k=of_k(k), min_p=least) for of_k in (min, max))
    assert not (allowed_tokens(logits, narrow) & ~allowed_tokens(logits, wide)).any()
    assert allowed_tokens(logits, SamplingLimits()).all()


def loop(logits, targets, limits, limited):
    """Return log-probs and entropies over the allowed tokens, token by token, and these tokens."""
    logprobs, entropies, allowed = [], [], []
    for row, target, is_limited in zip(logits, targets.tolist(), limited.tolist(), strict=True):
        probabilities = row.detach().softmax(0)
        tokens = [v for v in range(len(row)) if probabilities[v] >= limits.min_p * probabilities.max()]
        tokens.sort(key=lambda v: -float(probabilities[v]))
        tokens = tokens[: limits.top_k or None]
        wanted, nucleus = limits.top_p * sum(float(probabilities[v]) for v in tokens), []
        for token in tokens:
            if limits.top_p == 1 or sum(float(probabilities[v]) for v in nucleus) < wanted:
                nucleus.append(token)
        kept = sorted({*nucleus, target}) if is_limited else list(range(len(row)))
        normalised = row[kept].log_softmax(0)
        logprobs.append(normalised[kept.index(target)])
        entropies.append(-(normalised.exp() * normalised).sum())
        allowed.append((kept if is_limited else [], is_limited and target not in nucleus))
    return torch.stack(logprobs), torch.stack(entropies), allowed


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tokens_kept", [0, 6, 100])
@pytest.mark.parametrize(
    "limits", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01}]
)
def test_log_probs_entropies_and_gradients_are_those_of_a_loop(limits, tokens_kept, softcap):
    tokens, vocabulary, scale, limits = 37, 211, 1 / 0.7, SamplingLimits(**limits)
    targets = normal(tokens, vocabulary, seed=2).argmax(dim=1)
    limited = torch.arange(tokens) % 5 != 0
    weights = normal(2, tokens, seed=3)

    def scored(score):
        hidden, weight = (normal(rows, 16, seed=rows).requires_grad_() for rows in (tokens, vocabulary))
        logprobs, entropies, *found = score(hidden, weight)
        (logprobs * weights[0] + entropies * weights[1]).sum().backward()
        return logprobs, entropies, hidden.grad, weight.grad, *found

    def by_loop(hidden, weight):
        logits = hidden @ weight.T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return loop(logits * scale, targets, limits, limited)

    def with_restriction(restriction, hidden, weight):
        memory = {"chunk_bytes": 4 * vocabulary * 5, "keep_bytes": 4 * vocabulary * tokens_kept}
        options = {"scale": scale, "softcap": softcap, "restriction": restriction, **memory}
        return chunked_token_scores(hidden, weight, None, targets, **options)[:2]

    found = Found(limits, limited)
    *expected, allowed = scored(by_loop)
    ours = scored(lambda *head: with_restriction(found, *head))
    for value, wanted in zip(ours, expected, strict=True):
        assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    counts, ids, added = found.tokens()
    assert [len(each) for each, _ in allowed] == counts.tolist()
    assert [token for each, _ in allowed for token in each] == ids.tolist()
    assert [is_added for _, is_added in allowed] == added.tolist()
    assert added.any()
    assert (~added & limited).any()
    again = scored(lambda *head: with_restriction(Known(AllowedTokens.of(counts, ids)), *head))
    for value, before in zip(again, ours, strict=True):
        assert torch.equal(value, before)


def test_tokens_that_are_not_allowed_get_no_gradient():
    hidden, weight = normal(1, 4, seed=1), normal(9, 4, seed=2).requires_grad_()
    known = Known(AllowedTokens.of(torch.tensor([2]), torch.tensor([3, 5])))
    chunked_token_scores(hidden, weight, None, torch.tensor([5]), restriction=known).logprobs.sum().backward()
    assert weight.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [3, 5]


def test_without_limits_scores_are_the_same_bits():
    hidden, weight, targets = normal(9, 4, seed=1), normal(31, 4, seed=2), torch.arange(9)
    every = Known(AllowedTokens.every(9))
    ours = chunked_token_scores(hidden, weight, None, targets, restriction=every)
    plain = chunked_token_scores(hidden, weight, None, targets, restriction=EVERY_TOKEN)
    assert torch.equal(ours.logprobs, plain.logprobs)
    assert torch.equal(ours.entropy, plain.entropy)


def places(tokens):
    """Return the allowed tokens of each place as lists."""
    numbers, ids = tokens.listed()
    return [ids[numbers == place].tolist() for place in range(tokens.counts.numel())]


def test_selected_rows_have_their_tokens():
    tokens = AllowedTokens.of(torch.tensor([[1, 0], [2, 3], [0, 1]]), torch.arange(7))
    assert places(tokens) == [[0], [], [1, 2], [3, 4, 5], [], [6]]
    assert places(tokens[[2, 1]]) == [[], [6], [1, 2], [3, 4, 5]]
    joined = AllowedTokens.join([tokens[[2, 1]], tokens[[0]]])
    assert places(joined) == [[], [6], [1, 2], [3, 4, 5], [0], []]
    assert joined.ids.ids.tolist() == [6, 1, 2, 3, 4, 5, 0]
    assert joined == tokens[[2, 1, 0]]
    assert joined != tokens
    assert tokens != "other"


def test_ranks_exchange_the_tokens_of_their_rows():
    first = AllowedTokens.of(torch.tensor([[2], [0]]), torch.tensor([4, 5]))
    second = AllowedTokens.of(torch.tensor([[1]]), torch.tensor([9]))

    def gathered(own):
        def run(ranks):
            return of_all_ranks(own, ranks).map(ranks.gather)

        return run

    for seen in over_ranks(gathered(first), gathered(second)):
        assert places(seen) == [[4, 5], [], [9]]
