"""``lightning-rlhf plan --config x.yaml --gpus 64``: memory and communication of a run, without using GPUs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_rlhf.callbacks import RolloutLoop, RunCheckpoint
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.extras.algorithms.distillation import TeacherModule
from lightning_rlhf.extras.algorithms.dpo import DPOModule
from lightning_rlhf.extras.algorithms.kto import KTOModule
from lightning_rlhf.extras.commands.run_config import ConfigCLI, callbacks_of, is_class, make_module, parse_run_config
from lightning_rlhf.extras.plan import bounds, memory, one_gpu
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.bounds import Cluster
from lightning_rlhf.extras.plan.node_memory import node_memory
from lightning_rlhf.extras.plan.plan import GIB, Plan, misfit_message, plan
from lightning_rlhf.extras.plan.setup import NODE_GPUS, Engine, Role, Run, Strategy, Work, Zero, strategy
from lightning_rlhf.models.loading import Pretrained, with_dtype
from lightning_rlhf.modules.pairs import PairModule
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.modules.text_layout import tokens_for
from lightning_rlhf.rollout.engine import engine_dtype
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMAdapterEngine, VLLMEngine
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

Compute the memory of each GPU by term, and the bytes that it sends in a step. No GPU is needed.

  --config x.yaml       the configuration of the run
  --gpus N              number of GPUs; default: trainer.devices on every node
  --gpu-memory-gib GIB  memory of one GPU (default: {_DEFAULT_GIB:g})
  --nodes N             number of machines with these GPUs

  --gpu 24GB            instead of a configuration: which models from 0.5 to 14 B fit on one GPU, trained in which ways

All options of fit are accepted and change the planned run; lightning-rlhf fit --help lists them:

  lightning-rlhf plan --config configs/quickstart/ppo.yaml --gpus 8 --trainer.strategy rlhf_fsdp

Exit code 0 if the run fits, 2 if it does not or if the configuration is invalid."""


