"""A role with difficult properties, and functions that ranks run on it for the tests of role states."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.role_files import StoredRole, write_role
from lightning_rlhf.strategies.checkpoints.role_state import native_load, native_state


class OddRole(nn.Module):
    """A model with sizes that ranks do not divide, a tied head, a frozen parameter and a saved buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(19, 5)
        self.up, self.down = nn.Linear(5, 14), nn.Linear(14, 5)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        with torch.no_grad():  # its source is known
            self.frozen.weight.copy_(torch.linspace(-0.5, 0.5, 25).view(5, 5))
        self.gain = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(5, 19, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.rand(3))

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = hidden + self.frozen(self.down(torch.relu(self.up(hidden)))) * self.gain
        return self.head(hidden)


def loss_of(role, ids):
    logits = role(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batches(count):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 19, (4, 6), generator=draw) for _ in range(count)]


def adamw(role):
    """Return AdamW with two groups of different settings."""
    first, second = groups(role)
    return torch.optim.AdamW([{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-2, "weight_decay": 0.1}])


def sgd(role):
    return torch.optim.SGD([p for p in role.parameters() if p.requires_grad], lr=0.1)


def momentum(role):
    return torch.optim.SGD([p for p in role.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def alone(optimizer):
    """Return the optimizer of torch that keeps the same state."""
    return "adamw" if optimizer == "cpu_adam" else optimizer


def groups(role):
    trained = [parameter for parameter in role.parameters() if parameter.requires_grad]
    return trained[:2], trained[2:]


def cpu_adam(role):
    """Return DeepSpeed's Adam for CPUs; in a single process, torch's AdamW keeps the same state."""
    first, second = groups(role)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-2, "weight_decay": 0.1}])


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "momentum": momentum, "cpu_adam": cpu_adam}


def save(state, path):
    version = manifest.begin(Path(path))
    write_role(version / "actor", state)
    manifest.publish(version)
    return version


def stored(path):
    """Return all tensors, unsharded, and the settings of a checkpoint."""
    role = StoredRole(manifest.verified(Path(path)) / "actor")
    tensors = {key: torch.zeros(shape, dtype=role.dtypes[key]) for key, shape in role.shapes.items()}
    role.read(tensors)
    return tensors, role.settings


def difference(ours, theirs):
    """Return the first tensor in which two checkpoints differ by a bit, or None if they are equal."""
    (tensors, settings), (others, other_settings) = ours, theirs
    if odd := sorted(tensors.keys() ^ others.keys()):
        return f"only one has {odd[0]}"
    for key, tensor in tensors.items():
        if tensor.dtype != others[key].dtype or not torch.equal(tensor, others[key]):
            return key
    return None if settings == other_settings else "settings"


