"""The failure hub between ranks and its messages; complete runs that fail are in tests/distributed."""

import contextlib
import copy
import inspect
import os
import re
import socket
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typing_extensions
import yaml

from lightning_rlhf.cli import main
from lightning_rlhf.strategies import failure, failure_hub
from lightning_rlhf.strategies.failure import FailureWatch
from lightning_rlhf.strategies.failure_hub import LOST_CONNECTION, Hub, Wire
from tests.cli.conftest import PPO

ROOT = Path(__file__).resolve().parents[2]


def joined(hub, rank, node=0):
    wire = Wire(socket.create_connection(("127.0.0.1", hub.port)))
    wire.send(kind="join", token=hub.token, rank=rank, name=f"rank {rank}", node=node)
    return wire


def next_message(wire):
    wire.connection.settimeout(20)
    messages = []
    while not messages and not wire.ended:
        messages = wire.receive()
    return messages[0] if messages else None


@pytest.fixture
def ranks():
    """Four ranks on two nodes, connected to a hub."""
    hub = Hub(4, "secret", several_nodes=True)
    wires = [joined(hub, rank, node=rank // 2) for rank in range(4)]
    while len(hub._members) < 4:
        time.sleep(0.01)
    yield wires
    for wire in wires:
        wire.hang_up()
        wire.connection.close()


def test_failure_is_sent_to_all_ranks_which_end_after_the_failed_one(ranks):
    ranks[2].send(kind="failed", text="rank 2 failed: why")
    for other in (0, 1, 3):
        assert next_message(ranks[other]) == {"kind": "failed", "text": "rank 2 failed: why", "code": 1}
    ranks[2].hang_up()
    for other in (0, 1, 3):
        assert next_message(ranks[other]) == {"kind": "end"}


def test_every_rank_receives_the_exit_code_of_the_failed_one(ranks):
    ranks[1].send(kind="failed", text="rank 1 failed: a mistake", code=2)
    assert [next_message(ranks[other])["code"] for other in (0, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("reporting", "code", "printed"),
    [(False, 2, True), (True, 2, False), (False, 1, True), (True, 1, True)],
    ids=["a mistake of another", "the same mistake", "a failure of another", "two failures"],
)
def test_rank_exits_with_the_received_code_and_prints_each_mistake_once(monkeypatch, reporting, code, printed):
    output, left = [], []
    monkeypatch.setattr(failure, "_write_line", output.append)
    monkeypatch.setattr(FailureWatch, "_exit_after_timeout", lambda watch: None)
    monkeypatch.setattr(FailureWatch, "_end_others", lambda watch: None)
    monkeypatch.setattr(os, "_exit", left.append)
    watch = FailureWatch(1, 2, 0)
    watch._reporting = reporting
    watch._handle_failure("rank 0 failed: why", code)
    watch._exit()
    assert left == [code]
    assert bool(output) is printed


def test_only_the_first_failure_counts(ranks):
    ranks[2].send(kind="failed", text="first")
    assert next_message(ranks[0])["text"] == "first"
    ranks[1].send(kind="failed", text="second")
    ranks[2].hang_up()
    assert next_message(ranks[0]) == {"kind": "end"}


def test_vanished_ranks_of_a_lost_node_are_reported_with_the_node(ranks):
    ranks[3].hang_up()
    ranks[2].hang_up()
    assert next_message(ranks[0])["text"] == f"node 1: rank 2, rank 3 {LOST_CONNECTION}"


def test_single_vanished_rank_is_reported_without_a_node(ranks):
    ranks[3].hang_up()
    assert next_message(ranks[0])["text"] == f"rank 3 {LOST_CONNECTION}"


def test_finished_rank_may_disconnect(ranks):
    for rank in (3, 2, 1):
        ranks[rank].send(kind="done")
        ranks[rank].hang_up()
    ranks[0].send(kind="done")
    assert next_message(ranks[0]) == {"kind": "done"}


def test_unauthorized_connections_are_closed_without_blocking_ranks(monkeypatch):
    monkeypatch.setattr(failure_hub, "_HELLO_SECONDS", 0.2)
    hub = Hub(2, "secret", several_nodes=False)
    silent = socket.create_connection(("127.0.0.1", hub.port))
    for hello in (b"GET / HTTP/1.0\r\n\r\n", b'{"token": "wrong", "rank": 0}\n', b"[]\n", b'{"rank": 0}\n', b"\xff\n"):
        with socket.create_connection(("127.0.0.1", hub.port), timeout=20) as intruder:
            intruder.sendall(hello)
            with contextlib.suppress(ConnectionResetError):  # the hub may close before reading everything
                assert intruder.recv(1) == b""
    wires = [joined(hub, rank) for rank in range(2)]
    wires[1].send(kind="failed", text="why")
    assert next_message(wires[0])["text"] == "why"
    silent.close()
    for wire in wires:
        wire.hang_up()
        wire.connection.close()


def test_hub_on_one_node_is_not_reachable_from_outside():
    hub = Hub(1, "secret", several_nodes=False)
    assert hub._socket.getsockname()[0] == "127.0.0.1"
    wire = joined(hub, 0)
    wire.send(kind="done")
    assert next_message(wire) == {"kind": "done"}
    wire.connection.close()


def test_forked_process_does_not_hold_the_connection(ranks):
    child = os.fork()
    if not child:
        os._exit(0 if ranks[0].connection.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ranks[0].connection.fileno() != -1


def test_lost_machine_is_detected_by_the_kernel_within_half_a_minute(ranks):
    connection = ranks[0].connection
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, every, count = (
        connection.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + every * count <= 30
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_single_process_needs_no_hub():
    watch = FailureWatch(0, 1, 0)
    watch.start("127.0.0.1", False, lambda value: pytest.fail("the port was broadcast"))
    watch.report(ValueError("alone"))
    watch.close()


def test_unreachable_hub_raises_with_its_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        watch = FailureWatch(1, 2, 0)
        with pytest.raises(
            RuntimeError, match=rf"rank 1 \(.*\) cannot reach rank 0 at 127.0.0.1, port {port} .*MASTER_ADDR"
        ):
            watch.start("127.0.0.1", False, lambda value: (port, "secret", "rank 0"))


def raised_from(error, cause):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (torch.distributed.DistBackendError("watchdog"), True),
        (BrokenPipeError("Broken pipe"), True),
        (raised_from(RuntimeError("the step failed"), torch.distributed.DistNetworkError("gone")), True),
        (ValueError("NCCL is a word in a prompt"), False),
        (RuntimeError("shapes do not match"), False),
        (raised_from(ValueError("bad reward"), KeyError("answer")), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_error_caused_by_the_end_of_a_peer_is_recognized(error, lost):
    assert failure._lost_a_peer(error) is lost


def test_location_skips_frozen_code_and_deepspeed():
    positions = []
    libraries = ("<frozen _collections_abc>", f"{Path(torch.__file__).parent.parent}/deepspeed/runtime/engine.py")
    for library in (*libraries, typing_extensions.__file__):
        exec(
            compile("note()", library, "exec"),
            {"note": lambda: positions.append(failure.location_of(sys._getframe(1)))},
        )
    assert len(positions) == 3
    assert all(position.startswith(f"{__file__}:") for position in positions), positions


def test_location_is_the_innermost_line_outside_of_libraries():
    positions = []

    class Spy(torch.nn.Module):
        def forward(self):
            positions.extend([failure.location_of(sys._getframe()), failure.location_of(sys._getframe().f_back)])

    Spy()()
    line = Spy.forward.__code__.co_firstlineno + 1
    test = "test_location_is_the_innermost_line_outside_of_libraries"
    assert positions == [f"{__file__}:{line}, forward()", f"{__file__}:{line + 2}, {test}(), in _call_impl()"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "strategy", ["ddp.RLHFDDPStrategy", "fsdp.RLHFFSDPStrategy", "deepspeed.strategy.RLHFDeepSpeedStrategy"]
)
def test_timeout_of_collectives_is_an_argument_of_every_strategy(strategy, tmp_path, monkeypatch, capsys):
    """The arguments are those in examples/cluster/README.md."""
    (inputs,) = re.findall(r"`init_args: (\{timeout: [^}]+\})`", (ROOT / "examples/cluster/README.md").read_text())
    config = copy.deepcopy(PPO)
    config["trainer"]["strategy"] = {
        "class_path": f"lightning_rlhf.strategies.{strategy}",
        "init_args": yaml.safe_load(inputs),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["lightning-rlhf"])
    with pytest.raises(SystemExit) as end:
        main.run(["fit", "--config", str(tmp_path / "run.yaml"), "--print_config"])
    assert end.value.code == 0
    understood = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]
    assert understood["timeout"] == "0:10:00"
    name, _, cls = strategy.rpartition(".")
    default = inspect.signature(getattr(import_module(f"lightning_rlhf.strategies.{name}"), cls)).parameters["timeout"]
    assert default.default == timedelta(minutes=30)