class PlanCLI(ConfigCLI):
    """Parser of the configuration and of the options of ``plan``."""

    shown_command = "plan"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of ``plan``."""
        parser.add_argument("--gpu", type=str, default=None, help="memory of one GPU, without a configuration")
        parser.add_argument("--gpus", type=PositiveInt, default=None, help="number of GPUs")
        parser.add_argument("--gpu-memory-gib", type=PositiveFloat, default=_DEFAULT_GIB, help="memory of one GPU")
        parser.add_argument("--nodes", type=PositiveInt, default=None, help="number of machines with these GPUs")


@one_line_errors
def run(arguments: list[str]) -> int:
    """Print a run's plan.

    Args:
        arguments: arguments after ``plan``: those of ``fit``, ``--gpus``, ``--gpu-memory-gib`` and ``--nodes``.

    Returns:
        Exit code: 0 if the run fits, 2 if it does not or if the configuration is invalid.
    """
    if {"--help", "-h"} & set(arguments):
        print(_USAGE)
        return 0
    if arguments and arguments[0].partition("=")[0] == "--gpu":
        print_one_gpu(_gib_of(arguments))
        return 0
    config = parse_run_config(arguments, PlanCLI)
    if config["gpu"] is not None:
        _gib_of([f"--gpu={config['gpu']} with other options"])
    config["gpus"] = config["gpus"] or _configured_gpus(config)
    result = plan(run_of(config), config["gpus"])
    nodes = config["nodes"] or config["trainer"]["num_nodes"]
    if config["nodes"] is not None or nodes > 1:
        check_nodes(result, nodes)
        result = replace(result, gpus_per_node=config["gpus"] // nodes)
    Console().print(table(result), *notes(result), sep="\n")
    if not result.fits:
        raise UsageError(misfit_message(result))
    return 0


def _configured_gpus(config: Namespace) -> int:
    """Return the number of GPUs that the Trainer of a configuration has.

    Raises:
        UsageError: the configuration does not say it.
    """
    devices = config["trainer"]["devices"]
    if isinstance(devices, list):
        devices = len(devices)
    if not str(devices).isdecimal() or int(devices) < 1:
        raise UsageError("set the number of GPUs to plan for with --gpus, for example --gpus 8")
    return int(devices) * int(config["nodes"] or config["trainer"]["num_nodes"])


def _gib_of(arguments: list[str]) -> int:
    """Return the memory of one GPU from ``--gpu 24GB`` or ``--gpu=24``.

    Raises:
        ValueError: it is not a size, or other options are beside it.
    """
    _, _, value = " ".join(arguments).replace("--gpu ", "--gpu=").partition("=")
    size = re.fullmatch(r"(\d+) ?(?:G|GB|GiB)?", value, re.IGNORECASE)
    if size is None or not 8 <= int(size[1]) <= 1024:
        raise UsageError(
            f"--gpu is the memory of one GPU without further options, such as --gpu 24GB, from 8 to 1024: got "
            f"{value!r}; for a configuration, set --gpus and --gpu-memory-gib"
        )
    return int(size[1])


def print_one_gpu(capacity_gib: int) -> None:
    """Print the memory of runs of several sizes on one GPU.

    Args:
        capacity_gib: memory of the GPU.
    """
    headings, rows = one_gpu.table(capacity_gib)
    result = Table(title=f"GiB on one GPU of {capacity_gib} GiB, computed; in brackets: does not fit")
    for number, heading in enumerate(headings):
        result.add_column(heading, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    work = one_gpu.WORK
    Console().print(result)
    print(
        f"{work.responses} responses in a step, {work.longest} tokens with their prompts, micro-batches of "
        f"{work.micro_batch_tokens} tokens; bf16-mixed, activation_checkpointing, a vLLM engine on the same GPU.\n"
        f"on one base: the sources of all roles have one path, and lora or an adapter; nf4: quantization: nf4 beside "
        f"it. Recipes are in configs/recipes/one_gpu/."
    )


def run_of(config: Namespace) -> Run:
    """Read the run from a configuration. Only the module is instantiated, which loads no weights.

    Args:
        config: parsed configuration of ``fit`` and options of ``plan``.
    """
    module = make_module(config)
    chosen = strategy_of(config["trainer"]["strategy"], config["gpus"])
    nodes = config["nodes"] or config["trainer"]["num_nodes"]
    if nodes > 1:
        chosen = replace(chosen, node_gpus=max(config["gpus"] // nodes, 1))
    elif config["nodes"] is None and (config["gpus"] < NODE_GPUS or config["gpus"] % NODE_GPUS == 0):
        chosen = replace(chosen, node_gpus=NODE_GPUS)
    mixed = config["trainer"]["precision"] == "bf16-mixed"
    loop = next(iter(callbacks_of(config, RolloutLoop)), None)
    data = config["data"]["init_args"]
    settings, engine = None, None
    if loop is not None:
        settings = loop["init_args"]
        engine = engine_of(settings["engine"])
    capacity = int(config["gpu_memory_gib"] * GIB)
    work = work_of(module, data, settings, mixed)
    if module.layout.micro_batch_tokens is None:
        work = replace(work, micro_batch_tokens=tokens_for(capacity))
    if engine is not None and engine.dtype is None:
        actor = module.sources["actor"].dtype
        engine = replace(engine, dtype=engine_dtype(config["trainer"]["precision"], actor))
    return Run(
        roles=roles_of(module, chosen, mixed),
        strategy=chosen,
        work=work,
        engine=engine,
        capacity=capacity,
        background_save=saves_in_background(config),
    )


def saves_in_background(config: Namespace) -> bool:
    """Return whether checkpoints are written while training continues, as by the default RunCheckpoint."""
    checkpoints = callbacks_of(config, Checkpoint)
    return not checkpoints or any(
        is_class(callback, RunCheckpoint) and callback["init_args"]["background"] for callback in checkpoints
    )


def roles_of(module: Any, chosen: Strategy, mixed: bool) -> list[Role]:
    """Build the module's models without weights, in the dtypes of a run with or without ``bf16-mixed``."""
    roles = []
    trained_roles = module.trained_roles
    module.sources = {n: with_dtype(source, n in trained_roles, mixed) for n, source in module.sources.items()}
    needs_ref = (isinstance(module, DPOModule) and module.evaluates_reference) or (
        isinstance(module, RLHFModule) and module.has_ref
    )
    for names, trained in ((module.trained_roles, True), (module.frozen_roles, False)):
        for name in names:
            source, scalar = module.sources[name], name in ("critic", "reward_model")
            model = architecture(
                source.hf_config(),
                scalar,
                chosen.tensor_parallel_size,
                name,
                train_vision=source.train_vision,
                sequence_parallel_size=chosen.sequence_parallel_size,
            )
            lora: dict[str, Any] = {}
            if source.lora is not None:
                targets = source.lora.target_modules
                lora = {"lora_rank": source.lora.rank, "lora_targets": None if targets is None else tuple(targets)}
            quantization = source.quantization if isinstance(source, Pretrained) else None
            shares = module.shared_base_of(name) not in (None, name)
            both = name == "actor" and needs_ref and "ref" not in module.frozen_roles
            roles.append(
                Role(
                    name,
                    model,
                    trained,
                    source.dtype or "float32",
                    **lora,
                    is_reference_too=both,
                    quantization=quantization,
                    shares_base=shares,
                    state_bytes=_state_bytes(module.optimizer_of(name)[0]) if trained else None,
                )
            )
    return roles


