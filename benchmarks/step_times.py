"""Tables of ``docs/five_hundred_gpus.md``; ``python -m benchmarks.step_times`` with its path rewrites them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.scaling_tables import model_shapes
from lightning_rlhf.extras.plan import bounds
from lightning_rlhf.extras.plan.plan import GIB, plan
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, strategy

GPUS, NODE = (8, 64, 512), 8
RESPONSES, GROUP, PROMPT, RESPONSE = 1024, 8, 1024, 3072


class Setting(NamedTuple):
    """What a table is about.

    Attributes:
        tensor_parallel: GPUs of an engine.
        sharded: whether weights are sharded over all GPUs, not within a node.
        grows: whether a step has as many times more responses as there are GPUs.
    """

    model: str
    tensor_parallel: int
    sharded: bool
    grows: bool


TABLES = {
    "7B, same step": Setting("7B", 1, sharded=False, grows=False),
    "7B, larger step": Setting("7B", 1, sharded=False, grows=True),
    "70B, same step": Setting("70B", 8, sharded=True, grows=False),
    "70B, larger step": Setting("70B", 8, sharded=True, grows=True),
}


class Times(NamedTuple):
    """Least seconds of the parts of a step, and GiB of a GPU."""

    generation: float
    push: float
    evaluation: float
    update: float
    sent: float
    gib: float

    @property
    def step(self) -> float:
        """Generation, a push, and learning, in which arithmetic and communication overlap."""
        return self.generation + self.push + max(self.evaluation + self.update, self.sent)


def run_of(setting: Setting, gpus: int) -> Run:
    """Return GRPO with a reference on some GPUs."""
    responses = RESPONSES * (gpus // NODE if setting.grows else 1)
    chosen = strategy("rlhf_fsdp", shard_size=gpus if setting.sharded else NODE, checkpointing=True)
    chosen = replace(chosen, node_gpus=NODE)
    work = Work(
        responses=responses, minibatch_size=responses, update_epochs=1, longest=PROMPT + RESPONSE,
        micro_batch_tokens=16384, evaluates_old=False, response_tokens=RESPONSE, group_size=GROUP, shares_prompts=True,
    )  # fmt: skip
    engine = Engine(share=0.5, tensor_parallel_size=setting.tensor_parallel, dtype="bfloat16", sleeps=True)
    roles = [Role(name, model_shapes(setting.model), trained=name == "actor") for name in ("actor", "ref")]
    return Run(roles, chosen, work, engine, capacity=80 * GIB)


def times(setting: Setting, gpus: int) -> Times:
    """Return the least seconds of a step on some GPUs."""
    run = run_of(setting, gpus)
    planned, cluster = plan(run, gpus), bounds.Cluster(gpus, NODE)
    learning = bounds.learning_seconds(run, cluster)
    update = bounds.learning_seconds(replace(run, roles=run.roles[:1]), cluster)  # without the reference
    return Times(
        generation=bounds.generation_seconds(run, planned.cached_texts, cluster),
        push=bounds.push_seconds(run, planned.traffic, cluster),
        evaluation=learning.arithmetic - update.arithmetic,
        update=update.arithmetic,
        sent=learning.communication,
        gib=planned.total / GIB,
    )


def table(setting: Setting) -> str:
    """Return a table: a row for each number of GPUs."""
    lines = [
        "| GPUs | responses | generation | push | evaluation | update | sent | step at least | of perfect scaling "
        "| GiB of a GPU |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first = times(setting, GPUS[0]).step
    for gpus in GPUS:
        each = times(setting, gpus)
        faster = 1 if setting.grows else gpus / GPUS[0]
        seconds = " | ".join(f"{value:.3g}" for value in each[:5])
        responses = run_of(setting, gpus).work.responses
        fits = f"{each.gib:.0f}" if each.gib <= 80 else f"{each.gib:.0f}, does not fit"
        scaling = f"{first / each.step / faster:.0%}"
        lines.append(f"| {gpus} | {responses:,} | {seconds} | {each.step:.3g} | {scaling} | {fits} |")
    return "\n".join(lines)


def table_of_engines() -> str:
    """Return the step of the 7B model with engines of several sizes."""
    lines = ["| GPUs of an engine | " + " | ".join(f"{gpus} GPUs" for gpus in GPUS) + " |", "|--:|--:|--:|--:|"]
    for size in (1, 2, 4, 8):
        setting = TABLES["7B, same step"]._replace(tensor_parallel=size)
        lines.append(f"| {size} | {' | '.join(f'{times(setting, gpus).step:.3g}' for gpus in GPUS)} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return a page with current tables between its markers ``<!-- table: name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: a marker is missing or occurs twice.
    """
    tables = {name: table(setting) for name, setting in TABLES.items()} | {"7B, engines": table_of_engines()}
    for name, text in tables.items():
        page, count = re.subn(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", rf"\1\n{text}\n\n\2", page, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"the page must contain <!-- table: {name} --> and <!-- end --> once, got {count}")
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
