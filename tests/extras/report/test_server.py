"""The inspector's server without a browser: unchanged data, closed and slow connections, hosts, headers, folders."""

import json
import re
import shutil
import socket
import struct
import threading
import time
from http.client import HTTPConnection

import pytest

from lightning_rlhf.extras.report import command as report
from lightning_rlhf.extras.report import inspect
from lightning_rlhf.extras.report.inspector import project
from lightning_rlhf.extras.report.inspector import server as server_module
from lightning_rlhf.extras.report.inspector.project import find_runs, is_folder_of_runs, project_data
from lightning_rlhf.extras.report.inspector.server import InspectServer
from lightning_rlhf.extras.report.run_directory import RunDirectory
from tests.extras.report.test_report_page import RESPONSES, ROWS
from tests.extras.report.test_run_files import answer, write_validation

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start():
    """Start the inspector for some directories, or for a folder of runs."""
    servers = []

    def start(*folders, folder=None):
        runs = [RunDirectory(path) for path in folders] if folder is None else find_runs(folder)
        server = InspectServer(runs, folder=folder)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    yield start
    for started in servers:
        started.shutdown()
        started.server_close()


def get(server, path, method="GET", **headers):
    """Return status, headers and body of the response to a path after the key."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, f"/{server.key}/{path}", headers={k.replace("_", "-"): v for k, v in headers.items()})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, reply.headers, body


def raw(server, request):
    with socket.create_connection(server.server_address, timeout=20) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


# -- unchanged data ---------------------------------------------------------------------------------------------------


def test_unchanged_data_are_not_sent_again(start, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    (folder / "end.json").write_text('{"error": null}')
    server = start(folder)
    status, headers, body = get(server, "data")
    assert status == 200
    assert json.loads(body)["runs"][0]["name"] == "a"
    tag = headers["ETag"]
    status, headers, body = get(server, "data", If_None_Match=tag)
    assert (status, body, headers["ETag"]) == (304, b"", tag)
    assert headers["Content-Length"] is None
    assert get(server, "data", If_None_Match='"other"')[0] == 200
    changes = (
        lambda: (folder / "rollouts/step-000002.jsonl").write_text(json.dumps(RESPONSES[0]) + "\n"),
        lambda: (folder / "rollouts/step-000002.jsonl").write_text(json.dumps(RESPONSES[1]) + "\n\n"),
        lambda: write_validation(folder, 4, [answer(0)]),
        lambda: (folder / "metrics.csv").write_text("step,reward/mean\n1,0.5\n"),
        lambda: (folder / "end.json").write_text('{"error": "lost"}'),
        lambda: (folder / "end.json").unlink(),
        lambda: (folder / "config.yaml").write_text("a: 2"),
        lambda: (folder / "health_settings.json").write_text('{"rewards": []}'),
    )
    for number, change in enumerate(changes):
        change()
        status, headers, _ = get(server, "data", If_None_Match=tag)
        assert status == 200, number
        assert headers["ETag"] != tag
        tag = headers["ETag"]


def test_data_are_rebuilt_only_for_the_changed_run(start, run_directory, monkeypatch):
    first, second = (run_directory(name, ROWS, {1: RESPONSES}) for name in "ab")
    server = start(first, second)
    get(server, "data")
    read = []
    rows = RunDirectory.rows
    monkeypatch.setattr(RunDirectory, "rows", lambda run: read.append(run.path) or rows(run))
    get(server, "data")
    get(server, "")
    assert read == []
    (second / "end.json").write_text('{"error": null}')
    get(server, "data")
    assert read == [second]


def test_poll_of_an_unchanged_run_reads_no_file(start, run_directory, monkeypatch):
    folder = run_directory("a", ROWS, dict.fromkeys(range(1, 200), RESPONSES))
    (folder / "end.json").write_text('{"error": null}')
    server = start(folder)
    tag = get(server, "data")[1]["ETag"]
    monkeypatch.setattr(type(folder), "open", lambda *arguments, **options: pytest.fail("a file is read"))
    started = time.process_time()
    for _ in range(20):
        assert get(server, "data", If_None_Match=tag)[0] == 304
    assert time.process_time() - started < 20 * 0.05


# -- connections ------------------------------------------------------------------------------------------------------


def test_connection_closed_during_an_answer_prints_nothing(start, run_directory, capfd, monkeypatch):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    server = start(folder)
    closed = threading.Event()

    def slow(*arguments, **options):
        assert closed.wait(20)
        return "x" * 10_000_000

    monkeypatch.setattr(server_module, "report_page", slow)
    for _ in range(3):
        client = socket.create_connection(server.server_address)
        client.sendall(f"GET /{server.key}/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a browser
        client.close()
    time.sleep(0.2)
    closed.set()
    assert get(server, "data")[0] == 200
    time.sleep(0.5)
    assert capfd.readouterr() == ("", "")


def test_other_errors_are_printed(start, run_directory, capfd, monkeypatch):
    server = start(run_directory("a", ROWS))
    monkeypatch.setattr(server_module, "report_page", lambda *arguments, **options: 1 / 0)
    with pytest.raises(Exception, match="Remote end closed"):
        get(server, "")
    time.sleep(0.2)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_slow_clients_are_disconnected(start, run_directory, capfd, monkeypatch):
    monkeypatch.setattr(server_module._Handler, "timeout", 0.3)
    server = start(run_directory("a", ROWS))
    before = threading.active_count()
    clients = [socket.create_connection(server.server_address, timeout=20) for _ in range(5)]
    clients[0].sendall(b"GET / HTTP/1.1\r\nHo")
    for client in clients:
        assert client.recv(1) == b""  # the server has closed the connection
        client.close()
    time.sleep(0.2)
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""


# -- hosts and headers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost", 200), ("localhost:9000", 200), ("LOCALHOST:9000", 200),
        ("127.0.0.1:65535", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil:80", 403),
        ("localhost:9000:1", 403), ("localhost:", 403), ("127.0.0.1:123456", 403), ("127.0.0.2", 403), ("", 403),
        ("0.0.0.0:80", 403), ("[::1]:80", 403), ("evil@localhost", 403), ("localhost:80@evil", 403),
        ("localhost:٣", 403),
    ],
)  # fmt: skip
def test_host_may_be_this_machine_with_any_port(start, run_directory, host, status):
    server = start(run_directory("a", ROWS))
    answered = raw(server, f"GET /{server.key}/data HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answered.startswith(f"HTTP/1.0 {status} ".encode())
    if status == 403:
        assert b"forward a port: ssh -L 8001:127.0.0.1:PORT machine" in answered


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: evil\r\n", "Host: evil\r\nHost: localhost\r\n"])
def test_missing_and_repeated_host_headers_are_rejected(start, run_directory, hosts):
    server = start(run_directory("a", ROWS))
    assert raw(server, f"GET /{server.key}/data HTTP/1.1\r\n{hosts}\r\n".encode()).startswith(b"HTTP/1.0 403 ")


def test_every_answer_has_security_headers(start, run_directory):
    server = start(run_directory("a", ROWS))
    key = server.key.encode()
    requests = {
        200: b"GET /" + key + b"/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        403: b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n",
        404: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        501: b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        414: b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        400: b"GET / x HTTP/1.1\r\n\r\n",
    }
    for status, request in requests.items():
        head = raw(server, request).partition(b"\r\n\r\n")[0].decode()
        assert head.startswith(f"HTTP/1.0 {status} "), head
        for name, value in server_module._HEADERS.items():
            assert f"\r\n{name}: {value}" in head, (status, name)
        assert "Python" not in head


# -- validations ------------------------------------------------------------------------------------------------------


def test_responses_of_a_validation_are_served(start, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    write_validation(folder, 0, [answer(0)], "-rank0")
    write_validation(folder, 0, [answer(1, rewards={"a": float("nan")})], "-rank1")
    server = start(folder)
    rows = json.loads(get(server, "validations/0/0")[2])
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[1]["rewards"] == {"a": None}
    assert json.loads(get(server, "validations/0/7")[2]) == []
    assert len(json.loads(get(server, "responses/0/1")[2])) == len(RESPONSES)
    for path in (
        "validations/1/0",
        "validations/0/",
        "validations/0/x",
        "validations",
        "run/0/",
        "compare/0/",
        "compare/0,0/",
    ):
        assert get(server, path)[0] == 404, path


# -- folders of runs --------------------------------------------------------------------------------------------------


def config(seed, lr=0.1, directory="runs/x"):
    return {
        "seed_everything": seed,
        "trainer": {"default_root_dir": directory, "max_steps": 20, "logger": f"{directory}/logs"},
        "model": {"lr": lr},
    }


@pytest.fixture
def runs(run_directory, tmp_path):
    """A folder of runs: two seeds of one setting, a failed one with another setting, a damaged one and a deep one.

    It also has directories that are not listed: a run inside of a run, a run that is too deep, a link, an empty one.
    """
    run_directory("runs/a/seed1", ROWS, {1: RESPONSES}, config(1, directory="runs/a/seed1"))
    run_directory("runs/a/seed2", ROWS[:6], {1: RESPONSES[:2]}, config(2, directory="runs/a/seed2"))
    run_directory("runs/b", [{**row, "kl/ref": 5.0} for row in ROWS], {1: RESPONSES[:3]}, config(1, 0.2, "runs/b"))
    run_directory("runs/broken", ROWS)
    (tmp_path / "runs/broken/config.yaml").write_text("a: [")
    (tmp_path / "runs/b/end.json").write_text('{"error": "RunError: lost"}')
    (tmp_path / "runs/b/report.html").write_text("")
    run_directory("runs/b/inside", ROWS)
    run_directory("runs/1/2/3/4/5", ROWS)
    run_directory("runs/1/2/3/4/5x/6", ROWS)
    run_directory("elsewhere", ROWS)
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs/other").mkdir()
    return tmp_path / "runs"


NAMES = ["1/2/3/4/5", "a/seed1", "a/seed2", "b", "broken"]


def test_runs_of_a_folder_are_found(runs, monkeypatch):
    assert [run.path.relative_to(runs).as_posix() for run in find_runs(runs)] == NAMES
    assert is_folder_of_runs(runs)
    assert not is_folder_of_runs(runs / "a/seed1")
    assert not is_folder_of_runs(runs / "other")
    assert not is_folder_of_runs(runs / "missing")
    monkeypatch.setattr(project, "_MOST_RUNS", 3)
    assert len(find_runs(runs)) == 3


def test_runs_that_ended_before_any_metrics_have_a_row(runs):
    for name, end in (("other", '{"error": "RunError: no engine"}'), ("cut", '{"err'), ("b/inner", "{}")):
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "end.json").write_text(end)
    result = find_runs(runs)
    rows = project_data(runs, result, [""] * len(result))["project"]["runs"]
    assert [row["name"] for row in rows] == [*NAMES, "cut", "other"]
    assert [row["state"] for row in rows[-2:]] == ["damaged", "failed"]
    assert rows[-1]["error"] == "RunError: no engine"
    assert rows[-1].keys() == rows[0].keys()
    assert not is_folder_of_runs(runs / "other")


def test_row_has_state_settings_metrics_and_group(runs):
    result = find_runs(runs)
    data = project_data(runs, result, [""] * len(result))
    assert json.dumps(data, allow_nan=False)
    rows = {row["name"]: row for row in data["project"]["runs"]}
    assert list(rows) == NAMES
    seed1 = rows["a/seed1"]
    assert (seed1["state"], seed1["steps"], seed1["limit"], seed1["seed"], seed1["failed_checks"]) == (
        "running",
        10,
        20,
        1,
        0,
    )
    assert seed1["config"] == {"trainer.max_steps": "20", "model.lr": "0.1"}
    assert (
        seed1["first"]["reward/mean"],
        seed1["last"]["reward/mean"],
        seed1["last"]["val/fraction_correct_greedy"],
    ) == (
        0.1,
        1.0,
        0.75,
    )
    assert rows["a/seed2"]["steps"] == 5
    assert seed1["group"] == rows["a/seed2"]["group"] != rows["b"]["group"]
    assert (rows["b"]["state"], rows["b"]["error"], rows["b"]["failed_checks"]) == ("failed", "RunError: lost", 1)
    assert rows["broken"]["state"] == "damaged"
    assert "config.yaml cannot be read, the file is damaged" in rows["broken"]["error"]
    assert seed1.keys() == rows["broken"].keys()
    assert len({row["group"] for row in rows.values()}) == 4
    assert time.time() - seed1["modified"] < 100
    assert data["definitions"]["kl/ref"]["unit"] == "nats per response"


def test_inspector_shows_a_folder(start, runs):
    server = start(folder=runs)
    status, _, body = get(server, "")
    assert status == 200
    assert b'"project": {"path": ' in body
    body = get(server, "data")[2]
    rows = json.loads(body)["project"]["runs"]
    assert [row["link"] for row in rows] == [f"run/{i}/" for i in range(5)]  # in the order of NAMES
    assert b'"name": "seed1"' in get(server, "run/1/")[2]
    assert [run["name"] for run in json.loads(get(server, "compare/1,3,2/data")[2])["runs"]] == ["seed1", "b", "seed2"]
    assert len(json.loads(get(server, "compare/1,3,2/responses/2/1")[2])) == 2
    assert len(json.loads(get(server, "run/3/responses/0/1")[2])) == 3
    assert json.loads(get(server, "run/3/validations/0/1")[2]) == []
    tag = get(server, "compare/1,2/data")[1]["ETag"]
    assert get(server, "compare/1,2/data", If_None_Match=tag)[0] == 304
    wrong = (
        "run/5/", "run/x/", "run/1", "compare/", "compare/1,1/", "compare/1,9/", "compare/0,1,2,3,4,0,1,2,3/",
        "responses/0/1", "run/1/run/1/", "run/1/x", "compare/1,/", "run/-1/", "run/1/../", "x",
    )  # fmt: skip
    for path in wrong:
        assert get(server, path)[0] == 404, path
    assert get(server, "run/4/")[0] == 500  # the damaged one


def test_run_numbers_are_stable_when_other_runs_start_or_are_removed(start, runs, run_directory):
    server = start(folder=runs)
    run_directory("runs/a/early", ROWS)
    shutil.rmtree(runs / "a/seed1")
    rows = json.loads(get(server, "data")[2])["project"]["runs"]
    assert [row["name"] for row in rows] == [*NAMES, "a/early"]
    assert [row["state"] for row in rows][1] == "damaged"
    assert b'"name": "early"' in get(server, "run/5/")[2]


def test_commands_accept_a_folder(runs, tmp_path, capsys, monkeypatch):
    target = tmp_path / "pages/x.html"
    assert report.run([str(runs), "--to", str(target)]) == 0
    text = target.read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    links = {row["name"]: row["link"] for row in data["project"]["runs"]}
    assert links == {**dict.fromkeys(NAMES, ""), "b": "../runs/b/report.html"}
    assert "connect-src" not in text
    assert report.run([str(runs)]) == 0
    assert (runs / "report.html").is_file()
    assert report.run([str(runs / "other")]) == 2

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(InspectServer, "serve_forever", interrupt)
    assert inspect.run([str(runs)]) == 0
    assert re.search(r"open http://127\.0\.0\.1:\d+/[\w-]{20,}/\n$", capsys.readouterr().out)