def trained_alone(optimizer, path, steps=2):
    """Train a role in a single process and save it before and after the last step."""
    role = OddRole()
    optimizer = OPTIMIZERS[optimizer](role)
    inputs = batches(steps + 1)
    for ids in inputs[:-1]:
        loss_of(role, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(native_state(role, optimizer), f"{path}/before")
    loss_of(role, inputs[-1]).backward()
    optimizer.step()
    save(native_state(role, optimizer), f"{path}/after")


def back_alone(optimizer, path):
    """Read a checkpoint into a new role of a single process, write it again, and return the first difference."""
    role = OddRole(seed=1)
    optimizer = OPTIMIZERS[optimizer](role)
    native_load(role, optimizer, manifest.verified(Path(path)) / "actor")
    save(native_state(role, optimizer), f"{path}-back")
    return difference(stored(path), stored(f"{path}-back"))


def largest_error(path, reference):
    """Return the largest absolute error of weights and moments."""
    (ours, _), (theirs, _) = stored(path), stored(reference)
    return max((ours[key].double() - theirs[key].double()).abs().max().item() for key in ours)


# -- on ranks ---------------------------------------------------------------------------------------------------------


def native_ranks(folder):
    """Read, write, train one step and write again under DDP and FSDP2, with tensor parallelism on four ranks."""
    dist.init_process_group("gloo")
    world, answers = dist.get_world_size(), {}
    for way in ("ddp", "fsdp", *(("tp and fsdp",) if world == 4 else ())):
        role = OddRole(seed=1)
        called = _spread(role, way)
        optimizer = adamw(role)
        native_load(role, optimizer, manifest.verified(Path(folder, "before")) / "actor")
        save(native_state(role, optimizer), f"{folder}/{way} again")
        loss_of(called, batches(3)[-1]).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(called, batches(1)[0])  # leaves the root of FSDP2 whole
        save(native_state(role, optimizer), f"{folder}/{way} on")
        answers[way] = difference(stored(f"{folder}/before"), stored(f"{folder}/{way} again"))
    dist.barrier()
    dist.destroy_process_group()
    return answers


def _spread(role, way):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if way == "ddp":
        return nn.parallel.DistributedDataParallel(role)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(role, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    fully_shard(role.up, mesh=mesh)
    return fully_shard(role, mesh=mesh)


ZERO = {
    "1": ("adamw", {"stage": 1}, False),
    "1 bf16": ("adamw", {"stage": 1}, True),
    "1 sgd": ("sgd", {"stage": 1}, False),
    "2": ("adamw", {"stage": 2}, False),
    "2 bf16 momentum": ("momentum", {"stage": 2}, True),
    "2 offload": ("adamw", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
    "2 offload, DeepSpeed's Adam": ("cpu_adam", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
    "3": ("adamw", {"stage": 3, "stage3_param_persistence_threshold": 0}, False),
    "3 persistent": ("adamw", {"stage": 3}, False),
    "3 bf16": ("adamw", {"stage": 3, "stage3_param_persistence_threshold": 0}, True),
    "3 small groups": ("adamw", {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20}, False),
    "3 sgd": ("sgd", {"stage": 3, "stage3_param_persistence_threshold": 0}, False),
    "3 offload momentum": (
        "momentum", {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}, False
    ),
}  # fmt: skip


def zero_ranks(folder, names):
    """Read, write, compute a loss, train one step, write again and read only weights under each variant of ZeRO."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    from lightning_rlhf.strategies.deepspeed.state import zero_load, zero_state

    deepspeed.init_distributed("gloo")
    answers = {}
    for name in names:
        optimizer, options, bf16 = ZERO[name]
        engine = _engine(deepspeed, optimizer, options, bf16)
        before = f"{folder}/{alone(optimizer)}/before"
        zero_load(engine.module, engine.optimizer, manifest.verified(Path(before)) / "actor")
        save(zero_state(engine.module, engine.optimizer), f"{folder}/{name} again")
        again = difference(stored(before), stored(f"{folder}/{name} again"))
        loss = float(loss_of(engine, batches(1)[0]).detach())
        engine.backward(loss_of(engine, batches(3)[-1]))
        engine.step()
        save(zero_state(engine.module, engine.optimizer), f"{folder}/{name} on")
        engine.destroy()
        answers[name] = [again, loss]
    answers["weights only"] = _weights_only(deepspeed, folder, zero_load, zero_state)
    dist.barrier()
    dist.destroy_process_group()
    return answers


def _engine(deepspeed, optimizer, options, bf16):
    role = OddRole(seed=1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": options,
    }
    if bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        for parameter in role.parameters():
            parameter.data = parameter.data.bfloat16()
    if options["stage"] == 3:
        deepspeed.zero.Init(module=role, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(
        model=role, optimizer=OPTIMIZERS[optimizer](role), config=config, dist_init_required=False
    )
    return engine


def _weights_only(deepspeed, folder, zero_load, zero_state):
    """Check a role under stage 3 without an optimizer, as in validation."""
    role = OddRole(seed=1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=role, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=role, config=config, dist_init_required=False)
    zero_load(engine.module, None, manifest.verified(Path(folder, "adamw", "before")) / "actor")
    save(zero_state(engine.module, None), f"{folder}/weights only")
    loss = float(loss_of(engine, batches(1)[0]).detach())
    engine.destroy()
    tensors, settings = stored(f"{folder}/weights only")
    expected = {k: v for k, v in stored(f"{folder}/adamw/before")[0].items() if k.startswith("model.")}
    return [difference((tensors, settings), (expected, None)), loss]


def disagreeing_ranks(folder):
    """Return the errors on each rank if only one of them detects a fault."""
    from lightning_rlhf.strategies import ranks

    dist.init_process_group("gloo")
    path, output = Path(folder, "last.ckpt"), []

    def attempt(work):
        try:
            work()
        except (OSError, ValueError) as error:
            output.append(str(error))

    version = manifest.begin(path)
    if ranks.rank() == 0:
        for name in ("a", "b"):
            (version / name).write_bytes(b"whole")
    dist.barrier()
    manifest.publish(version)
    if ranks.rank() == 0:
        (version / "b").write_bytes(b"other")
    dist.barrier()
    attempt(lambda: manifest.verified(path))  # rank 1 looks at b
    second = manifest.begin(path)
    # as if rank 1 wrote to a different disk
    mine = second if ranks.rank() == 0 else Path(folder, "of another node", second.name)
    mine.mkdir(parents=True, exist_ok=True)
    (mine / f"shard-0000{ranks.rank() + 1}-x").touch()
    dist.barrier()
    attempt(lambda: manifest.publish(mine))

    def fail():
        if ranks.rank() == 1:
            raise ValueError("only rank 1")

    attempt(lambda: ranks.raise_on_all_ranks(fail))
    dist.destroy_process_group()
    return output


def dying_ranks(folder):
    """Save a checkpoint on all ranks, and kill rank 1 during a second save after it wrote its part."""
    import signal

    dist.init_process_group("gloo")
    role = OddRole()
    optimizer = adamw(role)
    save(native_state(role, optimizer), f"{folder}/last.ckpt")
    version = manifest.begin(Path(folder, "last.ckpt"))
    write_role(version / "actor", native_state(OddRole(seed=1), None))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    manifest.publish(version)
