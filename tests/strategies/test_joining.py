"""A run whose other processes do not join logs the address and the missing processes, and ends."""

import logging
from datetime import timedelta

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_rlhf.strategies import joining
from tests.distributed.launch import free_port


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_several_nodes_without_an_address_are_rejected_before_the_start(monkeypatch):
    with pytest.raises(ValueError, match="num_nodes is 2, but MASTER_ADDR and MASTER_PORT are not set, and neither"):
        joining.check_launch(LightningEnvironment(), 2)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    with pytest.raises(ValueError, match="but MASTER_PORT is not set"):
        joining.check_launch(LightningEnvironment(), 2)
    monkeypatch.setenv("MASTER_PORT", "29500")
    joining.check_launch(LightningEnvironment(), 2)


def test_single_node_or_launcher_needs_no_address():
    joining.check_launch(LightningEnvironment(), 1)
    joining.check_launch(TorchElasticEnvironment(), 2)


@pytest.mark.parametrize(("processes", "lines"), [(8, 0), (64, 1)])
def test_many_processes_for_the_cores_are_logged(processes, lines, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    monkeypatch.setattr("lightning_rlhf.launch_environment._cores", lambda: 2)
    joining.check_launch(LightningEnvironment(), 1, processes)
    assert [text[:65] for text in caplog.messages] == lines * [
        "trainer.devices starts 64 processes on a machine with 2 cores: ea"
    ]


@pytest.mark.slow
def test_missing_processes_end_the_wait_with_the_address_and_the_variables_to_set(monkeypatch, caplog):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(joining, "_NODES_SECONDS", 0.1)
    timeout = timedelta(seconds=2)
    where = (
        f"waiting at 127.0.0.1, port {port}, for all 2 processes of this run (2 nodes with 1 each): neither torchrun"
    )
    with (
        pytest.raises(RuntimeError) as end,
        joining.joining(LightningEnvironment(), 2, 1, timeout),
    ):
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=timeout
        )
    assert where in caplog.text
    assert "NODE_RANK from 0 to 1 (here 0)" in caplog.text
    assert str(end.value).startswith(where)
    assert "; not all joined within 2 s: " in str(end.value)


def test_joined_processes_print_nothing(caplog, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    with joining.joining(LightningEnvironment(), 2, 1, None):
        pass
    assert not caplog.text
