"""Log-probs and gradients of packed rows are those of padded rows, with and without shared prompts."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_rlhf import FromConfig
from lightning_rlhf.batching.packing import PackedLengths, pack_responses, pack_texts
from lightning_rlhf.models import packed_attention as module
from lightning_rlhf.models.packed_attention import ARCHITECTURES, NAME, _attend, has_packed_attention, packed_attention
from tests.helpers import assert_close
from tests.stand_ins import VOCABULARY

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
OPTIONS = {
    "llama": {}, "mistral": {"sliding_window": 4}, "qwen2": {}, "qwen3": {"head_dim": 16}, "phi3": {}, "olmo2": {},
    "granite": {"attention_multiplier": 0.3}, "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4}, "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 16, **EXPERTS}, "deepseek_v3": LATENT, "smollm3": {},
}  # fmt: skip
PROMPTS = (5, 5, 5, 3, 3, 7, 2)
RESPONSES = (6, 2, 9, 4, 4, 3, 5)
GROUPS = (0, 0, 0, 1, 1, 2, 3)
WIDTH = max(p + r for p, r in zip(PROMPTS, RESPONSES, strict=True))


def source(name, attention=None, **options):
    chosen = {} if attention is None else {"attn_implementation": attention}
    return FromConfig({"model_type": name, **SMALL, **OPTIONS.get(name, {}), **options, **chosen}, seed=3)


def texts():
    """Return token ids of prompts with responses, the positions before response tokens, the responses and a mask."""
    draw = torch.Generator().manual_seed(0)
    prompts = {group: torch.randint(VOCABULARY, (9,), generator=draw) for group in set(GROUPS)}
    ids = torch.zeros(len(GROUPS), WIDTH, dtype=torch.long)
    for row, (prompt, response, group) in enumerate(zip(PROMPTS, RESPONSES, GROUPS, strict=True)):
        ids[row, :prompt] = prompts[group][:prompt]
        ids[row, prompt : prompt + response] = torch.randint(VOCABULARY, (response,), generator=draw)
    step = torch.arange(max(RESPONSES))
    index = torch.stack([step + prompt - 1 for prompt in PROMPTS]).clamp(max=WIDTH - 1)
    targets = torch.stack([ids[row].roll(-prompt)[: len(step)] for row, prompt in enumerate(PROMPTS)])
    return ids, index, targets, torch.stack([step < response for response in RESPONSES])


def packings():
    totals = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return {
        "texts": pack_texts(totals, WIDTH),
        "shared prompts": pack_responses(PROMPTS, RESPONSES, GROUPS, WIDTH),
    }


def outputs(model, packing):
    """Return log-probs of the responses, and the gradient of a weighted sum of them for each parameter."""
    logprobs = model(*texts(), packing=packing).logprobs
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    return logprobs.detach(), gradients


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("layout", [None, "texts", "shared prompts"])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(name, layout):
    padded = source(name, "eager").causal()
    packed = source(name).causal()
    assert packed.lm.config._attn_implementation == NAME
    expected, gradients = outputs(padded, None)
    actual, ours = outputs(packed, None if layout is None else packings()[layout])
    assert_close(actual, expected, atol=3e-6)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    assert largest > 0.1
    for one, other in zip(ours, gradients, strict=True):
        assert_close(one, other, rtol=0, atol=1e-5 * largest)


def test_all_tested_architectures_are_listed():
    assert set(OPTIONS) == ARCHITECTURES


@pytest.mark.parametrize("layout", ["texts", "shared prompts"])
def test_scalar_model_has_the_scores_of_padded_rows(layout):
    model = source("llama").scalar()
    torch.nn.init.normal_(model.lm.score.weight)
    ids, index, _, mask = texts()
    padded = model(ids, index)
    packed = model(ids, index, packings()[layout])
    assert_close(packed[mask], padded[mask], atol=1e-6)
    assert float(padded.detach().abs().max()) > 0.1


@pytest.mark.parametrize("layout", ["texts", "shared prompts"])
def test_activation_checkpointing_passes_the_layout_on(layout):
    model = source("qwen2").causal()
    _, expected = outputs(model, packings()[layout])
    model.train()
    model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, actual = outputs(model, packings()[layout])
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_packed_rows_under_autocast_are_close_to_float32():
    model = source("qwen3").causal()
    exact, _ = outputs(model, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = model(*texts(), packing=packings()["shared prompts"]).logprobs
    assert float((actual - exact).detach().abs().mean()) < 0.05


def test_masks_from_a_validation_can_be_used_in_training():
    model = source("mistral").causal()
    with torch.inference_mode():
        model(*texts(), packing=packings()["shared prompts"])
    outputs(model, packings()["shared prompts"])


def test_configured_attention_implementation_is_used():
    assert source("llama", "sdpa").causal().lm.config._attn_implementation == "sdpa"
    assert source("gpt2", n_embd=32, n_head=2, n_layer=2).causal().lm.config._attn_implementation == "sdpa"


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 600, 1100])
@pytest.mark.parametrize(("length", "before"), [(513, 3), (5, 9), (5, 0), (512, 0), (1100, 77)])
def test_attention_in_blocks_of_queries_equals_that_of_all_at_once(length, before, window, softcap):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, size, 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for heads, size in ((4, length), (2, before + length), (2, before + length))
    )
    distance = torch.arange(before, before + length).unsqueeze(1) - torch.arange(before + length)
    hidden = (distance < 0) | (distance >= (window or before + length))
    logits = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) * 0.3
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, dim=1)
    actual = _attend(q, k, v, 0.3, window, softcap)
    weights = torch.linspace(-1, 2, actual.numel(), dtype=torch.float64).view_as(actual)
    single = softcap is not None  # whose weights are float32
    assert_close(actual, expected, rtol=0, atol=1e-6 if single else 1e-12)
    for one, other in zip(
        *(torch.autograd.grad((each * weights).sum(), (q, k, v)) for each in (actual, expected)), strict=True
    ):
        assert_close(one, other, rtol=0, atol=1e-5 if single else 1e-11)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "repeats"),
    [
        ("cuda", torch.float32, False, True),  # only torch's math kernel shares keys in float32
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, True),
        ("cpu", torch.float32, False, False),
    ],
)
def test_keys_are_repeated_where_the_kernel_that_shares_them_keeps_all_weights(
    monkeypatch, device, dtype, masked, repeats
):
    heads = []

    def noted(q, k, v, enable_gqa=False, **options):
        heads.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(module.functional, "scaled_dot_product_attention", noted)
    with FakeTensorMode():
        q, k = (torch.empty(1, count, 300, 32, dtype=dtype, device=device) for count in (4, 2))
        mask = torch.empty(300, 300, dtype=dtype, device=device) if masked else None
        module._attend_block(q, k, k, mask, scale=1.0)
    assert set(heads) == {(4, False) if repeats else (2, True)}


def test_masks_cover_a_text_and_start_at_aligned_addresses(monkeypatch):
    offsets, sizes = [], set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, attn_mask=None, **options):
        offsets.append(attn_mask.storage_offset())
        sizes.add(attn_mask.untyped_storage().nbytes())
        assert attn_mask.stride(0) % 8 == 0
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for before, window in ((0, 700), (5003, None), (13, 701)):
        _attend(*(torch.zeros(1, 1, size, 8) for size in (3000, before + 3000, before + 3000)), 1.0, window, None)
    assert len(offsets) == 3 * 6
    assert all(offset % 8 == 0 for offset in offsets)
    assert max(sizes) <= 4 * 512 * (8003 + 512 + 512)


def attend(**options):
    module = torch.nn.Module()
    query = torch.zeros(1, 2, 5, 4)
    return packed_attention(module, query, query, query, options.pop("attention_mask", None), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "a mask or dropout"),
        ({"is_causal": False}, "a mask or dropout"),
        ({"attention_mask": torch.zeros(4, 4), "packed_lengths": PackedLengths((3, 1), ((), ()))}, "a mask or dropout"),
    ],
)
def test_unsupported_models_are_rejected(options, message):
    with pytest.raises(NotImplementedError, match=rf"needs {message}, which attention over concatenated texts"):
        attend(**options)


def test_row_of_another_length_is_rejected():
    with pytest.raises(ValueError, match="the query of a packed row has shape"):
        attend(packed_lengths=PackedLengths((3, 1), ((), ())))


def padded_left():
    """Return texts of several lengths, padded on the left, with their mask and positions."""
    ids, mask = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.long)
    draw = torch.Generator().manual_seed(1)
    for row, length in enumerate((4, 9, 6)):
        ids[row, -length:] = torch.randint(3, VOCABULARY, (length,), generator=draw)
        mask[row, -length:] = 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_passes_with_a_mask_of_their_own_are_those_of_transformers(name):
    ids, mask, positions = padded_left()
    ours, theirs = source(name).causal().lm, source(name, "eager").causal().lm
    for arguments in ({"attention_mask": mask}, {"attention_mask": mask, "position_ids": positions}):
        logits, wanted = (lm(ids, use_cache=False, **arguments).logits[mask.bool()] for lm in (ours, theirs))
        assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    row = torch.cat([ids[0, -4:], ids[2, -6:]]).unsqueeze(0)  # two texts that only positions separate
    of_row = {"position_ids": torch.cat([torch.arange(4), torch.arange(6)]).unsqueeze(0), "use_cache": False}
    assert_close(ours(row, **of_row).logits, theirs(row, **of_row).logits, rtol=1e-4, atol=1e-5)
    made, expected = (
        lm.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
        for lm in (ours, theirs)
    )
    assert made.tolist() == expected.tolist()
    assert has_packed_attention(ours)


def test_scalar_model_keeps_masks_too():
    ids, mask, _ = padded_left()
    ours, theirs = source("qwen2").scalar().lm, source("qwen2", "eager").scalar().lm
    for lm in (ours, theirs):
        torch.nn.init.normal_(lm.score.weight, generator=torch.Generator().manual_seed(0))
    scores, wanted = (lm(ids, attention_mask=mask).logits for lm in (ours, theirs))
    assert_close(scores, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_gradients_with_a_mask_and_activation_checkpointing_are_those_of_transformers(name):
    ids, mask, _ = padded_left()
    gradients = []
    for attention in (None, "eager"):
        lm = source(name, attention).causal().lm.train()
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        lm(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float().logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in lm.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_padded_texts_with_images_get_no_mask():
    text_model, seen = module.text_model_of(source("qwen2").causal().lm), []
    text_model.layers[0].register_forward_pre_hook(lambda *_: seen.append(text_model.config._attn_implementation))
    module._use_masks(text_model, (), {"position_ids": torch.zeros(3, 1, 4)})
    assert module.has_packed_attention(text_model)
    text_model(torch.zeros(1, 4).long(), use_cache=False)
    text_model(torch.zeros(1, 4).long(), torch.ones(1, 4), use_cache=False)
    assert seen == [NAME, "packed_masked"]


def test_failed_pass_with_a_mask_leaves_the_attention_as_it_was():
    lm = source("qwen2").causal().lm
    with pytest.raises(IndexError):
        lm(torch.full((1, 4), VOCABULARY), attention_mask=torch.ones(1, 4))
    assert has_packed_attention(lm)
