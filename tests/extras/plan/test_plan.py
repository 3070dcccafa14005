"""``lightning-rlhf plan``: reads the configuration of a run without building its objects."""

import copy
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_rlhf import __main__
from lightning_rlhf.extras.plan import command
from lightning_rlhf.extras.plan.plan import plan
from lightning_rlhf.extras.plan.setup import Zero
from lightning_rlhf.models.loading import FromConfig
from tests.cli.conftest import LLAMA

SERVER = "lightning_rlhf.extras.servers.engine.VLLMServerEngine"
VLLM = "lightning_rlhf.rollout.vllm.engine.VLLMEngine"
SHARED = "lightning_rlhf.rollout.shared.SharedEngine"
FSDP = "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy"
DEEPSPEED = "lightning_rlhf.strategies.deepspeed.strategy.RLHFDeepSpeedStrategy"


@pytest.fixture
def planned(config, tmp_path, capsys, monkeypatch):
    """Run ``plan`` with a configuration and return its exit code, its output, and the plan."""
    runs = []
    monkeypatch.setattr(command, "plan", lambda run, gpus: (runs.append(run), plan(run, gpus))[1])

    def planned(*arguments, inputs=config):
        runs.clear()
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump(inputs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what Python does outside of tests
            try:
                code = command.run(["--config", str(path), *arguments])
            except SystemExit as end:
                code = end.code
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=shown.err, run=runs[-1] if runs else None)

    return planned


def test_run_that_fits_prints_a_table_with_code_0(planned):
    result = planned("--gpus", "1", "--gpu-memory-gib", "24")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "rlhf_single on 1 GPU of 24 GiB" in lines[0]
    rows = [line.strip("│ ").split("│")[0].strip() for line in lines]
    for term in ("parameters", "gradients", "optimizer state", "activations", "engine weights"):
        assert term in rows
    shown = " ".join(result.out.split())
    assert "a step: 4 texts of at most 20 tokens; each of 1 ranks" in shown
    assert "a mini-batch of 4 into 1 micro-batches" in shown
    assert "host memory of the first node (1 GPU): " in shown
    assert "with the peak of an H100 (989 TFLOP/s, memory 3.35 TB/s, host 64 GB/s" in shown


def test_node_has_the_memory_of_its_gpus(planned):
    def node(*options):
        shown = " ".join(planned("--gpus", "4", "--gpu-memory-gib", "24", *options).out.split())
        return re.search(r"host memory of the first node \((\d GPUs?)\)", shown)[1]

    assert [node(), node("--nodes", "2"), node("--nodes", "4")] == ["4 GPUs", "2 GPUs", "1 GPU"]


def test_turns_and_processes_of_an_environment_are_counted(planned, config):
    arguments = config["trainer"]["callbacks"][0]["init_args"]
    environment = {"factory": "tests.environments.worlds:Echo", "max_turns": 3, "concurrency": 5}
    arguments["environment"] = environment
    shown = " ".join(planned("--gpus", "1", "--gpu-memory-gib", "24", inputs=config).out.split())
    assert "a step: 4 conversations of up to 3 turns, of at most 20 tokens; each of 1 ranks" in shown
    assert "each engine has up to 5 environment processes, whose host memory is not planned" in shown
    environment["timeout_s"] = None
    shown = planned("--gpus", "1", "--gpu-memory-gib", "24", inputs=config).out
    assert "3 turns" in shown
    assert "processes" not in shown


def test_run_that_does_not_fit_prints_one_line_with_code_2(planned):
    result = planned("--gpus", "2", "--gpu-memory-gib", "1")
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("lightning-rlhf: does not fit on 2 GPUs of 1 GiB: each would need 2.0 GiB, the largest part")
    assert line.endswith("; with rlhf_ddp, it fits on no number of such GPUs")
    assert "rlhf_ddp on 2 GPUs" in result.out