_BLOCK = 256  # elements of a state of 8 bits that share a float32 scale


def _state_bytes(make_optimizer: Any) -> float | None:
    """Return the bytes per parameter of the states of an optimizer of 8 bits; None for other optimizers.

    Args:
        make_optimizer: factory of the optimizer.
    """
    name = type(make_optimizer([nn.Parameter(torch.zeros(2, 2))])).__name__.lower()
    if "8bit" not in name:
        return None
    states = 1 if "lion" in name or "sgd" in name else 2
    return states * (1 + 4 / _BLOCK)


def work_of(module: Any, data: Namespace, loop: Namespace | None, mixed: bool) -> Work:
    """Read the sizes of a step."""
    longest = data["max_tokens"]
    if loop is None:
        if isinstance(module, RLHFModule):
            raise UsageError(
                "no callback generates rollouts: add lightning_rlhf.callbacks.RolloutLoop to trainer.callbacks"
            )
        texts = data["batch_size"]
        is_kto = isinstance(module, KTOModule)
        pairs = isinstance(module, PairModule) and not is_kto
        return Work(
            responses=texts,
            minibatch_size=texts,
            update_epochs=1,
            longest=longest,
            micro_batch_tokens=module.layout.token_budget,
            evaluates_old=False,
            mixed=mixed,
            pairs=pairs,
            evaluates_mismatched=is_kto,
        )
    sampling = loop["dynamic_sampling"]
    prompts = data["batch_size"] if sampling is None else sampling["prompts_per_step"]
    environment = loop["environment"]
    has_teachers = isinstance(module, TeacherModule) and bool(module.teachers)
    module.expect_responses(prompts * loop["group_size"])
    return Work(
        responses=prompts * loop["group_size"],
        minibatch_size=module.minibatch_size,
        update_epochs=module.update_epochs,
        longest=longest + loop["max_response_tokens"],
        micro_batch_tokens=module.layout.token_budget,
        evaluates_old=not module.correction.bypass,
        mixed=mixed,
        reuses_first=module.reuses_first_forward,
        turns=0 if environment is None else environment["max_turns"],
        environment_processes=environment["concurrency"] if environment and environment["timeout_s"] else 0,
        response_tokens=loop["max_response_tokens"],
        group_size=loop["group_size"],
        shares_prompts=module.layout.packed,
        divergence_bytes=module.divergence.memory_mb << 20 if has_teachers else 0,
        teachers_in_updates=has_teachers and module.divergence.top_k is None,
    )


