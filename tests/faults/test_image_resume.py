"""PPO on pictures, with real vLLM: a run that is killed and resumed gives bitwise the same results."""

import pytest

from tests.faults.runs import assert_same, ppo, rows
from tests.faults.test_quantized_resume import DEATHS
from tests.vision_models import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]
STOPS = list(range(30, 97))  # turns end soon


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a vision-language model."""
    return str(write_checkpoint("idefics3", tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize(
    ("max_staleness", "train_vision", "converses"),
    [(0, False, False), (1, True, False), (0, False, True), (1, False, True)],
)
def test_kills_change_no_result(base, forge, undisturbed, tmp_path, max_staleness, train_vision, converses):
    environment = (
        {"factory": "tests.environments.worlds:Drawings", "max_turns": 3, "max_images": 2} if converses else None
    )
    config = ppo(1, engine="VLLMEngine", max_staleness=max_staleness, environment=environment)
    source = {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": base, "train_vision": train_vision}}
    config["model"]["init_args"] |= {"actor": source, "critic": source}
    pictures = "lightning_rlhf.tasks.drawings.Numbers"
    config["data"]["init_args"] |= {
        "tokenizer": base,
        "train": {"class_path": pictures, "init_args": {"num_rows": 22}},
        "val": {"class_path": pictures, "init_args": {"num_rows": 6, "held_out": True}},
        "max_tokens": 96,
    }
    if converses:
        config["trainer"]["callbacks"][0]["init_args"] |= {"max_response_tokens": 120, "stop_token_ids": STOPS}
    table = [dict(row) for row in rows(undisturbed(config))]
    training = [row for row in table if row["kl/coef"]]
    for name in ("reward/mean", "loss/value", "loss/policy", "kl/ref"):
        assert len({row[name] for row in training}) > 9, name
    assert forge.finish(tmp_path, config, DEATHS) == len(DEATHS)
    assert_same(tmp_path, undisturbed(config))