def test_nothing_is_loaded_and_no_trainer_or_strategy_is_built(planned, config, monkeypatch):
    def made(*_, **__):
        raise AssertionError("made")

    for position in ("lightning_rlhf.cli.main.RLHFCLI.instantiate_trainer", f"{FSDP}.__init__", f"{VLLM}.start"):
        monkeypatch.setattr(position, made)
    for name in ("causal", "scalar"):
        monkeypatch.setattr(FromConfig, name, made)
    config["trainer"]["strategy"] = "rlhf_fsdp"
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = {"class_path": VLLM}
    assert planned("--gpus", "2").code == 0


def test_planned_settings_equal_those_of_the_run(planned, config):
    config["model"]["init_args"] |= {"kl_reward": {"coef": 0.1}, "update_epochs": 3, "micro_batch_tokens": 40}
    config["trainer"] |= {"precision": "bf16-mixed", "devices": 4}
    config["trainer"]["callbacks"][0]["init_args"]["group_size"] = 2
    run = planned("--gpus", "4", "--trainer.strategy", "rlhf_deepspeed_stage_3_offload").run
    assert [(role.name, role.trained, role.dtype) for role in run.roles] == [
        ("actor", True, "float32"), ("critic", True, "float32"), ("ref", False, "bfloat16"),
    ]  # fmt: skip
    actor = FromConfig(LLAMA).causal()
    assert run.roles[0].model.elements == sum(parameter.numel() for parameter in actor.parameters())
    assert (run.strategy.stage, run.strategy.offload_params) == (3, True)
    work = run.work
    assert (work.responses, work.minibatch_size, work.update_epochs) == (8, 4, 3)
    assert (work.longest, work.micro_batch_tokens, work.evaluates_old, work.mixed) == (20, 40, True, True)
    assert run.engine.dtype == "bfloat16"
    assert planned("--gpus", "4", "--trainer.precision", "32-true").run.engine.dtype == "float32"


