"""Roles on one quantized base, with real vLLM: a run that is killed and resumed gives bitwise the same results."""

import pytest

from lightning_rlhf import FromConfig
from tests.faults.runs import CONVERSATIONS, LLAMA, assert_same, ppo, rows

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

DEATHS = [
    {"position": ("lightning_rlhf.modules.role_module:RoleModule.update", 10, "before")},
    {"position": ("torch:save", 2, "half")},
    {"position": ("lightning_rlhf.rollout.source:RolloutSource.request", 3, "after")},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a base model."""
    directory = tmp_path_factory.mktemp("base")
    FromConfig(LLAMA, seed=1).causal().save_pretrained(directory)
    return str(directory)


def quantized(base, **options):
    """Return a run of PPO whose actor, critic and reference have one base in 4 bits."""
    config = ppo(1, **options)
    source = {
        "class_path": "lightning_rlhf.Pretrained",
        "init_args": {"path": base, "quantization": "nf4", "lora": {"rank": 4, "alpha": 8}},
    }
    config["model"]["init_args"] |= {"actor": source, "critic": source}
    return config


@pytest.mark.parametrize(
    ("engine", "max_staleness", "environment"),
    [
        ("VLLMAdapterEngine", 0, None),
        ("VLLMAdapterEngine", 1, None),
        ("VLLMEngine", 1, None),
        ("VLLMAdapterEngine", 0, CONVERSATIONS),
        ("VLLMEngine", 1, CONVERSATIONS),
    ],
)
def test_kills_change_no_result(base, forge, undisturbed, tmp_path, engine, max_staleness, environment):
    config = quantized(base, engine=engine, max_staleness=max_staleness, environment=environment)
    table = [dict(row) for row in rows(undisturbed(config))]
    training = [row for row in table if row["kl/coef"]]
    for name in ("reward/mean", "loss/value", "loss/policy", "kl/ref"):
        assert len({row[name] for row in training}) > 9, name
    assert forge.finish(tmp_path, config, DEATHS) == len(DEATHS)
    assert_same(tmp_path, undisturbed(config))
