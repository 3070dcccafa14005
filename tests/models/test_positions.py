"""The longest text that a model supports, determined from its configuration."""

import pytest
from transformers import CONFIG_MAPPING

from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.positions import check_positions, max_positions
from tests.stand_ins import TINY_LLAMA


@pytest.mark.parametrize(
    ("model_type", "inputs", "expected"),
    [
        ("llama", {"max_position_embeddings": 64}, 64),
        ("gpt2", {"n_positions": 32}, 32),
        ("opt", {"max_position_embeddings": 48}, 48),
        ("bloom", {}, None),
        ("mamba", {}, None),
        ("llama", {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 256),
        (
            "llama",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4,
                },
            },
            64,
        ),
        ("gemma3_text", {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 64),
    ],
    ids=["rope", "learnt", "opt", "alibi", "recurrent", "linear", "yarn", "stretched already"],
)  # fmt: skip
def test_positions_of_architectures(model_type, inputs, expected):
    assert max_positions(CONFIG_MAPPING[model_type](**inputs)) == expected


def test_texts_that_fit_pass_and_one_more_token_is_rejected_with_the_limit():
    roles = {"the actor": FromConfig(TINY_LLAMA | {"max_position_embeddings": 64})}
    check_positions(roles, 64)
    check_positions(roles, 60, 4)
    with pytest.raises(
        ValueError, match=r"^the longest text has 65 tokens, and the actor accepts at most 64 .* max_tokens: 64"
    ):
        check_positions(roles, 65)
    with pytest.raises(ValueError, match=r"set max_response_tokens: 4 or less$"):
        check_positions(roles, 60, 5)


def test_every_role_is_checked():
    roles = {"the actor": FromConfig(TINY_LLAMA | {"max_position_embeddings": 64})}
    roles["the reward_model"] = FromConfig(TINY_LLAMA | {"max_position_embeddings": 32})
    with pytest.raises(ValueError, match="and the reward_model accepts at most 32"):
        check_positions(roles, 20, 20)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [9.0] * 8, "rope_theta": 1e4}
LONG |= {"original_max_position_embeddings": 12, "factor": 6.0}
PHI = TINY_LLAMA | {
    "model_type": "phi3", "head_dim": 16, "max_position_embeddings": 64, "original_max_position_embeddings": 12,
    "rope_parameters": LONG, "pad_token_id": 0, "num_attention_heads": 2, "hidden_size": 32,
}  # fmt: skip
DYNAMIC = TINY_LLAMA | {
    "max_position_embeddings": 12, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize(("model", "has_pairs"), [(DYNAMIC, False), (DYNAMIC, True), (PHI, True)])
def test_texts_that_would_change_the_positions_of_others_are_rejected(model, has_pairs):
    roles = {"the actor": FromConfig(model)}
    check_positions(roles, 8, 4, has_pairs)
    with pytest.raises(ValueError, match=r"more than 12 tokens would change .* up to 13: use at most 12 tokens"):
        check_positions(roles, 8, 5, has_pairs)


def test_texts_of_any_length_are_supported_if_each_row_is_one_text():
    check_positions({"the actor": FromConfig(PHI)}, 40, 24)
