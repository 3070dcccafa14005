"""Rows and passes of preference modules compared with those that the plan counts."""

from dataclasses import replace

import pytest
import torch

from lightning_rlhf.extras.algorithms.dpo import DPOModule
from lightning_rlhf.extras.algorithms.kto import KTOModule
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedBatch
from lightning_rlhf.extras.plan import traffic as terms
from lightning_rlhf.extras.plan.activations import Pass
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.setup import Role, Run, Work, precision, strategy
from lightning_rlhf.extras.plan.traffic import traffic
from lightning_rlhf.models import packed_calls
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.types import PreferenceBatch, SequenceBatch
from tests.extras.plan.fakes import saved_by, source

ROWS, LENGTH = 8, 30
MODULES = {"dpo": DPOModule, "kto": KTOModule, "reward": RewardModule}


def sequences(length):
    ids = torch.randint(97, (ROWS, length), generator=torch.Generator().manual_seed(length))
    return SequenceBatch(ids, torch.full((ROWS,), length), torch.arange(length).expand(ROWS, -1) > 4)


def work_of(kind, budget):
    return Work(ROWS, ROWS, 1, LENGTH, budget, evaluates_old=False, mixed=False, pairs=kind != "kto",
                evaluates_mismatched=kind == "kto")  # fmt: skip


def module_of(kind, budget, layers=2):
    """Return a module with its models, and rows in which one text of each pair is shorter."""
    module = MODULES[kind](source("llama", num_hidden_layers=layers), micro_batch_tokens=budget)
    for role in ("reward_model",) if kind == "reward" else ("actor", "ref"):
        setattr(module, role, module.build_role(role).train().requires_grad_(role != "ref"))
    if kind == "kto":
        module.kl = torch.zeros(())
        return module, UnpairedBatch(sequences(LENGTH), torch.ones(ROWS, dtype=torch.bool), torch.arange(ROWS))
    return module, PreferenceBatch(sequences(LENGTH), sequences(LENGTH - 9), torch.zeros(ROWS))


@pytest.fixture
def without_padding(monkeypatch):
    """Attention in float32 where texts of unlike lengths do not share a call, which would pad them."""
    monkeypatch.setattr(packed_calls, "_share_a_call", lambda texts: len({text.tokens for text in texts}) == 1)
    packed_calls.layout_of_calls.cache_clear()
    yield
    packed_calls.layout_of_calls.cache_clear()


@pytest.mark.parametrize("budget", [LENGTH, 4 * LENGTH, 5 * LENGTH])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.usefixtures("without_padding")
def test_layer_saves_the_planned_bytes_of_a_micro_batch(kind, budget):
    """Exact: both texts of each pair without padding, and nothing for the reference."""
    saved = {}
    for layers in (1, 2):
        module, batch = module_of(kind, budget, layers)
        (rows, _), *others = module.micro_batches.split(batch)
        models = torch.nn.ModuleList(child for child in module.children())
        saved[layers] = saved_by(models, lambda: module.row_scores(batch[rows]))  # noqa: B023 (called at once)
        work = work_of(kind, budget)
        assert (len(rows), 1 + len(others)) == (work.micro_batch_rows(ROWS, 1), work.micro_batches(ROWS, 1))
    model = architecture(source("llama").hf_config())
    tokens = int(batch[rows].real_lengths.sum())
    assert tokens <= len(rows) * work.row_tokens
    one_pass = Pass(model, precision(strategy("rlhf_single"), "float32", False), tokens)
    assert saved[2] - saved[1] == one_pass.tokens * one_pass.layer_bytes(model.layers[0])


@pytest.mark.parametrize("kind", MODULES)
def test_models_have_the_planned_number_of_passes(kind):
    """Forward passes of each model in a step, for which sharded models are gathered."""
    module, batch = module_of(kind, budget := 4 * LENGTH)
    passes = dict.fromkeys(("actor", "ref", "reward_model"), 0)
    for role in passes.keys() & dict(module.named_children()).keys():

        def count(*_, role=role):
            passes[role] += 1

        getattr(module, role).register_forward_hook(count)
    if kind == "kto":
        module.measured_kl(batch)
    for rows, _ in module.micro_batches.split(batch):
        module.row_scores(batch[rows])
    model, eight = architecture(source("llama").hf_config()), replace(work_of(kind, budget), responses=8 * ROWS)
    eight = replace(eight, minibatch_size=8 * ROWS)  # so that each of eight ranks has the rows of the single one above
    once = traffic(Run([Role("ref", model, False)], strategy("rlhf_fsdp"), Work(8, 8, 1, 1, 1)), 8)
    for role, number in passes.items():
        if number:
            sent = traffic(Run([Role(role, model, trained=role != "ref")], strategy("rlhf_fsdp"), eight), 8)
            assert sent[terms.FORWARD] == number * 2 * once[terms.FORWARD], role  # float32, not bfloat16