def strategy_of(config: Any, gpus: int) -> Strategy:
    """Read the strategy, which is configured by name or by class."""
    if isinstance(config, str):
        return strategy(our_name(config, gpus))
    options = config["init_args"]
    name = config["class_path"].rpartition(".")[2]
    known = {"RLHFSingleDeviceStrategy": "rlhf_single", "RLHFDDPStrategy": "rlhf_ddp", "RLHFFSDPStrategy": "rlhf_fsdp"}
    if name == "RLHFDeepSpeedStrategy":
        known[name] = f"rlhf_deepspeed_stage_{options['stage']}"
    settings = {
        field: options[option]
        for option, field in (
            ("tensor_parallel_size", "tensor_parallel_size"),
            ("sequence_parallel_size", "sequence_parallel_size"),
            ("shard_size", "shard_size"),
            ("activation_checkpointing", "checkpointing"),
            ("activation_offload", "activation_offload"),
            ("reshard_after_forward", "reshards"),
            ("reduce_every_micro_batch", "reduce_every"),
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload", "offload_params"),
            ("offload_optimizer", "offload_optimizer"),
            ("offload_params", "offload_params"),
            ("offload_frozen", "offload_frozen"),
            ("offload_idle", "offload_idle"),
        )
        if options.get(option) is not None
    }
    if name == "RLHFDeepSpeedStrategy":
        settings |= _zero_options(options)
    return strategy(known.get(name, OURS.get(name, name)), **settings)


def _zero_options(options: Namespace) -> dict[str, Any]:
    """Read the options that affect memory from a strategy's DeepSpeed configuration.

    Raises:
        ValueError: the strategy or the plan does not support an option.
    """
    optimizer, params = bool(options.get("offload_optimizer")), bool(options.get("offload_params"))
    frozen = params if options.get("offload_frozen") is None else bool(options["offload_frozen"])
    whole = configuration(options["stage"], optimizer, params, frozen, options.get("config") or {})
    merged = {name: value for name, value in whole["zero_optimization"].items() if name != "stage"}
    settings: dict[str, Any] = {"offload_frozen": frozen}
    for option, field in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_params")):
        device = merged.pop(option, {}).get("device", "none")
        if device not in ("cpu", "none"):
            raise UsageError(f"plan supports {option} to cpu or none, got {device!r} in the strategy's config")
        settings[field] = device == "cpu"
    sizes = {field: int(merged.pop(option)) for option, field in _ZERO_SIZES.items() if option in merged}
    if unknown := sorted(merged.keys() - _ZERO_WITHOUT_MEMORY):
        raise UsageError(
            f"plan does not support zero_optimization.{unknown[0]} in the strategy's config: remove it to plan the rest"
        )
    return {**settings, "zero": Zero(**sizes)}


def engine_of(config: Any) -> Engine | None:
    """Read the engine; None if it uses separate GPUs. ``auto`` counts as vLLM, which it selects on a GPU."""
    options = Namespace() if isinstance(config, str) else config["init_args"]
    if isinstance(config, str) or is_class(config, VLLMEngine):
        extra = options.get("arguments") or {}
        return Engine(
            options.get("gpu_memory_utilization", 0.4),
            options.get("tensor_parallel_size", 1),
            dtype=extra.get("dtype"),
            sleeps=options.get("sleep_while_learning", False),
            gets_adapters=not isinstance(config, str) and is_class(config, VLLMAdapterEngine),
        )
    if is_class(config, SharedEngine):
        return engine_of(options["engine"])
    if is_class(config, TransformersEngine):
        return Engine(0.0, sequences=options["batch_size"])
    return None


def check_nodes(plan: Plan, nodes: int) -> None:
    """Validate that nodes have equal numbers of GPUs, and that engines do not span nodes.

    Raises:
        ValueError: the GPUs cannot be divided.
    """
    gpus_per_node, rest = divmod(plan.gpus, nodes)
    if rest:
        raise UsageError(f"{plan.gpus} GPUs cannot be divided equally over {nodes} nodes; use a multiple of {nodes}")
    size = 1 if plan.run.engine is None else plan.run.engine.tensor_parallel_size
    if gpus_per_node % size:
        raise UsageError(
            f"the engine's tensor_parallel_size {size} does not divide the {gpus_per_node} GPUs of a node, so groups "
            f"would span nodes"
        )


