"""``lightning-rlhf plan --config x.yaml --gpus 64``: what a run takes, without weights, GPUs or processes."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table

from lightning_rlhf.callbacks import RolloutLoop, RunCheckpoint
from lightning_rlhf.cli.main import is_for_users
from lightning_rlhf.cli.understood import ConfigCLI, module_of, understood
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.kto import KTOModule
from lightning_rlhf.modules.pairs import PairModule
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.planning import memory
from lightning_rlhf.planning.architecture import architecture
from lightning_rlhf.planning.plan import GIB, Plan, Run, plan, refusal
from lightning_rlhf.planning.setup import Engine, Role, Strategy, Work, Zero, strategy
from lightning_rlhf.rollout.engine import engine_dtype
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.strategies.deepspeed.config import configuration
from lightning_rlhf.strategies.names import OURS, our_name

_DEFAULT_GIB = 80.0
_ZERO_SIZES = {
    "reduce_bucket_size": "bucket",
    "stage3_max_live_parameters": "live",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "persistent",
}
_ZERO_WITHOUT_MEMORY = {"contiguous_gradients", "reduce_scatter", "round_robin_gradients", "sub_group_size"}
_USAGE = f"""usage: lightning-rlhf plan --config x.yaml --gpus N [options of fit]

What a run takes on so many GPUs, without any: the memory of each, term by term, and what is sent in a step.

  --config x.yaml       the configuration of the run
  --gpus N              GPUs in all
  --gpu-memory-gib GIB  memory of one GPU (default: {_DEFAULT_GIB:g})
  --nodes N             machines that the GPUs are in

Every option of fit may be given too, and changes what is planned; lightning-rlhf fit --help lists them:

  lightning-rlhf plan --config configs/quickstart/ppo.yaml --gpus 8 --trainer.strategy rlhf_fsdp

Exit code 0 if the run fits, 2 if not or if something is wrong with the configuration."""


class PlanCLI(ConfigCLI):
    """Understands what a plan asks beside the configuration."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add it."""
        parser.add_argument("--gpus", type=PositiveInt, default=None, help="GPUs in all")
        parser.add_argument("--gpu-memory-gib", type=PositiveFloat, default=_DEFAULT_GIB, help="memory of one GPU")
        parser.add_argument("--nodes", type=PositiveInt, default=None, help="machines that the GPUs are in")


def run(arguments: list[str]) -> int:
    """Print a run's plan.

    Args:
        arguments: behind ``plan``: those of ``fit``, ``--gpus`` and, if wanted, ``--gpu-memory-gib`` and ``--nodes``.

    Returns:
        Exit code: 0 if the run fits, 2 if not or if something is wrong with the configuration.
    """
    if {"--help", "-h"} & set(arguments):
        print(_USAGE)
        return 0
    config = understood(arguments, PlanCLI)
    try:
        if config["gpus"] is None:
            raise ValueError("a plan is for a number of GPUs: give --gpus, for example --gpus 8")
        found = plan(run_of(config), config["gpus"])
        if config["nodes"] is not None:
            check_nodes(found, config["nodes"])
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return 2
    Console().print(table(found), *notes(found), sep="\n")
    if found.fits:
        return 0
    print(f"lightning-rlhf: {refusal(found)}", file=sys.stderr)
    return 2


def run_of(config: Namespace) -> Run:
    """What a configuration asks for.

    Args:
        config: of ``fit`` and ``plan``, parsed; no class of it is made but the module, which loads nothing.
    """
    module = module_of(config)
    chosen = strategy_of(config["trainer"]["strategy"], config["gpus"])
    mixed = config["trainer"]["precision"] == "bf16-mixed"
    loop = next((own for own in config["trainer"]["callbacks"] or () if is_made_of(own, RolloutLoop)), None)
    data = config["data"]["init_args"]
    work = work_of(module, data, None if loop is None else loop["init_args"], mixed)
    engine = None if loop is None else engine_of(loop["init_args"]["engine"])
    if engine is not None and engine.dtype is None:
        actor = module.sources["actor"].dtype
        engine = replace(engine, dtype=engine_dtype(config["trainer"]["precision"], actor))
    capacity = int(config["gpu_memory_gib"] * GIB)
    return Run(roles_of(module, chosen), chosen, work, engine, capacity, saves_in_background(config))


