"""The YAML of docs/hyperparameters.md is a valid configuration, and every value on the page refers to an argument."""

import re
from pathlib import Path

import yaml

from lightning_rlhf import GRPOModule
from lightning_rlhf.calls.references import load_function
from lightning_rlhf.cli.signatures import find_class
from lightning_rlhf.modules.optimizers import MatrixDecayAdamW, MuonAdamW
from lightning_rlhf.modules.schedules import RunSchedule
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.modules.test_schedules import optimizer
from tests.stand_ins import TinyModel, responses, rollout_of

PAGE = (Path(__file__).resolve().parents[1] / "docs/hyperparameters.md").read_text()


def test_schedule_and_optimizer_can_be_instantiated():
    snippets = [yaml.safe_load(item) for item in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert [list(snippet) for snippet in snippets] == [["lr_scheduler"], ["optimizer"], ["optimizer"]]
    schedule, adamw, muon = (next(iter(snippet.values())) for snippet in snippets)
    assert load_function(schedule["class_path"]) is RunSchedule
    RunSchedule(optimizer(), **schedule["init_args"]).stretch(100)
    assert load_function(adamw["class_path"]) is MatrixDecayAdamW
    MatrixDecayAdamW(TinyModel().causal().parameters(), **adamw["init_args"])
    assert load_function(muon["class_path"]) is MuonAdamW
    MuonAdamW(TinyModel().causal().parameters(), **muon["init_args"])


def test_values_refer_to_existing_arguments():
    classes = ("PPOModule", "PromptDataModule", "callbacks.RolloutLoop")
    known = {name for item in classes for name in find_class(f"lightning_rlhf.{item}").options}
    named = re.findall(r"^\| [^|]+ \| `([\w.]+)", PAGE, re.MULTILINE)
    assert len(named) >= 12
    assert {name.rpartition(".")[2] for name in named} <= known


def test_skipped_passes_do_not_run():
    faster = PAGE.partition("## Faster")[2].partition("\n## ")[0]
    assert "`correction: {bypass: true}`" in faster
    assert "`coef` of `kl_reward` and `kl_loss` to 0" in faster
    assert "ref" in GRPOModule(TinyModel(), kl_loss=KLTerm(0.04, "k3")).sources
    module = GRPOModule(TinyModel(), kl_loss=KLTerm(0.0, "k3"), correction=RolloutCorrection(bypass=True))
    assert set(module.sources) == {"actor"}
    rollout = rollout_of(responses(2, seed=0))
    assert (
        module.old_scores(rollout).evaluate(rollout).logprobs is rollout.rollout_logprobs
    )  # no model was built that could be evaluated
