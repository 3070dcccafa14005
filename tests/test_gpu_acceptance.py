"""Acceptance checks for GPUs in a small form on a CPU: every check runs, and a failure does not stop the others."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import acceptance_points, acceptance_trainer, gpu_acceptance
from lightning_rlhf.extras.commands import separate_process

ROOT = Path(__file__).resolve().parents[1]


def block(text):
    """Return the JSON lines of the report block, and the number of passed checks."""
    _, block = text.split("===== lightning-rlhf GPU acceptance: ")
    head, *lines = block.strip().splitlines()
    assert lines.pop() == "===== end ====="
    return [json.loads(line) for line in lines], head.removesuffix(" =====")


def test_every_check_has_its_code():
    for number, (name, _) in gpu_acceptance.POINTS.items():
        assert gpu_acceptance.point_of(number).__name__ == name


@pytest.mark.slow
def test_failed_check_is_reported_and_the_next_one_runs(monkeypatch, capsys):
    answers = {
        1: "raise SystemExit(3)",
        2: f"print('noise'); print({separate_process._RESULT + json.dumps({'ok': True, 'figure': 4})!r})",
        3: "import time; time.sleep(60)",
        4: "print('never reached')",
    }
    monkeypatch.setattr(gpu_acceptance, "POINTS", {n: (f"point{n}", 10 if n != 3 else 2) for n in answers})
    child = separate_process.Child
    monkeypatch.setattr(
        separate_process,
        "Child",
        lambda command, *options, **named: child([sys.executable, "-c", answers[int(command[-1])]], *options, **named),
    )
    began = time.monotonic()
    assert gpu_acceptance.main(["--points", "1", "2", "3", "--device", "cuda"]) == 1
    assert time.monotonic() - began < 30
    lines, passed = block(capsys.readouterr().out)
    assert passed == "1 of 3 points passed"
    assert [line["ok"] for line in lines] == [False, True, False]
    assert lines[0]["error"].startswith("exit code 3")
    assert lines[1]["figure"] == 4
    assert lines[2]["error"] == "killed after 2 s; no output"
    assert gpu_acceptance.main(["--points", "4", "--seconds", "1"]) == 1
    lines, _ = block(capsys.readouterr().out)
    assert lines[0]["error"] == "not run: the time for all points is over"


def test_error_in_a_check_is_its_result(monkeypatch, capsys):
    def broken(device, folder):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(acceptance_points, "machine", broken)
    assert gpu_acceptance.run_here(1, "cpu") == 0
    last = capsys.readouterr().out.splitlines()[-1].removeprefix(separate_process._RESULT)
    assert json.loads(last) == {"ok": False, "error": "RuntimeError: CUDA error: device-side assert triggered"}


@pytest.mark.parametrize("number", [2, 4, 5, 7, 8, 13, 14, 15, 18, 19])
def test_quick_checks_pass_on_a_cpu(number, tmp_path):
    result = gpu_acceptance.point_of(number)("cpu", tmp_path)
    assert result["ok"], result


@pytest.mark.slow
@pytest.mark.parametrize("number", [16, 17])
def test_multi_process_checks_pass_on_a_cpu(number, tmp_path):
    result = gpu_acceptance.point_of(number)("cpu", tmp_path)
    assert result["ok"], result


def test_wrong_gradient_of_packed_attention_is_detected(monkeypatch, tmp_path):
    calls, right = [], acceptance_trainer.packed_attention

    def halves_a_gradient(module, query, key, value, mask, **options):
        calls.append(None)
        if len(calls) % 2 == 0:  # every second call is the device's
            value = value + (value.detach() - value) / 2
        return right(module, query, key, value, mask, **options)

    monkeypatch.setattr(acceptance_trainer, "packed_attention", halves_a_gradient)
    result = acceptance_trainer.attention("cpu", tmp_path)
    assert not result["ok"]
    assert result["largest_relative_difference"] > 0.3


def test_error_of_one_run_is_reported_and_other_runs_count(monkeypatch, tmp_path):
    one_step = acceptance_points.one_step

    def broken(name, device, folder, precision, checkpointing):
        if precision == "bf16-mixed":
            raise TypeError("varlen_attn() got an unexpected keyword argument 'scale'")
        return one_step(name, device, folder, precision, checkpointing)

    monkeypatch.setattr(acceptance_points, "one_step", broken)
    monkeypatch.setattr(acceptance_points, "RUNS", ("sft", "dpo"))
    result = acceptance_points.steps("cpu", tmp_path)
    assert not result["ok"]
    assert result["runs"] == 2
    error = "TypeError: varlen_attn() got an unexpected keyword argument 'scale'"
    assert result["wrong"] == [f"{name}, bf16-mixed, checkpointing True: {error}" for name in ("sft", "dpo")]


@pytest.mark.slow
def test_different_bytes_in_the_receiving_process_are_detected(monkeypatch, tmp_path):
    monkeypatch.setattr(acceptance_trainer, "_sum_of_bytes", lambda tensor: -1)
    assert not acceptance_trainer.ipc("cpu", tmp_path)["ok"]


def test_stale_weights_in_the_second_update_are_detected(monkeypatch, tmp_path):
    module_of = acceptance_points.module_of

    def frozen(name, **options):
        module = module_of(name, **options)
        module.optimizer_of = lambda role: (lambda parameters: acceptance_points.torch.optim.SGD(parameters, 0.0), None)
        return module

    monkeypatch.setattr(acceptance_points, "module_of", frozen)
    assert not acceptance_points.two_updates("cpu", tmp_path)["ok"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_checks_pass_on_a_cpu_in_small_form():
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--device", "cpu", "--seconds", "1100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines, passed = block(done.stdout)
    assert passed == "19 of 19 points passed", done.stdout + done.stderr
    assert done.returncode == 0
    assert [line["point"] for line in lines] == list(range(1, 19))
