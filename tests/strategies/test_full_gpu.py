"""CUDA's out of memory: one sentence with the settings to change, wherever in a run it arises."""

import pytest
import torch

from lightning_rlhf.cli.main import _cli_error
from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.models.checks import memory_error
from lightning_rlhf.modules.text_layout import tokens_for
from lightning_rlhf.strategies.activations import ActivationOffload
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.callbacks.conftest import Run

GIB = 1 << 30


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 24 GiB")


@pytest.mark.parametrize(
    "error",
    [
        RunError("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
        EngineDied("the engine process 7 died: OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB"),
    ],
    ids=["wake-up", "death"],
)
def test_engine_that_needs_too_much_memory_has_the_same_note(tmp_path, monkeypatch, error):
    made = Run(
        tmp_path, loop={"validate_at_ends": False}, trainer={"max_steps": 1, "strategy": RLHFSingleDeviceStrategy()}
    )

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(made.engine, "update_weights", fails)
    with pytest.raises(type(error)) as raised:
        made.fit()
    (note,) = raised.value.__notes__
    assert "lower gpu_memory_utilization of the engine" in note
    shown = str(_cli_error(raised.value, made.trainer, started=False)).splitlines()
    assert shown == [str(error), note]


@pytest.mark.parametrize("place", ["setup", "update", "sync"])
def test_error_has_a_note_with_the_settings_to_change(tmp_path, monkeypatch, place):
    made = Run(
        tmp_path, loop={"validate_at_ends": False}, trainer={"max_steps": 1, "strategy": RLHFSingleDeviceStrategy()}
    )
    if place == "setup":
        monkeypatch.setattr(type(made.module), "setup", full)
    elif place == "update":
        monkeypatch.setattr(type(made.module), "training_step", full)
    else:
        monkeypatch.setattr(made.engine, "update_weights", full)
    with pytest.raises(torch.OutOfMemoryError) as error:
        made.fit()
    (note,) = error.value.__notes__
    for name in ("micro_batch_tokens", "activation_checkpointing", "gpu_memory_utilization", "lightning-rlhf plan"):
        assert name in note


def test_model_that_does_not_fit_names_the_gpu():
    with pytest.raises(torch.OutOfMemoryError) as error:
        full()
    message = str(memory_error(error.value, "models/large"))
    assert message.startswith("models/large needs more memory than the GPU has: CUDA out of memory. Tried to")
    assert "lightning-rlhf plan" in message


SIZES = [(8, 2048), (16, 2048), (24, 4096), (40, 8192), (48, 8192), (70, 16384), (80, 16384), (180, 16384)]


@pytest.mark.parametrize(("gib", "tokens"), SIZES)
def test_tokens_of_a_forward_pass_follow_the_memory_of_the_gpu(gib, tokens):
    assert tokens_for(gib * GIB) == tokens


def test_activations_are_copied_in_the_order_of_the_kernels(monkeypatch):
    """A stream of its own could keep the memory of many layers: nothing would make it wait for the others."""
    monkeypatch.setattr(torch.cuda, "Stream", full)
    offload = ActivationOffload(torch.device("cuda"), [])
    copies = []
    real = torch.empty

    def empty(*size, pin_memory=False, **options):
        copies.append(pin_memory)
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    tensor = torch.ones(64, 64)
    offload._device = torch.device("cpu")  # of the tensor, which stands for one on a GPU
    host, device = offload._store(tensor)
    assert copies == [True]
    assert torch.equal(offload._load((host, device)), tensor)
