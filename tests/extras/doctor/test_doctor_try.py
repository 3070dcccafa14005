"""``doctor --try`` runs kernels, an engine and PPO, and reports a failure as a fault in one line."""

import subprocess
import sys

import pytest
import torch

from lightning_rlhf.extras.commands import separate_process
from lightning_rlhf.extras.doctor import command as doctor
from lightning_rlhf.extras.doctor import trial as doctor_try
from lightning_rlhf.rollout import choose
from lightning_rlhf.rollout.transformers import TransformersEngine


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setattr(choose, "vllm_installed", lambda: False)


def test_all_checks_run_and_are_reported(without_vllm):
    rows = {name: (finding, fault) for name, finding, fault in map(doctor_try.run_check, doctor_try.checks())}
    assert list(rows) == ["kernels in float32", "kernels in bfloat16", "PPO in 32-true", "PPO in bf16-mixed"]
    assert all(fault == "" for _, fault in rows.values())
    assert "attention and gradients on cpu within" in rows["kernels in float32"][0]
    assert rows["PPO in 32-true"][0].startswith("transformers' generate on cpu in float32; 2 syncs, the last in ")
    assert rows["PPO in bf16-mixed"][0].startswith("transformers' generate on cpu in bfloat16; ")
    assert all("weights updated" in rows[name][0] for name in ("PPO in 32-true", "PPO in bf16-mixed"))


def test_kernel_with_wrong_results_is_a_fault(monkeypatch):
    attention = doctor_try.scaled_dot_product_attention
    wrong = {torch.float64: False, torch.float32: True, torch.bfloat16: False}
    monkeypatch.setattr(
        doctor_try,
        "scaled_dot_product_attention",
        lambda query, *rest, is_causal: attention(query, *rest, is_causal=is_causal and not wrong[query.dtype]),
    )
    faults = [doctor_try.run_check(f"kernels in {dtype}")[2] for dtype in ("float32", "bfloat16")]
    assert faults[0].startswith("kernels in float32: ArithmeticError: attention on cpu differs by ")
    assert faults[1] == ""


def test_engine_that_loses_weights_is_a_fault(without_vllm, monkeypatch):
    def forget(self, parameters, version):
        list(parameters)
        self._version = version

    monkeypatch.setattr(TransformersEngine, "update_weights", forget)
    for name in ("PPO in 32-true", "PPO in bf16-mixed"):
        _, finding, fault = doctor_try.run_check(name)
        assert finding == "failed"
        assert "RunError: the engine does not hold the actor's weights: after" in fault


@pytest.mark.parametrize("error", [TypeError, AssertionError, KeyError, AttributeError, RuntimeError])
def test_any_error_of_a_check_is_a_fault(monkeypatch, error):
    def broken(*_):
        raise error("unexpected keyword argument\n'enable_gqa'")

    monkeypatch.setattr(doctor_try, "kernels", broken)
    name, finding, fault = doctor_try.run_check("kernels in float32")
    assert (name, finding) == ("kernels in float32", "failed")
    assert fault.startswith(f"kernels in float32: {error.__name__}: ")
    assert "enable_gqa" in fault
    assert "\n" not in fault


def test_crash_or_hang_of_a_check_does_not_stop_the_others(monkeypatch):
    answers = {
        "kernels in float32": (["kernels in float32", "fine", ""], "", 1.0),
        "kernels in bfloat16": (None, "exit code -11; Segmentation fault", 2.0),
        "PPO in 32-true": (None, "killed after 300 s; no output", 300.0),
        "PPO in bf16-mixed": (["PPO in bf16-mixed", "failed", "PPO in bf16-mixed: KeyError: 1"], "", 1.0),
    }
    limits = {}

    def run_apart(command, seconds):
        assert command[:3] == [sys.executable, "-m", "lightning_rlhf.extras.doctor.trial"]
        limits[command[3]] = seconds
        return answers[command[3]]

    monkeypatch.setattr(doctor_try, "run_apart", run_apart)
    assert list(doctor_try.try_out()) == [
        ("kernels in float32", "fine", ""),
        ("kernels in bfloat16", "failed", "kernels in bfloat16: exit code -11; Segmentation fault"),
        ("PPO in 32-true", "failed", "PPO in 32-true: killed after 300 s; no output"),
        ("PPO in bf16-mixed", "failed", "PPO in bf16-mixed: KeyError: 1"),
    ]
    assert limits["kernels in float32"] == 120
    assert limits["PPO in 32-true"] == 300


@pytest.mark.slow
def test_check_runs_in_a_separate_process():
    command = [sys.executable, "-m", doctor_try.__name__, "kernels in float32"]
    (name, finding, fault), failure, _ = separate_process.run_apart(command, 120)
    assert (name, fault, failure) == ("kernels in float32", "", "")
    assert "within" in finding


def test_findings_are_printed_immediately(monkeypatch, capsys, tmp_path):
    printed = []

    def try_out():
        for name in ("first", "second"):
            yield name, f"finding of {name}", ""
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    monkeypatch.setattr(doctor_try, "try_out", try_out)
    doctor.run(["--directory", str(tmp_path), "--try"])
    assert "RAM" in printed[0]
    assert printed[0].endswith("try: first: finding of first\n")
    assert printed[1] == "try: second: finding of second\n"


def test_try_option_adds_rows_and_their_faults(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    monkeypatch.setattr(doctor_try, "try_out", lambda: iter([("kernels", "failed", "kernels: no luck")]))
    assert doctor.run(["--directory", str(tmp_path), "--try"]) == 1
    assert capsys.readouterr().out.endswith("fault: kernels: no luck\n1 fault\n")
    assert "kernels: no luck" not in (doctor.run(["--directory", str(tmp_path)]), capsys.readouterr().out)[1]


@pytest.mark.slow
@pytest.mark.vllm
def test_checks_pass_with_vllm(tmp_path):
    command = [sys.executable, "-m", "lightning_rlhf", "doctor", "--try", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights updated") == 2
