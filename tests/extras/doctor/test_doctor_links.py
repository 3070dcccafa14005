"""``doctor --servers`` and ``--links``: findings for servers that work, fail or are open, and for links."""

import socket

import pytest

from lightning_rlhf.extras.doctor import links as doctor_links
from lightning_rlhf.extras.doctor.links import _link_finding, _loss_fault, _segments, link_findings, server_findings
from lightning_rlhf.extras.servers.client import VLLMServer
from tests.distributed.launch import run_ranks
from tests.extras.servers.stub_server import valid_server


@pytest.fixture
def stub(tmp_path):
    server = valid_server(tmp_path)
    yield server
    server.close()


def test_servers_that_work(stub, tmp_path):
    (tmp_path / "servers.txt").write_text(f"{stub.url}\n")
    for urls in ([stub.url], [str(tmp_path / "servers.txt")]):
        ((name, finding, fault),) = server_findings(urls)
        assert (name, fault) == (stub.url, "")
        assert finding.endswith("/served, weights by shared_memory")


def test_servers_with_faults(stub, monkeypatch, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ((_, finding, fault),) = server_findings([url])
    assert finding == "no connection"
    assert fault.endswith("is it started, and is its port open?")
    stub.key = "right"
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    assert "rejected the API key: set VLLM_API_KEY to that of the server" in server_findings([stub.url])[0][2]
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert server_findings([stub.url])[0][2] == ""
    monkeypatch.setattr(VLLMServer, "is_local", False)
    assert server_findings([stub.url])[0][2] == ""
    stub.key = None
    assert "lets anyone change its weights: start it with GuardedRoutes" in server_findings([stub.url])[0][2]
    stub.answers["/health"] = 500, {"error": "EngineDead"}
    assert "failed at /health: EngineDead" in server_findings([stub.url, stub.url])[0][2]
    stub.answers |= {"/health": (200, {}), "/server_info": (200, {})}
    stub.key = "right"
    assert server_findings([stub.url])[0][1].endswith("does not work")
    assert "each server writes its address when it starts" in server_findings([str(tmp_path / "none.txt")])[0][2]


def test_links_of_a_single_process():
    assert link_findings({}) == [
        ("links", "not measured: start doctor --links on all machines with torchrun or srun", "")
    ]


def links():
    return link_findings()


def measured_links():
    """Measure the link between two ranks as if they were on two machines."""
    doctor_links.TorchElasticEnvironment.local_rank = lambda environment: 0
    return link_findings()


@pytest.mark.slow
def test_links_of_ranks():
    assert run_ranks("tests.extras.doctor.test_doctor_links:links", 2)[0] == [
        ["links", "all ranks are on this machine", ""]
    ]
    (link, lost), nothing = run_ranks("tests.extras.doctor.test_doctor_links:measured_links", 2)
    assert link[0].startswith("link to rank 1 on ")
    assert lost[0] == "lost segments"
    assert nothing == []


@pytest.mark.slow
def test_ranks_that_do_not_join_are_a_fault(monkeypatch):
    monkeypatch.setattr(doctor_links, "_JOIN_SECONDS", 1)
    launched = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    ((_, finding, fault),) = link_findings()
    assert finding == "no connection"
    assert fault.startswith("rank 1 of 2 on ")
    assert "through 127.0.0.1:1 within 1 s: all ports between the machines must be open" in fault


def test_slow_links_are_faults():
    assert _link_finding("to rank 1 on b", 1e-4, 2e9) == ("link to rank 1 on b", "0.10 ms, 2000 MB/s", "")
    assert "the link to rank 1 on b transfers 5.0 MB/s" in _link_finding("to rank 1 on b", 1e-4, 5e6)[2]
    assert "and has round trips of 50.0 ms" in _link_finding("to rank 1 on b", 0.05, 5e6)[2]


@pytest.mark.parametrize(
    ("loss", "is_slow", "is_fault"),
    [(0.0005, True, False), (0.002, True, True), (0.007, False, False), (0.02, False, True)],
)
def test_some_loss_over_a_fast_link_is_no_fault(loss, is_slow, is_fault):
    assert bool(_loss_fault(loss, is_slow)) == is_fault


def test_segments_are_read_from_the_kernel(monkeypatch, tmp_path):
    sent, repeated = _segments()
    assert sent > repeated >= 0
    monkeypatch.setattr(doctor_links, "_SNMP", tmp_path / "none")
    assert _segments() == (0, 0)
