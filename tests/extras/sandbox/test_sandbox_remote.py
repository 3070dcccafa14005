"""The remote sandbox with SandboxFusion's documented replies from a stub."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest

from lightning_rlhf.extras.sandbox.code import CodeExecution
from lightning_rlhf.extras.sandbox.program_tests import TextTest
from lightning_rlhf.extras.sandbox.protocol import Limits, SandboxFault, SandboxUnavailable
from lightning_rlhf.extras.sandbox.remote import RemoteSandbox
from tests.http_stand_in import HTTPStandIn


def result(status="Finished", code=0, stdout="", stderr="", seconds=0.05):
    """Return the ``run_result`` of a reply."""
    return {"status": status, "execution_time": seconds, "return_code": code, "stdout": stdout, "stderr": stderr}


def answer(status="Success", run_result=None, message=""):
    """Return a complete reply of POST /run_code."""
    return {
        "status": status, "message": message, "compile_result": None, "run_result": run_result,
        "executor_pod_name": None, "files": {},
    }  # fmt: skip


SAID = answer(run_result=result(stdout="42\n"))
FAILED = answer("Failed", result(code=1, stderr="Traceback"))
LATE = answer("Failed", result("TimeLimitExceeded", None, "half", seconds=1.0))
BROKEN = answer("SandboxError", result("Error", None), "no pod is left")


class Stub(HTTPStandIn):
    """A server with scripted replies, the last one repeated; records requests and their concurrency."""

    def __init__(self, *answers, delay=0.0):
        self.answers, self.delay, self.requested = list(answers), delay, []
        self.now = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        stub = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.requested.append((self.path, request))
            reply = stub.answers.pop(0) if len(stub.answers) > 1 else stub.answers[0]
            stub.now += 1
            stub.most = max(stub.most, stub.now)
        time.sleep(stub.delay)
        with stub.lock:
            stub.now -= 1
        status, body = (reply, b"busy") if isinstance(reply, int) else (200, reply)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve():
    """Start a stub with these answers."""
    stubs = []

    def start(*answers, **options):
        stubs.append(Stub(*answers, **options))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


def ask(stub, limits=None, **options):
    sandbox = RemoteSandbox(stub.url, **{"attempts": 3, **options})
    try:
        return sandbox.run("print(42)", "in", limits or Limits(seconds=2.0))
    finally:
        sandbox._client.close()


def test_request_has_the_documented_form(serve):
    stub = serve(SAID)
    ask(stub, Limits(seconds=2.0, memory_bytes=256 * 2**20))
    wanted = {"compile_timeout": 2.0, "run_timeout": 2.0, "memory_limit_MB": 256}
    assert stub.requested == [("/run_code", {"code": "print(42)", "language": "python", "stdin": "in", **wanted})]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("reply", "stdout", "exit_code", "timed_out", "truncated"),
    [
        (SAID, "42\n", 0, False, False),
        (FAILED, "", 1, False, False),
        (LATE, "half", None, True, False),
        (answer(run_result=result(stdout="x" * 70000)), "x" * 2**16, None, False, True),
        (answer(run_result=result(stdout="x" * 2**20)), "", None, False, True),
        (answer(run_result=result(stdout=None, stderr=None)), "", 0, False, False),
    ],
    ids=["success", "failed", "late", "much", "far too much", "silent"],
)
def test_results_of_the_server_are_converted(serve, reply, stdout, exit_code, timed_out, truncated):
    actual = ask(serve(reply))
    assert (actual.stdout, actual.exit_code, actual.timed_out, actual.truncated) == (
        stdout,
        exit_code,
        timed_out,
        truncated,
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("trouble", [BROKEN, 500, 503, 429, 502], ids=str)
def test_server_errors_are_retried_and_never_count_against_the_program(serve, trouble):
    stub = serve(trouble, trouble, SAID)
    assert ask(stub).stdout == "42\n"
    assert len(stub.requested) == 3
    stub = serve(trouble)
    with pytest.raises(SandboxFault, match=r"failed 3 times; last error: (SandboxError: no pod|HTTP status)"):
        ask(stub)
    assert len(stub.requested) == 3


@pytest.mark.parametrize("reply", [422, 401, 404], ids=str)
def test_rejected_request_is_a_fault_without_retries(serve, reply):
    stub = serve(reply)
    with pytest.raises(SandboxFault, match=f"rejected the request with HTTP status {reply}: busy"):
        ask(stub)
    assert len(stub.requested) == 1


def test_no_proxy_is_used(serve, monkeypatch):
    stub = serve(SAID)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert ask(stub, attempts=1).stdout == "42\n"


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "reply",
    [b"<html>", b"[]", b"null", b"{}", answer(), answer(run_result=result("Odd")), answer(run_result=result(code="0")),
     {"status": "Success", "run_result": {"status": "Finished"}}, b"[" * 50_000],
    ids=lambda reply: str(reply)[:60],
)  # fmt: skip
def test_undocumented_reply_is_a_fault(serve, reply):
    with pytest.raises(SandboxFault):
        ask(serve(reply))


def test_unreachable_server_is_a_fault_reported_at_the_start(serve):
    stub = serve(SAID)
    stub.shutdown()
    stub.server_close()
    with pytest.raises(SandboxFault, match="Connection refused"):
        ask(stub)
    with pytest.raises(SandboxUnavailable, match="start SandboxFusion there"):
        CodeExecution(sandbox=RemoteSandbox(stub.url, attempts=1))


def test_server_that_does_not_reply_is_a_fault(serve):
    stub = serve(SAID, delay=2.0)
    began = time.monotonic()
    with pytest.raises(SandboxFault, match="timed out"):
        ask(stub, Limits(seconds=0.1), attempts=1, patience_seconds=0.1)
    assert time.monotonic() - began < 1.5


def test_concurrency_limits_simultaneous_requests(serve):
    stub = serve(SAID, delay=0.2)
    sandbox = RemoteSandbox(stub.url, concurrency=3)
    with ThreadPoolExecutor(12) as pool:
        result = list(pool.map(lambda _: sandbox.run("", "", Limits()), range(12)))
    sandbox._client.close()
    assert {one.stdout for one in result} == {"42\n"}
    assert stub.most == 3


def test_results_and_reward_equal_those_of_the_local_sandbox(serve):
    stub = serve(SAID)
    sandbox = RemoteSandbox(stub.url)
    assert TextTest("", "42").run(sandbox, "", Limits()) == "passed"
    assert TextTest("", "43").run(sandbox, "", Limits()) == "wrong"
    reward = CodeExecution(sandbox=sandbox)
    assert reward(completions=["x"], tests=[[{"input": "", "output": "42"}, {"input": "", "output": "1"}]]) == [0.5]
    stub.answers = [500]
    with pytest.raises(SandboxFault):
        CodeExecution.__call__(reward, completions=["y"], tests=[[{"input": "", "output": "42"}]])
    sandbox._client.close()


def test_server_that_cannot_run_python_raises_an_error(serve):
    sandbox = RemoteSandbox(serve(FAILED).url)
    with pytest.raises(SandboxUnavailable, match="cannot run Python"):
        sandbox.check()
    sandbox._client.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "sandbox:8080"}, "must begin with http:// or https://, got 'sandbox:8080'"),
        ({"url": "http://me:secret@x"}, "^url must not contain a user name or password"),
        ({"url": "http://x", "concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"url": "http://x", "attempts": 0}, "attempts must be at least 1, got 0"),
    ],
)
def test_invalid_options_raise_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteSandbox(**options)
