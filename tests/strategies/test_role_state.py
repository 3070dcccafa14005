"""Weights and optimizer of a role are bitwise equal after saving and loading, under every strategy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_rlhf.strategies.checkpoints import manifest, role_files
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, StoredRole, write_role
from lightning_rlhf.strategies.checkpoints.role_state import check_optimizer, native_load, native_state, owned_tensors
from tests.distributed.launch import run_ranks
from tests.strategies.role_ranks import (
    OddRole,
    adamw,
    back_alone,
    batches,
    difference,
    groups,
    largest_error,
    loss_of,
    momentum,
    save,
    sgd,
    stored,
    trained_alone,
)

ELEMENTWISE = ("AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "Adadelta", "ASGD", "Rprop")


def stepped(optimizer_of, steps=2, seed=0):
    role = OddRole(seed)
    optimizer = optimizer_of(role)
    for ids in batches(steps):
        loss_of(role, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return role, optimizer


def test_tied_weights_are_saved_once_with_buffers_and_without_frozen_parameters():
    names = {"embed.weight", "up.weight", "up.bias", "down.weight", "down.bias", "gain", "offset"}
    assert set(owned_tensors(OddRole())) == names


def test_wrapper_names_are_omitted():
    role = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
    assert set(owned_tensors(role)) == {"weight", "bias"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_resumes_bitwise(name, tmp_path):
    def make(role):
        return getattr(torch.optim, name)([p for p in role.parameters() if p.requires_grad], lr=1e-2)

    role, optimizer = stepped(make)
    version = save(native_state(role, optimizer), tmp_path / "last.ckpt")
    other, other_optimizer = stepped(make, steps=1, seed=1)
    native_load(other, other_optimizer, version / "actor")
    for one, its_optimizer in ((role, optimizer), (other, other_optimizer)):
        loss_of(one, batches(3)[-1]).backward()
        its_optimizer.step()
    for ours, theirs in zip(role.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer_of", [adamw, sgd, momentum])
def test_read_and_rewritten_state_is_equal(optimizer_of, tmp_path):
    role, optimizer = stepped(optimizer_of)
    save(native_state(role, optimizer), tmp_path / "last.ckpt")
    assert back_alone(optimizer_of.__name__, tmp_path / "last.ckpt") is None


def test_optimizer_without_steps_has_no_state_and_gets_none(tmp_path):
    role = OddRole()
    state = native_state(role, adamw(role))
    assert not [key for key in state.tensors if key.startswith("optim.")]
    save(state, tmp_path / "last.ckpt")
    other = OddRole(seed=1)
    optimizer = adamw(other)
    native_load(other, optimizer, manifest.verified(tmp_path / "last.ckpt") / "actor")
    assert not optimizer.state
    assert torch.equal(other.gain, role.gain)


def test_settings_are_those_of_the_checkpoint_except_for_implementation_options(tmp_path):
    role, optimizer = stepped(adamw)
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.param_groups[1]["betas"] = (0.5, 0.75)
    version = save(native_state(role, optimizer), tmp_path / "last.ckpt")
    other = OddRole(seed=1)
    first, second = groups(other)
    fresh = torch.optim.AdamW([{"params": first}, {"params": second}], lr=1.0, foreach=True)
    native_load(other, fresh, version / "actor")
    assert [group["lr"] for group in fresh.param_groups] == [1e-2, 0.25]
    assert fresh.param_groups[1]["betas"] == (0.5, 0.75)
    assert fresh.param_groups[1]["weight_decay"] == 0.1
    assert [group["foreach"] for group in fresh.param_groups] == [True, True]


def test_bfloat16_state_is_restored_and_float32_state_is_rounded_to_it(tmp_path):
    role, optimizer = stepped(adamw)
    version = save(native_state(role, optimizer), tmp_path / "float32.ckpt")
    half = OddRole(seed=1).bfloat16()
    half_optimizer = adamw(half)
    native_load(half, half_optimizer, version / "actor")
    assert torch.equal(half.up.weight, role.up.weight.bfloat16())
    rounded = optimizer.state[role.up.weight]["exp_avg_sq"].bfloat16()
    assert torch.equal(half_optimizer.state[half.up.weight]["exp_avg_sq"], rounded)
    assert half_optimizer.state[half.up.weight]["step"] == 2.0
    save(native_state(half, half_optimizer), tmp_path / "half.ckpt")
    other = OddRole(seed=2).bfloat16()
    other_optimizer = adamw(other)
    native_load(other, other_optimizer, manifest.verified(tmp_path / "half.ckpt") / "actor")
    save(native_state(other, other_optimizer), tmp_path / "again.ckpt")
    assert difference(stored(tmp_path / "half.ckpt"), stored(tmp_path / "again.ckpt")) is None


def test_rank_writes_several_files_so_that_no_tensor_is_gathered(tmp_path, monkeypatch):
    monkeypatch.setattr(role_files, "_FILE_BYTES", 200)
    role, optimizer = stepped(adamw)
    version = save(native_state(role, optimizer), tmp_path / "last.ckpt")
    files = list((version / "actor").glob("*.safetensors"))
    assert len(files) > 4
    assert len({file.name.rpartition("-of-")[2] for file in files}) == 1
    assert back_alone("adamw", tmp_path / "last.ckpt") is None


def test_files_are_safetensors_and_json_only(tmp_path):
    version = save(native_state(*stepped(adamw)), tmp_path / "last.ckpt")
    assert {path.suffix for path in (version / "actor").iterdir()} == {".safetensors", ".json"}


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(native_state(*stepped(adamw)), tmp_path_factory.mktemp("checkpoint") / "last.ckpt") / "actor"


def refused(module, optimizer, folder):
    before = {name: tensor.clone() for name, tensor in owned_tensors(module).items()}
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        native_load(module, optimizer, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in owned_tensors(module).items())
    return str(raised.value)


def test_weights_of_another_model_are_rejected_by_name(checkpoint):
    untied = OddRole()
    untied.head.weight = nn.Parameter(torch.zeros(19, 5))
    assert "lacks 1 weights, the first is head.weight; resume with the model that wrote it" in refused(
        untied, None, checkpoint
    )
    fewer = OddRole()
    del fewer.gain
    assert "has, unlike this run's model, 1 weights, the first is gain" in refused(fewer, None, checkpoint)
    wider = OddRole()
    wider.up = nn.Linear(5, 8)
    assert "the actor's up.weight has shape (14, 5) in the checkpoint, but (8, 5) in this run's model" in refused(
        wider, None, checkpoint
    )


def test_another_optimizer_is_rejected_unless_it_keeps_the_same_state(checkpoint):
    role = OddRole()
    message = refused(role, sgd(role), checkpoint)
    assert message == (
        "the actor was optimized by AdamW when the checkpoint was written, and now by SGD: configure AdamW, or start a "
        "new run from the exported model"
    )
    first, second = groups(role)
    native_load(role, torch.optim.Adam([{"params": first}, {"params": second}]), checkpoint)


def test_different_groups_are_rejected_and_finer_ones_are_accepted(checkpoint):
    role = OddRole()
    everything = [parameter for group in groups(role) for parameter in group]
    assert "the optimizer groups of the actor differ" in refused(role, torch.optim.AdamW(everything), checkpoint)
    first, second = groups(role)
    finer = torch.optim.AdamW([{"params": first}, {"params": second[:1]}, {"params": second[1:]}])
    native_load(role, finer, checkpoint)
    assert [group["lr"] for group in finer.param_groups] == [1e-2, 3e-2, 3e-2]


def test_weights_without_an_optimizer_can_be_read_but_not_resumed(tmp_path):
    role = OddRole()
    folder = save(native_state(role, None), tmp_path / "last.ckpt") / "actor"
    other = OddRole(seed=1)
    assert "weights of the actor but no optimizer" in refused(other, adamw(other), folder)
    native_load(other, None, folder)
    assert torch.equal(other.up.weight, role.up.weight)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted_before_training(name):
    check_optimizer(lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1), torch.device("cpu"))


def test_optimizer_with_state_of_another_shape_is_rejected_by_name_before_training():
    with pytest.raises(ValueError, match=r"Adafactor keeps a tensor of shape \(64, 1\) as 'row_var' of a parameter"):
        check_optimizer(torch.optim.Adafactor, torch.device("cpu"), keeps_whole_weights=False)
    with pytest.raises(ValueError, match=r"as 'row_var' .* use rlhf_single or rlhf_ddp, or an optimizer whose state"):
        check_optimizer(torch.optim.Adafactor, torch.device("cpu"), keeps_matrices=False)
    check_optimizer(torch.optim.Adafactor, torch.device("cpu"))


def test_state_of_another_shape_is_restored_where_weights_are_whole(tmp_path):
    def steps(role, optimizer, count):
        for batch in batches(count):
            loss_of(role, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(role):
        return torch.optim.Adafactor([parameter for parameter in role.parameters() if parameter.requires_grad])

    role = OddRole()
    optimizer = made(role)
    steps(role, optimizer, 2)
    folder = save(native_state(role, optimizer), tmp_path / "last.ckpt") / "actor"
    again = OddRole(seed=1)
    restored = made(again)
    native_load(again, restored, folder)
    steps(role, optimizer, 1)
    steps(again, restored, 1)
    assert all(torch.equal(a, b) for a, b in zip(role.parameters(), again.parameters(), strict=True))


class Scaled(torch.Tensor):
    """A matrix in 8 bits, which consists of codes and a scale, like the optimizer states of torchao."""

    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values):
        scale = values.abs().max() / 127
        return cls((values / scale.clamp(min=1e-12)).round().to(torch.int8), scale)

    def values(self):
        return self.codes * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default), function
        return cls(args[0].codes.clone(), args[0].scale.clone())


class ScaledSGD(torch.optim.SGD):
    """SGD with momentum in 8 bits."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = 0.9 * state["momentum"].values() + parameter.grad if state else parameter.grad
                parameter -= group["lr"] * momentum
                state["momentum"] = Scaled.of(momentum)


