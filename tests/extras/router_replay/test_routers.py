"""Routers choose the experts that they are given, in every architecture that chooses by topk, with exact gradients."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig

from lightning_rlhf.batching.packing import pack_responses
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.router_replay.routers import Choice, ExpertRecorder, ForcedRouters, Routing
from lightning_rlhf.models.causal import hidden_states
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.types import RoutedExperts
from tests.models.architectures import tiny
from tests.stand_ins import Response, rollout_of

KNOWN = (
    "qwen3_moe", "gpt_oss", "deepseek_v3",  # these three in the quick suite
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "jamba", "laguna", "llama4_text", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_next", "solar_open",
)  # fmt: skip
UNKNOWN = ("phimoe", "doge")
IDS = torch.randint(3, 41, (2, 6), generator=torch.Generator().manual_seed(1))


def built(name, dtype="float32", **changes):
    model = FromConfig({**tiny(name), **changes}, seed=0, dtype=dtype).causal()
    if dtype == "float64":
        model.lm.set_experts_implementation("eager")  # products of groups are for other dtypes
    return model


def chosen(lm, ids=IDS):
    """Return the experts that a model chooses itself at each token of texts."""
    recorder = ExpertRecorder(lm)
    recorder.begin()
    hidden_states(lm, ids, None)
    recorder.remove()
    return recorder.of_rows([ids.shape[1]] * len(ids))


def others(rows, experts=4):
    """Return other experts than those, different ones for each token."""
    shift = torch.arange(rows[0].numel()).view(rows[0].shape)[..., :1] % (experts - 1) + 1
    return [((row + shift) % experts).short() for row in rows]


def slow_after(count, names):
    return [pytest.param(name, marks=() if i < count else pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", slow_after(3, KNOWN))
@torch.no_grad()
def test_routers_choose_what_they_are_given(name):
    lm = built(name).lm.eval()
    own = chosen(lm)
    before = hidden_states(lm, IDS, None)
    routers = ForcedRouters(lm)
    assert torch.equal(hidden_states(lm, IDS, None, experts=RoutedExperts.of(own)), before)
    assert routers.replaced_counts() == (12 * len(routers.sparse_layers), 0)
    given = others(own)
    changed = hidden_states(lm, IDS, None, experts=RoutedExperts.of(given))
    assert (changed - before).abs().max() > 0.01
    count, replaced = routers.replaced_counts()
    assert count == 12 * len(routers.sparse_layers)
    assert replaced > count / 2
    unknown = [None, given[1][:0]]
    partly = RoutedExperts.of([own[0][:2], *unknown[1:]])
    assert torch.equal(hidden_states(lm, IDS, None, experts=partly), before)  # the routers choose where it is unknown
    routers.remove()
    assert torch.equal(hidden_states(lm, IDS, None), before)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_architectures_are_rejected(name):
    lm = built(name).lm
    with pytest.raises(RunError, match="chooses experts"):
        chosen(lm)
    routers = ForcedRouters(lm)
    experts = torch.zeros(6, lm.config.num_hidden_layers, 2, dtype=torch.int16)
    with pytest.raises(RunError, match="chooses experts"):
        hidden_states(lm, IDS, None, experts=RoutedExperts.of([experts, experts]))
    assert routers.replaced_counts()[1] <= 12


def test_dense_models_and_other_numbers_are_rejected():
    with pytest.raises(UsageError, match="'llama' has None experts"):
        Routing.of(AutoConfig.for_model("llama"))
    with pytest.raises(UsageError, match="JetMoE"):
        Routing.of(AutoConfig.for_model("jetmoe"))
    lm = built("mixtral").lm
    ForcedRouters(lm)
    with pytest.raises(RunError, match="experts of 3 layers, but the actor has 2"):
        hidden_states(lm, IDS, None, experts=RoutedExperts.of([torch.zeros(6, 3, 2)] * 2))
    with pytest.raises(RunError, match=r"chooses \(12, 2\) experts .* returned \(12, 1\)"):
        hidden_states(lm, IDS, None, experts=RoutedExperts.of([torch.zeros(6, 2, 1)] * 2))


def test_scores_of_given_experts_are_theirs_by_hand():
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4], [0.3, 0.6, 0.1]])
    given = torch.tensor([[0, 1], [2, 0], [-1, -1]])
    with Choice(Routing(3, 2), given) as choice:
        values, experts = torch.topk(scores, 2, dim=-1)
        groups = torch.topk(scores, 1)  # another number of choices
    assert experts.tolist() == [[0, 1], [2, 0], [1, 0]]
    torch.testing.assert_close(values, torch.tensor([[0.1, 0.2], [0.4, 0.5], [0.6, 0.3]]))
    assert choice.own.tolist() == [[2, 1], [0, 2], [1, 0]]
    assert groups.indices.tolist() == [[2], [0], [1]]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.lm.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers_with_routers_that_were_overwritten(checkpointing):
    model = built("qwen3_moe", "float64").train()
    given = others(chosen(model.lm))
    stacked = torch.cat(given).long()  # (N, L, K)

    def fixed(layer, gate, states):
        logits = states.reshape(-1, states.shape[-1]) @ gate.weight.T
        weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, stacked[:, layer])
        return logits, (weights / weights.sum(dim=1, keepdim=True)).double(), stacked[:, layer]

    targets = torch.randn(12, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    layers = model.lm.model.layers
    plain = [layer.mlp.gate.forward for layer in layers]
    for number, layer in enumerate(layers):
        assert model.lm.config.norm_topk_prob is not None
        layer.mlp.gate.norm_topk_prob = True
        layer.mlp.gate.forward = partial(fixed, number, layer.mlp.gate)
    expected = gradients(model, (hidden_states(model.lm, IDS, None) * targets).sum())
    for layer, forward in zip(layers, plain, strict=True):
        layer.mlp.gate.forward = forward
    if checkpointing:
        model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    ForcedRouters(model.lm)
    loss = (hidden_states(model.lm, IDS, None, experts=RoutedExperts.of(given)) * targets).sum()
    hidden_states(model.lm, IDS, None)  # a later pass does not change what the backward pass computes again
    ours = gradients(model, loss)
    assert any("gate.weight" in name for name in ours)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-9)


def test_layer_is_that_of_a_loop_over_tokens_and_experts():
    lm = built(
        "qwen3_moe", "float64", num_experts=5, num_local_experts=5, num_experts_per_tok=3, norm_topk_prob=True
    ).lm
    block = lm.model.layers[1].mlp
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(7)])
    with torch.no_grad(), Choice(Routing(5, 3), given):
        ours = block(states[None])[0]
    for token, state in enumerate(states):
        probabilities = (block.gate.weight.detach().double() @ state).exp()
        total, expected = sum(probabilities[expert] for expert in given[token]), 0
        for expert in given[token]:
            gate, up = (block.experts.gate_up_proj[expert].detach().double() @ state).chunk(2)
            inner = gate * torch.sigmoid(gate) * up
            down = block.experts.down_proj[expert].detach().double()
            expected = expected + probabilities[expert] / total * (down @ inner)
        torch.testing.assert_close(ours[token], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_texts_get_their_own_experts_in_any_layout(layout):
    model = built("qwen3_moe").eval()
    rows = [Response([5, 6, 7], [8, 9]), Response([5, 6, 7], [10, 11, 12, 13]), Response([9], [4, 5])]
    rollout = rollout_of(rows, extra_columns=2)
    texts = [torch.tensor([*row.prompt, *row.tokens]) for row in rows]
    given = [others(chosen(model.lm, text[None]))[0] for text in texts]
    given[1][:3] = given[0][:3]  # a prompt that is shared has the experts of the first response
    routers = ForcedRouters(model.lm)
    ids, index = join(rollout)
    numbers, lengths = ([0, 0, 1] if layout == "shared" else [0, 1, 2]), ([3, 3, 1], [2, 4, 2])
    packing = None if layout == "padded" else pack_responses(*lengths, numbers, ids.shape[1])
    with torch.no_grad():
        arguments = (ids, index, rollout.response_ids, rollout.response_mask)
        experts = RoutedExperts.of([each[:-1] for each in given])
        together = model(*arguments, packing=packing, experts=experts).logprobs
        for row, (text, each) in enumerate(zip(texts, given, strict=True)):
            hidden = hidden_states(model.lm, text[None], None, experts=RoutedExperts.of([each]))
            logits = model.lm.lm_head(hidden)[len(rows[row].prompt) - 1 : -1]
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(rows[row].tokens).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(together[row, : len(expected)], expected, rtol=0, atol=1e-5)
    assert routers.replaced_counts()[1] > 0


def test_recorder_leaves_out_the_padding_of_prompts():
    model = built("mixtral").eval()
    recorder = ExpertRecorder(model.lm)
    recorder.begin()
    ids = torch.tensor([[0, 0, 7], [4, 5, 6]])
    mask = (ids > 0).long()
    model.lm.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    first, second = recorder.of_rows([1, 3])
    recorder.remove()
    assert first.shape == (3, 2, 2)
    assert second.shape == (5, 2, 2)
    assert torch.equal(second[:3], chosen(model.lm, ids[1:])[0])
    assert torch.equal(first[:1], chosen(model.lm, ids[:1, 2:])[0])
