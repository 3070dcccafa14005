"""Weights are transferred to another process bit by bit, through anonymous memory that leaves no files behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.rollout.vllm.sync import WeightSender, in_dtype, map_memory, read_slots

PARAMETERS = {
    "embed.weight": torch.randn(7, 5),
    "norm.weight": torch.randn(3, 1, 13).bfloat16(),  # 78 bytes: the next tensor needs padding for its alignment
    "scale": torch.tensor(2.5),
    "empty.bias": torch.empty(0),
    "head.weight": torch.randn(5, 7).t(),  # not contiguous
    "last.weight": torch.tensor([torch.inf, -0.0, 1e-45, torch.nan]),
}


@pytest.fixture
def sender():
    sender = WeightSender()
    yield sender
    sender.close()


def received(message):
    memory = map_memory(message["path"], message["nbytes"])
    return {name: view.clone() for name, view in read_slots(memory, message["layout"])}


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and repr(left.tolist()) == repr(right.tolist())


def test_every_dtype_and_shape_arrives_bit_by_bit_and_in_order(sender):
    result = received(sender.write(PARAMETERS.items()))
    assert list(result) == list(PARAMETERS)
    for name, tensor in PARAMETERS.items():
        assert same_bits(result[name], tensor), name


def test_first_parameter_may_be_empty(sender):
    result = received(sender.write([("empty", torch.empty(0, 3)), ("full", torch.ones(2))]))
    assert result["empty"].shape == (0, 3)
    assert result["full"].tolist() == [1, 1]


def test_another_process_reads_the_written_weights(sender):
    message = sender.write([("a", torch.arange(5.0)), ("b", torch.tensor([1.5]))])
    code = """if True:
        import json, struct, sys
        message = json.loads(sys.argv[1])
        with open(message["path"], "rb") as memory:
            for slot in message["layout"]:
                memory.seek(slot["offset"])
                print(slot["name"], *struct.unpack(f"{slot['shape'][0]}f", memory.read(4 * slot["shape"][0])))
    """
    command = [sys.executable, "-c", code, json.dumps(message)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines() == ["a 0.0 1.0 2.0 3.0 4.0", "b 1.5"]


def test_second_push_is_visible_through_the_first_mapping(sender):
    first = sender.write(PARAMETERS.items())
    memory = map_memory(first["path"], first["nbytes"])
    newer = {name: tensor + 1 for name, tensor in PARAMETERS.items()}
    second = sender.write(newer.items())
    assert second == first
    for name, view in read_slots(memory, second["layout"]):
        assert same_bits(view, newer[name]), name


def test_first_difference_is_the_first_changed_missing_or_new_parameter(sender):
    parameters = {name: PARAMETERS[name] for name in ("embed.weight", "norm.weight", "scale")}
    sender.write(parameters.items())
    assert sender.first_difference(parameters.items()) is None
    changed = parameters["norm.weight"].clone()
    changed[2, 0, 12] += 1
    assert sender.first_difference({**parameters, "norm.weight": changed}.items()) == "norm.weight"
    assert sender.first_difference([("embed.weight", parameters["embed.weight"])]) == "norm.weight"
    assert sender.first_difference([*parameters.items(), ("new", torch.ones(1))]) == "new"


@pytest.mark.parametrize(
    ("second", "came"),
    [
        ({"w": torch.zeros(4), "c": torch.zeros(2)}, r"expected b \(float32, \[2\]\), got c \(float32, \[2\]\)"),
        ({"w": torch.zeros(1), "b": torch.zeros(2)}, r"expected w \(float32, \[4\]\), got w \(float32, \[1\]\)"),
        ({"w": torch.zeros(4).bfloat16(), "b": torch.zeros(2)}, r"expected w \(float32, \[4\]\), got w \(bfloat16"),
        ({"w": torch.zeros(4)}, r"expected b \(float32, \[2\]\), got no parameter"),
        (
            {"w": torch.zeros(4), "b": torch.zeros(2), "x": torch.zeros(1)},
            r"expected no more parameters, got x \(float32, \[1\]\)",
        ),
    ],
    ids=["name", "shape", "dtype", "fewer", "more"],
)
def test_another_model_is_rejected(sender, second, came):
    sender.write([("w", torch.zeros(4)), ("b", torch.zeros(2))])
    with pytest.raises(RuntimeError, match=came):
        sender.write(second.items())


def test_close_leaves_no_files_and_frees_the_descriptor():
    shared, descriptors = set(Path("/dev/shm").glob("*")), len(os.listdir("/proc/self/fd"))
    sender = WeightSender()
    path = sender.write(PARAMETERS.items())["path"]
    assert os.readlink(path).startswith("/memfd:")  # anonymous: in no directory
    assert set(Path("/dev/shm").glob("*")) <= shared
    sender.close()
    sender.close()
    assert not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_closed_sender_can_be_reused(sender):
    sender.write([("of another model", torch.ones(3))])
    sender.close()
    assert same_bits(received(sender.write(PARAMETERS.items()))["scale"], PARAMETERS["scale"])


def test_memory_is_not_inherited_by_other_children(sender):
    path = sender.write(PARAMETERS.items())["path"]
    assert not os.get_inheritable(int(Path(path).name))


def test_sender_holds_only_the_parameters_and_their_alignment(sender):
    size = sum(tensor.numel() * tensor.itemsize for tensor in PARAMETERS.values())
    assert sender.write(PARAMETERS.items())["nbytes"] <= size + 64 * len(PARAMETERS)


def test_matrices_are_written_in_the_dtype_of_the_engine_and_vectors_unchanged():
    parameters = [("matrix", torch.rand(4, 8)), ("norm", torch.rand(8)), ("count", torch.ones(2, 2, dtype=torch.int64))]
    sender = WeightSender()
    message = sender.write(in_dtype(parameters, "bfloat16"))
    assert [slot["dtype"] for slot in message["layout"]] == ["bfloat16", "float32", "int64"]
    assert message["nbytes"] == 64 + 64 + 64
    received = dict(read_slots(map_memory(message["path"], message["nbytes"]), message["layout"]))
    assert torch.equal(received["matrix"], parameters[0][1].bfloat16())
    assert torch.equal(received["norm"], parameters[1][1])
    assert sender.first_difference(in_dtype(parameters, "bfloat16")) is None
    sender.close()
