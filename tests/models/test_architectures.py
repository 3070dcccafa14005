"""The architectures of ``docs/architectures.md``: their log-probs and gradients equal those of the model's logits."""

import re
import warnings

import pytest
import transformers

from tests import figures
from tests.models import architectures

LISTED = {
    name: verdict
    for verdict, text in re.findall(r"^## ([^\n]*): \d+\n(.*?)(?=^## |\Z)", architectures.PAGE.read_text(), re.M | re.S)
    for name in re.findall(r"`(.+?)`", text)
}
COMPARED = [name for name, verdict in LISTED.items() if verdict not in ("Rejected", "Not compared")]
QUICK = ["llama", "gemma2", "qwen3_5", "mistral3", "falcon_h1"]


def test_page_lists_every_causal_architecture():
    locked = (architectures.PAGE.parents[1] / "constraints/cpu.lock").read_text()
    if f"\ntransformers=={transformers.__version__} " not in locked:
        pytest.skip(f"the page is that of the locked transformers, not of {transformers.__version__}")
    assert sorted(LISTED) == architectures.names()
    assert {verdict.lower() for verdict in LISTED.values()} <= architectures.VERDICTS.keys()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", sorted(COMPARED, key=lambda name: (name not in QUICK, name)))
def test_log_probs_and_gradients_equal_those_of_the_logits_of_the_model(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' warnings about tiny forms
        result = architectures.check(name)
    assert result.verdict.capitalize() == LISTED[name]
    figures.record("error of gradients", result.gradient_error)
    # mixtures of experts compute in float32 alone
    assert result.error < 2e-5
    assert result.gradient_error < 2e-4


@pytest.mark.parametrize("name", [name for name, verdict in LISTED.items() if verdict == "Rejected"][:2])
def test_rejected_architectures_are_rejected(name):
    result = architectures.check(name)
    assert result.verdict == "rejected"
    assert result.reason.startswith("the actor's ")