def test_adapters_are_read_and_their_actor_serves_as_reference(planned, config):
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    config["model"]["init_args"] |= {"kl_reward": {"coef": 0.1}, "critic": config["model"]["init_args"]["actor"]}
    actor = copy.deepcopy(config["model"]["init_args"]["actor"])
    actor["init_args"]["lora"] = {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}
    config["model"]["init_args"]["actor"] = actor
    roles = {role.name: role for role in planned("--gpus", "2").run.roles}
    assert roles.keys() == {"actor", "critic"}
    assert (roles["actor"].lora_rank, roles["actor"].lora_targets) == (4, ("q_proj",))
    assert (roles["actor"].adapters, roles["critic"].adapters) == (4 * (32 + 32), 0)
    assert roles["actor"].is_reference_too
    assert not roles["critic"].is_reference_too


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("strategy", "read"),
    [
        ("auto", {"kind": "ddp"}),
        ("fsdp", {"kind": "fsdp"}),
        ("deepspeed_stage_2", {"kind": "zero", "stage": 2}),
        (
            {
                "class_path": FSDP,
                "init_args": {
                    "tensor_parallel_size": 1,
                    "sequence_parallel_size": 2,
                    "activation_checkpointing": True,
                    "cpu_offload": True,
                    "reduce_every_micro_batch": True,
                },
            },
            {"kind": "fsdp", "splitting": 2, "checkpointing": True, "reduce_every": True, "offload_params": True},
        ),
        (
            {"class_path": DEEPSPEED, "init_args": {"stage": 3, "offload_frozen": True}},
            {"kind": "zero", "stage": 3, "offload_frozen": True, "offload_params": False},
        ),
        ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, {"kind": "ddp"}),
    ],
)
def test_strategy_is_read_by_name_or_class(planned, config, strategy, read):
    config["trainer"]["strategy"] = strategy
    for source in config["model"]["init_args"].values():
        if isinstance(source, dict) and "architecture" in source.get("init_args", {}):
            source["init_args"]["architecture"] = {**LLAMA, "num_attention_heads": 2}  # for sequence_parallel_size
    result = planned("--gpus", "2")
    assert result.code == 0, result.err
    assert {name: getattr(result.run.strategy, name) for name in read} == read


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "read"),
    [
        ("auto", (0.4, 1, "float32")),
        (
            {"class_path": VLLM, "init_args": {"gpu_memory_utilization": 0.2, "arguments": {"dtype": "bfloat16"}}},
            (0.2, 1, "bfloat16"),
        ),
        (
            {
                "class_path": SHARED,
                "init_args": {"ranks": 2, "engine": {"class_path": VLLM, "init_args": {"tensor_parallel_size": 2}}},
            },
            (0.4, 2, "float32"),
        ),
        ({"class_path": SERVER, "init_args": {"urls": "http://127.0.0.1:8000"}}, None),
    ],
)
def test_engine_is_read_without_building_it(planned, config, engine, read):
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = engine
    result = planned("--gpus", "2").run.engine
    assert (result and (result.share, result.tensor_parallel_size, result.dtype)) == read


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("module", "data", "role", "longest"),
    [
        ("SFTModule", "ConversationDataModule", "actor", 16),
        ("RewardModule", "PreferenceDataModule", "reward_model", 32),
        ("DPOModule", "PreferenceDataModule", "actor", 32),
        ("KTOModule", "PreferenceDataModule", "actor", 16),
    ],
)
def test_runs_without_rollouts_are_planned(planned, config, module, data, role, longest):
    model = {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": LLAMA}}
    config["model"] = {"class_path": f"lightning_rlhf.{module}", "init_args": {role: model}}
    config["data"]["class_path"] = f"lightning_rlhf.{data}"
    config["trainer"]["callbacks"] = []
    result = planned("--gpus", "2")
    assert result.code == 0, result.err
    has_ref = module in ("DPOModule", "KTOModule")
    assert [role.name for role in result.run.roles] == [role, *["ref"] * has_ref]
    work = result.run.work
    assert (work.longest, work.row_tokens, work.evaluates_old, result.run.engine) == (16, longest, False, None)
    assert work.evaluates_mismatched == (module == "KTOModule")
    assert ("pairs of texts of at most 16 tokens" in " ".join(result.out.split())) == (longest == 32)


def test_actor_with_adapters_serves_as_reference_of_dpo(planned, config):
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    lora = {"rank": 4, "alpha": 8, "target_modules": ["v_proj"]}
    model = {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": LLAMA, "lora": lora}}
    config["model"] = {"class_path": "lightning_rlhf.DPOModule", "init_args": {"actor": model}}
    config["data"]["class_path"] = "lightning_rlhf.PreferenceDataModule"
    config["trainer"]["callbacks"] = []
    (actor,) = planned("--gpus", "2").run.roles
    assert (actor.is_reference_too, actor.adapters) == (True, 4 * (32 + 32))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("arguments", "zero", "read"),
    [
        ({"stage": 2}, {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": True}),
        (
            {"stage": 2, "offload_optimizer": True},
            {"offload_optimizer": {"device": "none"}},
            {"offload_optimizer": False},
        ),
        ({"stage": 3}, {"offload_param": {"device": "cpu"}}, {"offload_params": True, "offload_frozen": False}),
        ({"stage": 3, "offload_params": True}, {}, {"offload_params": True, "offload_frozen": True}),
        ({"stage": 3}, {"stage3_param_persistence_threshold": 0}, {"zero": Zero(persistent=0)}),
        ({"stage": 3}, {"stage3_max_live_parameters": 1e8, "reduce_bucket_size": 5}, {"zero": Zero(5, 10**8)}),
    ],
)
def test_deepspeed_settings_of_a_strategy_are_read(planned, config, arguments, zero, read):
    options = {**arguments, "config": {"zero_optimization": zero}}
    config["trainer"]["strategy"] = {"class_path": DEEPSPEED, "init_args": options}
    result = planned("--gpus", "2")
    assert result.code == 0, result.err
    assert {name: getattr(result.run.strategy, name) for name in read} == read


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 2}, "config must not contain zero_optimization.stage: set the argument stage"),
        ({"offload_optimizer": {"device": "nvme"}}, "plan supports offload_optimizer to cpu or none, got 'nvme'"),
        ({"zero_hpz_partition_size": 8}, "plan does not support zero_optimization.zero_hpz_partition_size"),
    ],
)
def test_unsupported_deepspeed_option_is_reported(planned, config, zero, message):
    options = {"stage": 3, "config": {"zero_optimization": zero}}
    config["trainer"]["strategy"] = {"class_path": DEEPSPEED, "init_args": options}
    result = planned("--gpus", "2")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"lightning-rlhf: {message}")