def table(plan: Plan) -> Table:
    """Render the terms of memory and of communication."""
    result = Table(title=f"{plan.run.strategy.name} on {counted(plan.gpus, 'GPU')} of {plan.run.capacity / GIB:g} GiB")
    result.add_column("each GPU")
    result.add_column("GiB", justify="right")
    _add_rows(result, plan.memory, memory.TERMS)
    result.add_row(f"all, during {plan.peak}", f"{plan.total / GIB:.2f}", style="bold", end_section=True)
    if plan.host:
        _add_rows(result, Counter({f"host: {term}": size for term, size in plan.host.items()}))
        result.add_section()
    _add_rows(result, Counter({f"sent in a step: {term}": size for term, size in plan.traffic.items()}))
    result.add_row("all, sent in a step", f"{plan.traffic.total() / GIB:.2f}", style="bold")
    return result


def _size(parameters: int) -> str:
    if parameters >= 1e8:
        return f"{parameters / 1e9:.2f}B"
    return f"{parameters / 1e6:.2f}M"


def notes(plan: Plan) -> list[str]:
    """Return lines on model sizes, the work of a rank, the engine's cache, and whether the plan fits."""
    run, work = plan.run, plan.run.work
    sizes = ", ".join(f"{role.name} {_size(role.model.elements)}" for role in run.roles)
    texts = "pairs of texts" if work.pairs else "texts"
    texts = f"conversations of up to {work.turns} turns," if work.turns else texts
    ranks = run.ranks(plan.gpus)
    lines = [
        f"parameters: {sizes}",
        f"a step: {work.responses} {texts} of at most {work.longest} tokens; each of {ranks} ranks splits its part "
        f"of a mini-batch of {work.minibatch_size} into {work.micro_batches(work.minibatch_size, ranks)} micro-batches",
    ]
    if run.engine is not None:
        lines.append(f"the engine's cache holds {plan.cached_texts} texts of that length")
    if work.environment_processes:
        lines.append(
            f"each engine has up to {work.environment_processes} environment processes, whose host memory is "
            "not planned"
        )
    lines += bounds_of(plan)
    if plan.fits:
        lines.append(f"it fits: each GPU of {run.capacity / GIB:g} GiB needs {plan.total / GIB:.2f} GiB")
    return lines


def bounds_of(plan: Plan) -> list[str]:
    """Return lines on the host memory of a node, and on the least seconds of a push and of a step."""
    run, each = plan.run, plan.gpus_per_node
    cluster = Cluster(plan.gpus, each)
    node = node_memory(run, plan.host, each)
    lines = [
        f"host memory of the first node ({counted(each, 'GPU')}): {node.training / GIB:.1f} GiB while training, "
        f"{node.loading / GIB:.1f} GiB to load the largest role, {node.exporting / GIB:.1f} GiB more for an export; "
        f"at most {node.peak / GIB:.1f} GiB at a time"
    ]
    learning = bounds.learning_seconds(run, cluster)
    parts = [
        f"learning {learning.least:.2g} s ({learning.arithmetic:.2g} of arithmetic, {learning.communication:.2g} sent)"
    ]
    if run.engine is not None and run.engine.share:
        push = bounds.push_seconds(run, plan.traffic, cluster)
        generation = bounds.generation_seconds(run, plan.cached_texts, cluster)
        parts = [f"a push {push:.2g} s", f"generation {generation:.2g} s", *parts]
    lines.append(
        f"no step of texts of the longest length is faster than: {', '.join(parts)}; with the peak of an H100 "
        f"({cluster.speeds})"
    )
    return lines


def _add_rows(result: Table, terms: Counter[str], order: tuple[str, ...] = ()) -> None:
    for term in order or terms:
        if terms[term]:
            result.add_row(term, f"{terms[term] / GIB:.2f}")
