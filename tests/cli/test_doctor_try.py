"""``doctor --try`` runs kernels, an engine and PPO, and reports a failure as a fault in one line."""

import subprocess
import sys

import pytest
import torch

from lightning_rlhf.cli.commands import doctor, doctor_try
from lightning_rlhf.rollout import choose
from lightning_rlhf.rollout.transformers import TransformersEngine


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setattr(choose, "vllm_installed", lambda: False)


def test_everything_is_run_and_reported(without_vllm):
    rows = {name: (finding, fault) for name, finding, fault in doctor_try.try_out()}
    assert list(rows) == ["kernels in float32", "kernels in bfloat16", "PPO in 32-true", "PPO in bf16-mixed"]
    assert all(fault == "" for _, fault in rows.values())
    assert "attention and gradients on cpu within" in rows["kernels in float32"][0]
    assert rows["PPO in 32-true"][0].startswith("transformers' generate on cpu in float32; 2 syncs, the last in ")
    assert rows["PPO in bf16-mixed"][0].startswith("transformers' generate on cpu in bfloat16; ")
    assert all("weights updated" in rows[name][0] for name in ("PPO in 32-true", "PPO in bf16-mixed"))


def test_a_kernel_that_computes_something_else_is_a_fault(without_vllm, monkeypatch):
    attention = doctor_try.scaled_dot_product_attention
    wrong = {torch.float64: False, torch.float32: True, torch.bfloat16: False}
    monkeypatch.setattr(
        doctor_try,
        "scaled_dot_product_attention",
        lambda query, *rest, is_causal: attention(query, *rest, is_causal=is_causal and not wrong[query.dtype]),
    )
    monkeypatch.setattr(doctor_try, "steps", lambda *_: "not run")
    faults = [fault for _, _, fault in doctor_try.try_out()]
    assert faults[0].startswith("kernels in float32: ArithmeticError: attention on cpu differs by ")
    assert faults[1:] == ["", "", ""]


def test_an_engine_that_loses_weights_is_a_fault_and_the_rest_still_runs(without_vllm, monkeypatch):
    def forget(self, parameters, version):
        list(parameters)
        self._version = version

    monkeypatch.setattr(TransformersEngine, "update_weights", forget)
    found = list(doctor_try.try_out())
    assert [finding for _, finding, _ in found[2:]] == ["failed", "failed"]
    assert all("RunError: engine and actor have the same weights, but" in fault for *_, fault in found[2:])
    assert not any(fault for *_, fault in found[:2])


def test_the_option_adds_the_rows_and_their_faults(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")
    monkeypatch.setattr(doctor_try, "try_out", lambda: iter([("kernels", "failed", "kernels: no luck")]))
    assert doctor.run(["--directory", str(tmp_path), "--try"]) == 1
    assert capsys.readouterr().out.endswith("fault: kernels: no luck\n1 fault\n")
    assert "kernels: no luck" not in (doctor.run(["--directory", str(tmp_path)]), capsys.readouterr().out)[1]


@pytest.mark.slow
@pytest.mark.vllm
def test_with_vllm(tmp_path):
    command = [sys.executable, "-m", "lightning_rlhf", "doctor", "--try", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights updated") == 2
