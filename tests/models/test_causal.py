"""CausalLM returns the log-probabilities of transformers, for architectures with different treatments of logits."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.loading import FromConfig
from tests.helpers import assert_close, normal
from tests.stand_ins import TINY_LLAMA, VOCABULARY, TinyModel

FAMILIES = {
    "llama untied": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {
        "model_type": "gemma2", "final_logit_softcapping": 1.5, "attn_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 32, "layer_types": ["full_attention", "full_attention"],
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "granite": {"model_type": "granite", "logits_scaling": 3.0},
    "gpt_neox": {"model_type": "gpt_neox", "num_attention_heads": 2, "tie_word_embeddings": False},
}  # fmt: skip
LENGTHS = torch.tensor([9, 4, 6, 2])


def model_of(family, dtype="float32"):
    return FromConfig(TINY_LLAMA | FAMILIES[family], seed=0, dtype=dtype).causal()


def question(seed=0):
    """Return ragged padded texts and a mask of about half of their tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (4, 9), generator=draw)
    position = torch.arange(8).expand(4, 8)
    mask = (torch.rand(4, 8, generator=draw) < 0.7) & (position + 1 < LENGTHS.unsqueeze(1))
    mask[:, 0] = True
    return ids, position, ids[:, 1:], mask


def answer_of_transformers(lm, ids, mask, temperature):
    """Return log-probabilities and entropies from the logits of the model, one text at a time and without padding."""
    logprobs, entropies = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2))
    for i, length in enumerate(LENGTHS):
        every = (lm(ids[i : i + 1, :length]).logits[0].double() / temperature).log_softmax(-1)
        for t in mask[i].nonzero().flatten():
            logprobs[i, t] = every[t, ids[i, t + 1]]
            entropies[i, t] = -(every[t].exp() * every[t]).sum()
    return logprobs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_entropies_and_gradients_equal_those_of_transformers(family, temperature):
    model = model_of(family)
    ids, index, targets, mask = question()
    ours = model(ids, index, targets, mask, temperature)[:2]
    theirs = answer_of_transformers(model.lm, ids, mask, temperature)
    outer = normal(2, *mask.shape, seed=4)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = []
    for values in (ours, theirs):
        total = (outer[0] * values[0]).sum() + (outer[1] * values[1]).sum()
        gradients.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, atol=2e-6)
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_families_above_compute_different_values():
    ids, index, targets, mask = question()
    output = {family: model_of(family)(ids, index, targets, mask)[0].sum().item() for family in FAMILIES}
    assert len({round(value, 3) for value in output.values()}) == len(FAMILIES)


def test_outputs_are_zero_where_the_mask_is_false():
    ids, index, targets, mask = question()
    for values in TinyModel().causal()(ids, index, targets, mask, squares=True)[:3]:
        assert not values[~mask].any()
        assert values[mask].all()


def test_padding_and_its_tokens_change_nothing():
    model = TinyModel().causal()
    ids, index, targets, mask = question()
    position = torch.arange(13).expand(4, 13)
    wide = torch.full((4, 13), 7)
    wide[:, :9] = ids
    wide[position >= LENGTHS.unsqueeze(1)] = 3
    ours, exact = (model(tokens, index, targets, mask, squares=True)[:3] for tokens in (wide, ids))
    for one, other in zip(ours, exact, strict=True):
        assert_close(one, other, atol=1e-6)


def test_empty_mask_still_reaches_every_parameter():
    model = TinyModel().causal()
    ids, index, targets, mask = question()
    logprobs, entropy, *_ = model(ids, index, targets, torch.zeros_like(mask))
    (logprobs.sum() + entropy.sum()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_bfloat16_parameters_give_float32_outputs():
    model = model_of("llama untied", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logprobs = model(*question()).logprobs
    assert logprobs.dtype == torch.float32
    exact = model_of("llama untied")(*question()).logprobs
    assert (logprobs - exact).abs().max() < 0.2


def test_saved_model_is_loaded_by_transformers(tmp_path):
    model = model_of("llama tied")
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, one), other in zip(model.lm.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_model_without_a_head_is_rejected():
    config = TinyModel().hf_config()
    with pytest.raises(ValueError, match=r"^LlamaModel is not a causal language model: it has no output head over a"):
        CausalLM(AutoModel.from_config(config))
