"""Packed texts are independent: loss, gradients and updates equal those of padded ones, for every attention."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_rlhf import DPOModule, FromConfig, SFTModule
from lightning_rlhf.batching import packing as layouts
from lightning_rlhf.batching.sequences import concat_texts
from lightning_rlhf.data.answers import MaskedText, sequences
from lightning_rlhf.modules.text_layout import TextLayout
from lightning_rlhf.modules.texts import text_scores
from lightning_rlhf.types import PreferenceBatch, SequenceBatch
from tests.helpers import assert_close
from tests.models.test_positions import PHI
from tests.stand_ins import TINY_LLAMA, VOCABULARY, TinyModel, fit, quiet_trainer

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
APART = {
    "llama": {}, "mistral": {"sliding_window": 4}, "qwen2": {}, "qwen3": {"head_dim": 16}, "phi3": {}, "olmo2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 4}, "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64},
}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
TOGETHER = {
    "jamba": {}, "falcon": {}, "opt": {"ffn_dim": 48},
    "qwen3_next": {"head_dim": 16, "shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR},
}  # fmt: skip
LENGTHS = (9, 2, 12, 1, 5, 7)


def architecture(name, options, attention="sdpa"):
    return {"model_type": name, **SMALL, **options, "attn_implementation": attention}


def texts(lengths=LENGTHS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths) + 1), generator=draw)
    lengths, position = torch.tensor(lengths), torch.arange(ids.shape[1]).expand_as(ids)
    marked = (torch.rand(ids.shape, generator=draw) < 0.7) & (position > 0) & (position < lengths.unsqueeze(1))
    return SequenceBatch(ids, lengths, marked)


def sft(source, lr=0.1, **options):
    module = SFTModule(source, optimizer=partial(torch.optim.SGD, lr=lr), **options)
    module.configure_model()
    return module


def gradients(module, batch, packed):
    """Return log-probabilities of the marked tokens, and the gradient of a weighted sum of them."""
    module.layout.packed = packed
    (logprobs, *_), mask = text_scores(module, "actor", batch)
    weights = torch.linspace(-1, 2, mask.numel()).view_as(mask)
    wanted = [p for p in module.actor.parameters() if p.requires_grad]
    return logprobs, torch.autograd.grad((logprobs * weights).sum(), wanted, allow_unused=True, materialize_grads=True)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", APART)
def test_log_probabilities_and_gradients_equal_those_of_padded_texts(name, attention):
    dtype = "float32" if name in ("mixtral", "qwen3_moe") else "float64"  # experts know no float64
    module = sft(FromConfig(architecture(name, APART[name], attention), seed=3, dtype=dtype))
    attention = "eager" if name == "gemma2" else attention  # sdpa would leave its soft caps out
    assert module.actor.lm.config._attn_implementation == attention
    # transformers' eager attention computes its softmax in float32 for weights of any dtype
    rounding = 1e-12 if (dtype, attention) == ("float64", "sdpa") else 2e-5
    (padded, one), (packed, other) = (gradients(module, texts(), packed) for packed in (False, True))
    largest = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    assert_close(packed, padded, rtol=0, atol=rounding)
    assert largest <= rounding
    assert max(float(a.abs().max()) for a in one) > 0.1


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
def test_texts_of_a_row_equal_texts_on_their_own(name, packed):
    module = sft(FromConfig(architecture(name, APART[name]), seed=3, dtype="float64"))
    start, ends = [5, 6, 7], [[8, 1, 2], [9, 3], [1]]
    several = [MaskedText.joined([(start + end, [False] * 4 + [True] * (len(end) - 1)) for end in ends[:2]])]
    several.append(MaskedText(start + ends[2], [False] * 3 + [True]))
    alone = [MaskedText(ids, mask) for row in several for ids, mask in row.texts]
    assert several[0].shared == 3
    row_of = torch.tensor([0, 0, 1])
    module.layout.packed = packed
    results = []
    for batch, rows in ((sequences(several), torch.arange(2)), (sequences(alone), row_of)):
        (logprobs, *_), _ = text_scores(module, "actor", batch)
        totals = torch.zeros(2, dtype=logprobs.dtype).index_add(0, rows, logprobs.sum(dim=1))
        wanted = [p for p in module.actor.parameters() if p.requires_grad]
        gradient = torch.autograd.grad((totals * torch.tensor([1.0, -2.0])).sum(), wanted, materialize_grads=True)
        results.append([totals, *gradient])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_common_beginning_is_computed_once():
    texts = [MaskedText.joined([([5, 6, 7, end], [False, False, False, True]) for end in (8, 9)])]
    module = sft(TinyModel())
    assert module.layout.pack(sequences(texts), 8).lengths == ((3,), ((1, 1),))
    assert concat_texts([sequences(texts)] * 2).shared.tolist() == [3, 3]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_positions_that_do_not_restart_are_detected(attention, monkeypatch, caplog):
    """The test at the start of a run detects a layout that does not separate texts of an unlisted architecture."""
    source = FromConfig(architecture("gpt2", APART["gpt2"], attention), seed=3)
    module = sft(source)
    padded, _ = gradients(module, texts(), False)
    correct = layouts.pack_responses

    def running_on(*arguments, **options):
        packing = correct(*arguments, **options)
        return replace(packing, positions=torch.arange(packing.positions.shape[1]).unsqueeze(0))

    monkeypatch.setattr(layouts, "pack_responses", running_on)
    packed, _ = gradients(module, texts(), True)
    assert float((packed - padded).detach().abs().max()) > 0.1
    module = sft(source)
    fit(module, [texts()])
    assert not module.layout.packed
    assert f"GPT2LMHeadModel with attention '{attention}' does not separate packed texts" in caplog.text


def updates(dtype, packing, micro_batch_tokens, attention):
    """Return loss and gradient norm of three updates, and the weights after them."""
    steps = []

    class Watch(SFTModule):
        def finish_step(self, metrics, bar):
            steps.append([metrics["train/loss"], metrics["train/entropy"], metrics["grad_norm/actor"]])
            super().finish_step(metrics, bar)

    source = TinyModel({**TINY_LLAMA, "attn_implementation": attention}, dtype=dtype)
    module = Watch(
        source, optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-5), packing=packing,
        micro_batch_tokens=micro_batch_tokens, max_grad_norm=0.5,
    )  # fmt: skip
    metrics = fit(module, [texts(seed=seed) for seed in range(3)], val=[texts(seed=9)]).callback_metrics
    return steps, metrics["val/loss"], torch.cat([p.detach().flatten() for p in module.actor.parameters()])


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("dtype", "attention", "rounding"),
    [("float64", "sdpa", 1e-12), ("float64", "eager", 5e-6), ("float32", "sdpa", 2e-5), ("float32", "eager", 2e-5)],
)
def test_three_updates_equal_those_of_padded_texts_for_any_token_budget(dtype, attention, rounding):
    steps, val_loss, weights = updates(dtype, False, 1000, attention)
    for budget in (1, 14, 25, 1000):
        packed_steps, packed_val_loss, packed_weights = updates(dtype, True, budget, attention)
        assert_close(packed_steps, steps, rtol=rounding, atol=rounding)
        assert_close(packed_val_loss, val_loss, rtol=max(rounding, 1e-6))
        assert_close(packed_weights, weights, rtol=0, atol=rounding)


def padded_instead(caplog, module, run):
    """Return the warning of a run that padded its rows."""
    run()
    assert not module.layout.packed
    (record,) = [record for record in caplog.records if "evaluated with padding" in record.getMessage()]
    return record.getMessage()


@pytest.mark.parametrize("name", TOGETHER)
def test_architecture_that_would_mix_texts_is_padded_with_a_warning(name, caplog):
    module = sft(FromConfig(architecture(name, TOGETHER[name]), seed=3))
    message = padded_instead(caplog, module, lambda: fit(module, [texts()]))
    kind = type(module.actor.lm).__name__
    assert message.startswith("The actor is evaluated with padding: ")
    assert f"{kind} with attention 'sdpa' does not separate packed texts" in message


def test_validation_without_training_pads_texts_that_would_be_mixed(caplog):
    module = sft(FromConfig(architecture("jamba", {}), seed=3))
    loader = DataLoader([texts()], batch_size=None)
    padded_instead(caplog, module, lambda: quiet_trainer().validate(module, loader, verbose=False))


def test_reference_that_would_mix_texts_is_reported(caplog):
    module = DPOModule(TinyModel(), ref=FromConfig(architecture("jamba", {}), seed=3))
    batch = PreferenceBatch(texts(seed=1), texts(seed=2), torch.zeros(len(LENGTHS)))
    message = padded_instead(caplog, module, lambda: fit(module, [batch]))
    assert "The ref is evaluated with padding: JambaForCausalLM" in message


def test_architecture_without_positions_is_padded(caplog):
    module = sft(FromConfig({"model_type": "mamba", **SMALL, "state_size": 8}, seed=3))
    message = padded_instead(caplog, module, lambda: fit(module, [texts()]))
    assert "MambaForCausalLM" in message
    assert "does not take positions" in message


def test_listed_architecture_is_not_tested_again(monkeypatch):
    packings = []
    outputs = TextLayout._outputs

    def recorded(layout, name, ids, packing, **options):
        packings.append(packing)
        return outputs(layout, name, ids, packing, **options)

    monkeypatch.setattr(TextLayout, "_outputs", recorded)
    module = sft(TinyModel())
    fit(module, [texts()])
    assert module.layout.packed
    assert packings == [None] * 4  # the test of the head


def test_token_budget_of_packed_texts_counts_only_real_tokens():
    def forwards(packing):
        seen = []
        module = sft(TinyModel(), lr=0.0, packing=packing, micro_batch_tokens=20)
        module.actor.lm.base_model.register_forward_pre_hook(
            lambda _, args, inputs: seen.append(inputs["input_ids"].numel()), with_kwargs=True
        )
        fit(module, [texts((12, 3, 3, 2, 7, 6, 7))])
        return seen[4:]  # without those of the test of the head

    assert forwards(packing=False) == [12, 14, 18, 2]  # 12; 7 + 7; 6, 3 and 3; 2
    assert forwards(packing=True) == [19, 19, 2]  # 12 + 7; 7 + 6 + 3 + 3; 2


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_of_a_text_are_independent_of_other_lengths(packing):
    """Long-RoPE uses other rotary frequencies for texts of more than 12 tokens."""
    module = sft(FromConfig(PHI, seed=3), packing=packing)
    batch = texts((5, 20, 12, 13, 9, 22))
    fit(module, [batch])
    micro_batches = module.micro_batches.split(batch)
    assert sorted(len(rows) for rows, _ in micro_batches) == [3, 3]
    with torch.no_grad():
        for rows, _ in micro_batches:
            (together, *_), mask = text_scores(module, "actor", batch[rows])
            for row, number in enumerate(rows.tolist()):
                (alone, *_), instance = text_scores(module, "actor", batch[[number]])
                assert_close(together[row][mask[row]], alone[0][instance[0]], atol=1e-5)