def test_state_that_consists_of_tensors_resumes_bitwise(tmp_path):
    def make(role):
        return ScaledSGD([parameter for parameter in role.parameters() if parameter.requires_grad], lr=1e-2)

    role, optimizer = stepped(make)
    folder = save(native_state(role, optimizer), tmp_path / "last.ckpt") / "actor"
    assert {"optim.state.up.weight.momentum:codes", "optim.state.up.weight.momentum:scale"} <= {
        *StoredRole(folder).shapes
    }
    again = OddRole(seed=1)
    restored = make(again)
    native_load(again, restored, folder)
    assert restored.param_groups[0]["lr"] == 1e-2
    for batch in batches(2):
        for one, its_optimizer in ((role, optimizer), (again, restored)):
            loss_of(one, batch).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(role.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"ScaledSGD keeps a Scaled as 'momentum' of a parameter"):
        check_optimizer(
            lambda parameters: ScaledSGD(parameters, lr=1e-2), torch.device("cpu"), keeps_whole_weights=False
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_optimizers_of_torchao_resume_bitwise(name, tmp_path):
    kind = getattr(pytest.importorskip("torchao.optim"), name)

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
        return model, kind(model.parameters(), lr=1e-2)

    def steps(model, optimizer, inputs):
        for rows in inputs:
            model(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made(0)
    steps(model, optimizer, torch.randn(3, 8, 64))
    folder = save(native_state(model, optimizer), tmp_path / "last.ckpt") / "actor"
    again, restored = made(1)
    native_load(again, restored, folder)
    later = torch.randn(2, 8, 64)
    for each in ((model, optimizer), (again, restored)):
        steps(*each, later)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class ListedSGD(torch.optim.SGD):
    """An optimizer whose state has a list."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("steps", []).append(1)


def test_unsupported_state_is_also_rejected_when_it_is_saved():
    role = OddRole()
    optimizer = ListedSGD([parameter for parameter in role.parameters() if parameter.requires_grad], lr=0.1)
    loss_of(role, batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="ListedSGD keeps a list as 'steps'"):
        native_state(role, optimizer)


def test_full_disk_is_reported(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        write_role(tmp_path / "actor", RoleState({"model.a": torch.ones(2)}, None))


def test_list_of_tensors_is_read_once(checkpoint, monkeypatch):
    role, calls = StoredRole(checkpoint), []
    real = role_files.HuggingFaceStorageReader.read_metadata
    monkeypatch.setattr(
        role_files.HuggingFaceStorageReader, "read_metadata", lambda self: calls.append(1) or real(self)
    )
    for _ in range(3):
        role.read({"model.gain": torch.zeros(1)})
    assert calls == []


# -- on ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ddp_and_fsdp2_read_write_and_resume_with_sizes_that_do_not_divide(world, tmp_path):
    trained_alone("adamw", tmp_path)
    answers = run_ranks("tests.strategies.role_ranks:native_ranks", world, str(tmp_path))
    assert set(answers[0]) == {"ddp", "fsdp", *(["tp and fsdp"] if world == 4 else [])}
    for way, again in answers[0].items():
        assert again is None, f"{way}: {again}"
        assert largest_error(tmp_path / f"{way} on", tmp_path / "after") < 1e-6, way
        assert back_alone("adamw", tmp_path / f"{way} on") is None, way


@pytest.mark.slow
def test_all_ranks_raise_the_error_of_one_rank(tmp_path):
    answers = run_ranks("tests.strategies.role_ranks:disagreeing_ranks", 2, str(tmp_path))
    (damaged, elsewhere, failed), other = answers
    assert [damaged, elsewhere, failed] == other
    assert damaged.endswith(
        "is damaged: v000001/b does not have the size and SHA-256 in the manifest; resume from another one"
    )
    assert "shard-00002-x of the checkpoint" in elsewhere
    assert "was written by another process" in elsewhere
    assert "set default_root_dir to a folder on a file system shared by all nodes" in elsewhere
    assert failed == "only rank 1"
    assert Path(tmp_path, "last.ckpt", "v000001").is_dir()


@pytest.mark.slow
def test_rank_killed_during_a_save_leaves_the_previous_version(tmp_path):
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 ended"):
        run_ranks("tests.strategies.role_ranks:dying_ranks", 2, str(tmp_path))
    path = tmp_path / "last.ckpt"
    assert len(list(path.glob("v*"))) == 2
    version = manifest.verified(path)
    assert version.name == "v000001"
    role = OddRole(seed=2)
    native_load(role, adamw(role), version / "actor")
    assert torch.equal(role.up.weight, OddRole().up.weight)
    save(native_state(role, adamw(role)), path)
    assert len(list(path.glob("v*"))) == 1
