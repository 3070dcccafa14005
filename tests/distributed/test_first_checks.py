"""The comparisons before the first step have the same result on every rank of every strategy."""

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.test_parity import STRATEGIES

NAMES = [
    "rlhf_ddp",
    "rlhf_fsdp",
    "rlhf_fsdp, tensor parallel 2",
    "rlhf_deepspeed_stage_2",
    "rlhf_deepspeed_stage_3",
]
WRONG = (
    "the actor's LlamaForCausalLM has a head that lightning-rlhf does not support: log-probabilities of a short text "
    "differ by "
)


@pytest.mark.slow
def test_correct_models_pass_and_wrong_ones_are_reported_on_every_rank():
    answers = run_ranks("tests.distributed.check_ranks:checks", 2, [STRATEGIES[name] for name in NAMES])
    assert answers[0] == answers[1]
    for name, result in zip(NAMES, answers[0], strict=True):
        assert result.pop("error").startswith(WRONG), name
        assert result == {
            "packed at the start": True,
            "packed": True,
            "packed without separation": False,
            "packed with a fault on one rank": False,
            "steps": 2,
        }, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rlhf_fsdp", "rlhf_deepspeed_stage_3"])
def test_wrong_head_ends_the_run_on_every_rank(name, tmp_path):
    with pytest.raises(RuntimeError, match=f"UsageError: {WRONG}"):
        run_ranks("tests.distributed.check_ranks:wrong_head", 2, STRATEGIES[name], str(tmp_path), seconds=100)
    assert (tmp_path / "0").read_text().startswith(WRONG)
