"""Heads whose logits have factors, caps or layers, and the comparison with the model's own logits."""

from functools import partial

import pytest
import torch

from lightning_rlhf import FromConfig, SFTModule
from lightning_rlhf.models import heads
from tests.helpers import assert_close
from tests.modules.test_packing import texts
from tests.stand_ins import VOCABULARY, fit

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
HEADS = {
    "falcon_h1": {"lm_head_multiplier": 0.25, **MAMBA},
    "hyperclovax": {"logits_scaling": 0.25},
    "recurrent_gemma": {"logits_soft_cap": 2.0, "lru_width": 32, "attention_window_size": 8},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "logit_scale": 0.5},
    "minicpm3": {"dim_model_base": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8},
    "modernbert-decoder": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip


def source(name, **options):
    return FromConfig({"model_type": name, **SMALL, **HEADS.get(name, {}), **options}, seed=3)


@pytest.mark.parametrize("name", HEADS)
def test_log_probs_equal_those_of_the_logits_of_the_model(name):
    model = source(name).causal().eval()
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    index, targets = torch.arange(8).unsqueeze(0), ids[:, 1:]
    all_tokens = torch.ones_like(targets, dtype=torch.bool)
    ours = model(ids, index, targets, all_tokens)
    every = model.lm(ids).logits[0, :-1].double().log_softmax(-1)
    assert_close(ours.logprobs[0], every.gather(1, targets[0].unsqueeze(1)).squeeze(1), rtol=1e-5, atol=1e-5)
    assert_close(ours.entropy[0], -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)


def sft(model):
    return SFTModule(model, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("name", ["falcon_h1", "hyperclovax", "modernbert-decoder"])
def test_unknown_head_ends_the_run_before_its_first_step(name, monkeypatch):
    monkeypatch.setattr(heads, "_FACTORS", {})  # by which the first two are known
    known = heads.head_of  # knows the third by its layers, which transform the states
    monkeypatch.setattr("lightning_rlhf.models.causal.head_of", lambda lm: known(lm)._replace(transform=None))
    with pytest.raises(ValueError, match=r"^the actor's \w+ForCausalLM has a head that lightning-rlhf does not supp"):
        fit(sft(source(name)), [texts()])


def test_encoder_used_as_a_decoder_has_an_unsupported_head():
    model = source("bert", is_decoder=True)
    with pytest.raises(ValueError, match=r"the actor's BertLMHeadModel has a head that lightning-rlhf does not supp"):
        fit(sft(model), [texts()])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "num_local_experts": 4}),
        ("mixtral", {"router_jitter_noise": 0.5, "num_local_experts": 4}),
        ("opt", {"layerdrop": 0.9, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("xglm", {"layerdrop": 0.9, "d_model": 32, "attention_heads": 2, "num_layers": 2, "ffn_dim": 48}),
    ],
)
def test_random_layers_are_disabled_in_train_mode(name, options):
    model = source(name, **options).causal().train()
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    index = torch.arange(9).unsqueeze(0)
    all_tokens = torch.ones_like(ids, dtype=torch.bool)
    once, again = (model(ids, index, ids, all_tokens).logprobs for _ in range(2))
    assert torch.equal(once, again)


def test_model_with_random_outputs_ends_the_run_before_its_first_step():
    class Noisy(FromConfig):
        def causal(self):
            model = super().causal()
            model.lm.model.norm.register_forward_hook(lambda module, inputs, output: torch.rand_like(output) + output)
            return model

    with pytest.raises(ValueError, match=r"the actor's LlamaForCausalLM computes other log-probabilities in every pas"):
        fit(sft(Noisy({"model_type": "llama", **SMALL}, seed=3)), [texts()])