def test_gpus_are_those_of_the_trainer_by_default(planned):
    given = planned("--gpus", "4", "--nodes", "2")
    assert given.code == 0
    assert planned("--trainer.devices", "2", "--trainer.num_nodes", "2").out == given.out


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set the number of GPUs to plan for with --gpus, for example --gpus 8"),
        (
            ["--gpus", "8"],
            "a mini-batch of 4 texts leaves some of 8 ranks without a text: make it larger, or use",
        ),
        (["--gpus", "3", "--nodes", "2"], "3 GPUs cannot be divided equally over 2 nodes; use a multiple of 2"),
        (["--gpus", "2", "--trainer.strategy", "rlhf_fdsp"], "plan supports rlhf_single, rlhf_ddp, rlhf_fsdp"),
        (
            ["--gpus", "2", "--model.init_args.minibatch_sise", "3"],
            "model (PPOModule): unknown option 'minibatch_sise'",
        ),
        (["--gpus", "0"], "--gpus must be a whole number of at least 1, got '0'"),
    ],
)
def test_unplannable_runs_give_one_line_and_code_2(planned, arguments, message):
    result = planned(*arguments)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {message}")
    assert result.out == ""


def test_help_is_short_and_lists_the_options_of_plan(planned):
    result = planned("--help")
    assert (result.code, result.err) == (0, "")
    assert len(result.out.splitlines()) < 20
    for option in ("--gpus N", "--gpu-memory-gib GIB", "(default: 80)", "--nodes N", "lightning-rlhf fit --help"):
        assert option in result.out


def test_gpus_are_in_nodes_of_eight_unless_their_number_is_given(planned, config):
    config["trainer"]["strategy"] = "rlhf_fsdp"
    config["model"]["init_args"]["minibatch_size"] = 16
    config["data"]["init_args"]["batch_size"] = 8
    assumed, two, one = (planned("--gpus", "16", *rest).out for rest in ((), ("--nodes", "2"), ("--nodes", "1")))
    assert "gradients summed, replicas" in assumed == two
    assert "gradients summed, replicas" not in one


def test_groups_of_gpus_do_not_span_nodes(planned, config):
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = {
        "class_path": VLLM, "init_args": {"tensor_parallel_size": 2},
    }  # fmt: skip
    result = planned("--gpus", "4", "--nodes", "4")
    message = "the engine's tensor_parallel_size 2 does not divide the 1 GPUs of a node, so groups would span nodes"
    assert (result.code, result.err) == (2, f"lightning-rlhf: {message}\n")
    assert planned("--gpus", "4", "--nodes", "2").code == 0


def test_missing_model_gives_a_one_line_error(planned, config):
    config["model"]["init_args"]["actor"] = "runs/none/export"
    result = planned("--gpus", "2")
    assert result.code == 2
    assert result.err.startswith("lightning-rlhf: no model at 'runs/none/export'")


def test_documented_command_works(config, tmp_path, monkeypatch, capsys):
    """docs/scaling.md: lightning-rlhf plan --config x.yaml --gpus 64."""
    config["model"]["init_args"]["minibatch_size"] = config["data"]["init_args"]["batch_size"] = 64
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["lightning-rlhf", "plan", "--config", "x.yaml", "--gpus", "64"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert __main__.main() == 0
    assert "rlhf_ddp on 64 GPUs of 80 GiB" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("background", "counted"), [(True, True), (False, False)])
def test_memory_of_the_checkpoint_copy_is_counted_if_there_is_one(planned, config, background, counted):
    checkpoint = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"background": background}}
    config["trainer"]["callbacks"].append(checkpoint)
    result = planned("--gpus", "1", inputs=config)
    assert (result.code, result.err) == (0, "")
    assert ("host: copy that a checkpoint" in " ".join(result.out.split())) == counted