def saves_in_background(config: Namespace) -> bool:
    """Return whether a configuration's checkpoints are written while training goes on; without any, they are."""
    checkpoints = [own for own in config["trainer"]["callbacks"] or () if is_made_of(own, Checkpoint)]
    return not checkpoints or any(
        is_made_of(own, RunCheckpoint) and own["init_args"]["background"] for own in checkpoints
    )


def roles_of(module: Any, chosen: Strategy) -> list[Role]:
    """The module's models, each built without weights."""
    roles = []
    needs_ref = isinstance(module, DPOModule) or (isinstance(module, RLHFModule) and module.has_ref)
    for names, trained in ((module.trained_roles, True), (module.frozen_roles, False)):
        for name in names:
            source, scalar = module.sources[name], name in ("critic", "reward_model")
            model = architecture(source.hf_config(), scalar, chosen.tensor_parallel_size, name)
            lora: dict[str, Any] = {}
            if source.lora is not None:
                targets = source.lora.target_modules
                lora = {"lora_rank": source.lora.rank, "lora_targets": None if targets is None else tuple(targets)}
            both = name == "actor" and needs_ref and "ref" not in module.frozen_roles
            roles.append(Role(name, model, trained, source.dtype, **lora, is_reference_too=both))
    return roles


def work_of(module: Any, data: Namespace, loop: Namespace | None, mixed: bool) -> Work:
    """What a step does."""
    longest = data["max_tokens"]
    if loop is None:
        if isinstance(module, RLHFModule):
            raise ValueError(
                "nothing hands rollouts over: add lightning_rlhf.callbacks.RolloutLoop to trainer.callbacks"
            )
        texts = data["batch_size"]
        is_kto = isinstance(module, KTOModule)
        pairs = isinstance(module, PairModule) and not is_kto
        read = {"asks_old": False, "mixed": mixed, "pairs": pairs, "asks_mismatched": is_kto}
        return Work(texts, texts, 1, longest, module.micro_batch_tokens, **read)
    sampling = loop["dynamic_sampling"]
    prompts = data["batch_size"] if sampling is None else sampling["prompts_per_step"]
    return Work(
        responses=prompts * loop["group_size"],
        minibatch_size=module.minibatch_size,
        update_epochs=module.update_epochs,
        longest=longest + loop["max_response_tokens"],
        micro_batch_tokens=module.micro_batch_tokens,
        asks_old=not module.correction.bypass,
        mixed=mixed,
    )


def strategy_of(given: Any, gpus: int) -> Strategy:
    """The strategy that a configuration names, by text or by class."""
    if isinstance(given, str):
        return strategy(our_name(given, gpus))
    options = given["init_args"]
    name = given["class_path"].rpartition(".")[2]
    known = {"RLHFSingleDeviceStrategy": "rlhf_single", "RLHFDDPStrategy": "rlhf_ddp", "RLHFFSDPStrategy": "rlhf_fsdp"}
    if name == "RLHFDeepSpeedStrategy":
        known[name] = f"rlhf_deepspeed_stage_{options['stage']}"
    said = {
        ours: options[theirs]
        for theirs, ours in (
            ("tensor_parallel_size", "tensor_parallel_size"),
            ("activation_checkpointing", "checkpointing"),
            ("reduce_every_micro_batch", "reduce_every"),
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload", "offload_params"),
            ("offload_optimizer", "offload_optimizer"),
            ("offload_params", "offload_params"),
            ("offload_frozen", "offload_frozen"),
        )
        if options.get(theirs) is not None
    }
    if name == "RLHFDeepSpeedStrategy":
        said |= _zero_options(options)
    return strategy(known.get(name, OURS.get(name, name)), **said)


def _zero_options(options: Namespace) -> dict[str, Any]:
    """What a strategy's own DeepSpeed configuration says about memory.

    Raises:
        ValueError: the strategy refuses it, or the plan does not know what it says.
    """
    optimizer, params = bool(options.get("offload_optimizer")), bool(options.get("offload_params"))
    frozen = params if options.get("offload_frozen") is None else bool(options["offload_frozen"])
    whole = configuration(options["stage"], optimizer, params, frozen, options.get("config") or {})
    merged = {name: value for name, value in whole["zero_optimization"].items() if name != "stage"}
    found: dict[str, Any] = {"offload_frozen": frozen}
    for theirs, ours in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_params")):
        device = merged.pop(theirs, {}).get("device", "none")
        if device not in ("cpu", "none"):
            raise ValueError(f"the plan knows {theirs} to cpu or none, got {device!r} in the strategy's config")
        found[ours] = device == "cpu"
    sizes = {ours: int(merged.pop(theirs)) for theirs, ours in _ZERO_SIZES.items() if theirs in merged}
    if unknown := sorted(merged.keys() - _ZERO_WITHOUT_MEMORY):
        raise ValueError(
            f"the plan does not know what zero_optimization.{unknown[0]} in the strategy's config takes: leave it out "
            f"to plan the rest"
        )
    return {**found, "zero": Zero(**sizes)}


def engine_of(given: Any) -> Engine | None:
    """The engine that a configuration names; None for one on GPUs of its own. ``auto`` is vLLM, as on a GPU."""
    options = Namespace() if isinstance(given, str) else given["init_args"]
    if isinstance(given, str) or is_made_of(given, VLLMEngine):
        extra = options.get("arguments") or {}
        return Engine(
            options.get("gpu_memory_utilization", 0.4),
            options.get("tensor_parallel_size", 1),
            dtype=extra.get("dtype"),
        )
    if is_made_of(given, SharedEngine):
        return engine_of(options["engine"])
    if is_made_of(given, TransformersEngine):
        return Engine(0.0, sequences=options["batch_size"])
    return None


def is_made_of(given: Any, kind: type) -> bool:
    """Whether a configuration's entry names a class or one derived from it."""
    module, _, name = given["class_path"].rpartition(".")
    return issubclass(getattr(import_module(module), name), kind)


def check_nodes(found: Plan, nodes: int) -> None:
    """Refuse GPUs that machines do not share equally, and groups of GPUs that would span machines."""
    each, rest = divmod(found.gpus, nodes)
    if rest:
        raise ValueError(f"{found.gpus} GPUs are not shared equally by {nodes} nodes; give a multiple of {nodes}")
    sizes = {"tensor_parallel_size": found.run.strategy.tensor_parallel_size}
    if found.run.engine is not None:
        sizes["the engine's tensor_parallel_size"] = found.run.engine.tensor_parallel_size
    for what, size in sizes.items():
        if each % size:
            raise ValueError(f"{what} {size} does not divide the {each} GPUs of a node, so groups would span nodes")


def table(found: Plan) -> Table:
    """Terms of memory and of communication."""
    shown = Table(title=f"{found.run.strategy.name} on {found.gpus} GPUs of {found.run.capacity / GIB:g} GiB")
    for column, justify in (("each GPU", "left"), ("GiB", "right")):
        shown.add_column(column, justify=justify)  # type: ignore[arg-type]
    _rows(shown, found.memory, memory.TERMS)
    shown.add_row(f"all, during {found.fullest}", f"{found.total / GIB:.2f}", style="bold", end_section=True)
    if found.host:
        _rows(shown, Counter({f"host: {term}": size for term, size in found.host.items()}))
        shown.add_section()
    _rows(shown, Counter({f"sent in a step: {term}": size for term, size in found.traffic.items()}))
    shown.add_row("all, sent in a step", f"{found.traffic.total() / GIB:.2f}", style="bold")
    return shown


def notes(found: Plan) -> list[str]:
    """What the table does not say: the sizes, the work of a rank, the engine's room."""
    run, ranks = found.run, found.gpus // found.run.strategy.tensor_parallel_size
    sizes = ", ".join(f"{role.name} {role.model.elements / 1e9:.2f}B" for role in run.roles)
    work, what = run.work, "pairs of texts" if run.work.pairs else "texts"
    lines = [
        f"parameters: {sizes}",
        f"a step: {work.responses} {what} of at most {work.longest} tokens; each of {ranks} ranks makes "
        f"{work.micro_batches(work.minibatch_size, ranks)} micro-batches of a mini-batch of {work.minibatch_size}",
    ]
    if run.engine is not None:
        lines.append(f"the engine's cache holds {found.cached_texts} texts of that length")
    return lines


def _rows(shown: Table, terms: Counter[str], order: tuple[str, ...] = ()) -> None:
    for term in order or terms:
        if terms[term]:
            shown.add_row(term, f"{terms[term] / GIB:.2f}")
