"""The middleware over real connections, around an application that misbehaves as configured."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse, Response, StreamingResponse

from lightning_rlhf.extras.serve import command as serve
from lightning_rlhf.extras.serve import middleware as module
from lightning_rlhf.extras.serve.limits import Limits, Rejected, check, option_hint
from lightning_rlhf.extras.serve.middleware import ROUTES, RequestGuard
from lightning_rlhf.extras.serve.server import uvicorn_options

KEY = "a-key-of-some-length"
BEARER = {"Authorization": f"Bearer {KEY}"}
LIMITS = Limits(
    max_body_bytes=4096,
    max_prompt_tokens=20,
    max_tokens=8,
    max_responses=4,
    concurrency=3,
    seconds=1.0,
    read_seconds=0.4,
)
COMPLETION = {"model": "m", "prompt": "a b c", "max_tokens": 4}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a b"}]}
# Routes and parameters of vLLM that must not be reachable.
HIDDEN = [
    "/", "/docs", "/openapi.json", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/responses", "/invocations",
    "/pooling",
    "/score", "/rerank", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/collective_rpc",
    "/reset_prefix_cache", "/update_weights", "/init_weight_transfer_engine", "/pause", "/server_info", "/version",
    "/ping",
    "/load", "/abort_requests", "/inference/v1/generate", "/start_profile", "/v1/audio/transcriptions", "/v1/messages",
]  # fmt: skip
TRAVERSALS = [
    "/v1/../tokenize", "/v1/models/../../tokenize", "/v1/models/", "//v1/models", "/v1//models", "/V1/models",
    "/v1/models;x", "/v1/models%2f", "/v1%2fmodels", "/%76%31/models", "/v1/models%00", "/v1/models%0d%0aX:y",
    "/..%2f..%2fetc/passwd", "/%2e%2e/tokenize", "/v1/%2e%2e/tokenize", "/./v1/models", "/v1/./models", "/v1/models/.",
    "/v1\\models", "/v1/models%20", "/v1/models/%2e%2e/tokenize", "http://vllm/tokenize", "/@vllm/tokenize",
    "/health/../tokenize", "/health/", "/health%2f..%2ftokenize", "/HEALTH", "/health;x", "/%68ealth", "/metrics/..",
]  # fmt: skip


class Stub:
    """The application: records its requests, and responds with the result of ``answer(scope)``."""

    def __init__(self):
        self.requests, self.at_work, self.most, self.ended = [], 0, 0, 0
        self.answer = lambda scope: JSONResponse({"object": "text_completion"})

    async def __call__(self, scope, receive, send):
        content = (await receive())["body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["path"], content, headers, scope["query_string"]))
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            response = self.answer(scope)
            response = await response if asyncio.iscoroutine(response) else response
            await response(scope, receive, send)
        finally:
            self.at_work -= 1
            self.ended += 1


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def guarded(stub):
    """Start a server; return its url."""
    servers = []

    def start(limits=LIMITS):
        app = RequestGuard(stub, KEY, limits, lambda text: len(text.split()))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **uvicorn_options(limits)))
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True)
        thread.start()
        servers.append((server, thread, listening))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, thread, listening in servers:
        server.should_exit = True
        thread.join(10)
        listening.close()


def post(url, body=COMPLETION, route="/v1/completions", headers=BEARER, **options):
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return httpx.post(url + route, content=content, headers=headers, timeout=20, trust_env=False, **options)


def raw(url, request, seconds=5.0):
    """Return the status of the response to some bytes, or 0 if the connection is closed without one."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(request)
        answer = connection.recv(65536)
    return int(answer.split(b" ")[1]) if answer else 0


def line(path, method="GET", headers=BEARER):
    message = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{message}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/health", {"x-long": "x" * 17_000}),
        ("/health", {f"x-{number}": "x" for number in range(4000)}),
        ("/health?x=" + "x" * 17_000, {}),
    ],
    ids=["long header", "many headers", "long address"],
)
def test_too_large_headers_in_one_piece_are_rejected(guarded, path, headers):
    answer = httpx.get(guarded() + path, headers=headers, timeout=20, trust_env=False)
    assert answer.status_code == 431
    assert "may have at most 16384 bytes" in answer.text


def conversation(url, *pieces, pause=0.0):
    """Send bytes in pieces without reading; return the status and the error of the response."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        head, _, body = everything_from(connection).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


def send_for(connection, seconds):
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        connection.sendall(b"a" * 1000)
        time.sleep(0.02)


def everything_from(connection):
    response = b""
    while data := connection.recv(65536):
        response += data
    return response


LONG = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 60_000 + b"\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [LONG[:20_000], LONG[20_000:]],
        [LONG[:9000], LONG[9000:33_000], LONG[33_000:]],
        [LONG[:40_000], b"a" * (1 << 20)],
    ],
    ids=["two", "three", "a megabyte"],
)
def test_too_large_headers_in_several_pieces_are_rejected_with_431(guarded, pieces):
    status, error = conversation(guarded(), *pieces, pause=0.05)
    assert status == error["code"] == 431
    assert "headers" in error["message"]


@pytest.mark.parametrize(
    "request_",
    [b"NOT HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n"],
    ids=["request line", "header line", "no host"],
)
def test_malformed_request_is_rejected_with_400(guarded, request_):
    status, error = conversation(guarded(), request_)
    assert status == error["code"] == 400
    assert "nvalid" in error["message"]


def test_malformed_request_after_a_valid_one_is_rejected_with_400(guarded):
    url = guarded()
    host, port = url.removeprefix("http://").split(":")
    good = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(good + b"NOT HTTP\r\n\r\n")
        response = everything_from(connection)
    assert response.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400 Bad Request" in response


def test_malformed_body_is_rejected_with_400_and_does_not_reach_the_model(guarded, stub):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
    chunked = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    url = guarded()
    status, _ = conversation(url, chunked, b"not a chunk size\r\n", pause=0.05)
    assert status == 400
    assert not stub.requests
    assert post(url).status_code == 200


def test_client_that_continues_sending_after_its_rejection_is_disconnected(guarded):
    url = guarded()
    host, port = url.removeprefix("http://").split(":")
    began = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"NOT HTTP\r\n\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_for(connection, 5)
    assert time.monotonic() - began >= LIMITS.read_seconds


def test_every_route_except_health_without_the_right_key_is_401(guarded, stub):
    url = guarded()
    wrong = [
        {}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"bearer {KEY[:-1]}"}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer  {KEY}"},
        {"X-API-Key": KEY}, {"Cookie": f"key={KEY}"},
    ]  # fmt: skip
    for path in [*(route for route in ROUTES if route != "/health"), *HIDDEN, *TRAVERSALS]:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert raw(url, line(path, method, {})) == 401, path
    for headers in wrong:
        assert post(url, headers=headers).status_code == 401, headers
    assert post(url + f"/v1/models?key={KEY}", route="", headers={}).status_code == 401
    twice = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer x\r\n\r\n"
    assert raw(url, twice.encode()) == 401
    assert stub.requests == []
    refused = post(url, headers={})
    assert refused.headers["www-authenticate"] == "Bearer"
    assert KEY not in refused.text


def test_only_the_allowed_routes_exist_with_the_key(guarded, stub):
    url = guarded()
    for path in [*HIDDEN, *TRAVERSALS]:
        for method in ("GET", "POST"):
            assert raw(url, line(path, method)) == 404, path
    for path, method in ROUTES.items():
        assert raw(url, line(path, "PUT")) == 405
        assert httpx.request("PUT", url + path, headers=BEARER).headers["allow"] == method
        assert raw(url, line(path, "POST" if method == "GET" else "GET")) == 405
    assert stub.requests == []


def test_health_needs_no_key_and_reports_whether_the_model_is_ready(guarded, stub):
    url = guarded()
    assert httpx.get(f"{url}/health").status_code == 200
    stub.answer = lambda scope: Response(status_code=503)
    assert httpx.get(f"{url}/health").status_code == 503
    assert post(url).status_code == 503
    assert httpx.get(f"{url}/v1/models", headers=BEARER).status_code == 503


def test_only_the_validated_body_is_forwarded(guarded, stub):
    url = guarded()
    stub.answer = lambda scope: JSONResponse({"error": "vLLM's own"}, 400, {"x-secret": "1"})
    answer = post(
        url + "/v1/completions?x=/tokenize", route="", headers={**BEARER, "X-Forwarded-For": "y", "Host": "z"}
    )
    assert (answer.status_code, answer.json()) == (400, {"error": "vLLM's own"})
    assert "x-secret" not in answer.headers
    ((method, path, content, headers, query),) = stub.requests
    assert (method, path, json.loads(content), query) == ("POST", "/v1/completions", COMPLETION, b"")
    assert headers.keys() == {"host", "content-type", "content-length"}
    assert headers["host"] == "localhost"
    # Of two fields of one name only the validated one is passed on.
    post(url, '{"prompt": "a", "max_tokens": 100000, "max_tokens": 2}')
    assert json.loads(stub.requests[-1][2]) == {"prompt": "a", "max_tokens": 2}


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"prompt": "a " * 21}, 422, "a prompt has 21 tokens, allowed are 20"),
        ({"prompt": [1] * 1000}, 422, "a prompt has 1000 tokens, allowed are 20"),
        ({"prompt": [[1], [1] * 21]}, 422, "a prompt has 21 tokens, allowed are 20"),
        (
            {"n": 10_000},
            422,
            "1 prompts x n 10000 exceed the 4 allowed responses; serve --max-responses sets the limit",
        ),
        ({"n": 2, "prompt": ["a", "b", "c"]}, 422, "3 prompts x n 2 exceed the 4 allowed responses"),
        (
            {"max_tokens": 9},
            422,
            "max_tokens must be at most 8, got 9; serve --max-tokens sets the limit",
        ),
        ({"max_tokens": 10**400}, 422, "max_tokens must be at most 8, got 10000"),
        ({"max_tokens": True}, 422, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -1}, 422, "max_tokens: Input should be greater than or equal to 1"),
        ({"n": "1"}, 422, "n: Input should be a valid integer"),
        ({"best_of": 10_000}, 422, "unknown field 'best_of'"),
        ({"prompt_logprobs": 5}, 422, "unknown field 'prompt_logprobs'"),
        ({"prompt_embeds": "gASVAA=="}, 422, "unknown field 'prompt_embeds'"),
        ({"guided_regex": "(a+)+$"}, 422, "unknown field 'guided_regex'"),
        ({"chat_template": "{{ 1 }}"}, 422, "unknown field 'chat_template'"),
        ({"logits_processors": ["os.system"]}, 422, "unknown field 'logits_processors'"),
        ({"kv_transfer_params": {}}, 422, "unknown field 'kv_transfer_params'"),
        ({"logprobs": 1000}, 422, "logprobs: Input should be less than or equal to 5"),
        ({"stop": ["x"] * 9}, 422, "stop"),
        ({"stop": "x" * 257}, 422, "String should have at most 256 characters"),
        ({"temperature": "hot"}, 422, "temperature.int: Input should be a valid integer"),
        ({"top_k": 2**70}, 422, "top_k: Input should be less than 9"),
        ({"seed": -(10**30)}, 422, "seed: Input should be greater than -9"),
        ({"temperature": {"$": 1}}, 422, "temperature.int: Input should be a valid integer"),
        ({"stream": "yes"}, 422, "stream: Input should be a valid boolean"),
        ({"stream_options": {"x": 1}}, 422, "unknown field 'stream_options.x'"),
        ({"prompt": None}, 422, "prompt must be"),
        ({"prompt": []}, 422, "prompt must be"),
        ({"prompt": [-1]}, 422, "prompt must be"),
        ({"prompt": [1, "a"]}, 422, "prompt must be"),
        ({"prompt": {"a": 1}}, 422, "prompt must be"),
        ({"model": ["m"]}, 422, "model: Input should be a valid string"),
    ],
)
def test_large_and_unknown_parameters_are_rejected_before_the_model_receives_them(
    guarded, stub, change, status, message
):
    answer = post(guarded(), {**COMPLETION, **change})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert stub.requests == []


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "messages",
    [
        [], "hello", [{}], [{"role": "user"}], [{"role": "root", "content": "a"}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "file:///etc/passwd"}]}],
        [{"role": "user", "content": "a", "tool_calls": []}], [{"role": "user", "content": "a b " * 11}],
        [{"role": "user", "content": "a"}] * 21,
    ],
)  # fmt: skip
def test_messages_must_be_text_of_limited_size(guarded, stub, messages):
    assert post(guarded(), {**CHAT, "messages": messages}, "/v1/chat/completions").status_code == 422
    assert stub.requests == []


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 4000,
        b'"x"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"prompt": "a", "\\ud800": 1}',
    ],
)
def test_body_that_is_not_a_json_object_is_400(guarded, stub, body):
    assert post(guarded(), body).status_code == 400
    assert stub.requests == []


def test_valid_requests_of_both_kinds_pass(guarded, stub):
    url = guarded()
    full = {
        **COMPLETION, "n": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0, "seed": 7, "stop": ["x"],
        "user": "u",
        "logprobs": 1, "presence_penalty": 0.1, "frequency_penalty": 0, "repetition_penalty": 1, "stream": False,
    }  # fmt: skip
    assert post(url, full).status_code == 200
    parts = [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]
    chat = {**CHAT, "messages": parts, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}
    assert post(url, chat, "/v1/chat/completions").status_code == 200
    assert [json.loads(request[2]) for request in stub.requests] == [full, chat]


def test_body_of_ten_megabytes_is_413_with_and_without_its_length(guarded, stub):
    url = guarded()

    def pieces():
        for _ in range(160):
            yield b"x" * 65536

    assert raw(url, line("/v1/completions", "POST").replace(b"Length: 0", b"Length: 10485760")) == 413
    assert raw(url, line("/v1/completions", "POST").replace(b"Length: 0", b"Length: " + b"9" * 300)) in (400, 413)
    try:
        status = httpx.post(f"{url}/v1/completions", content=pieces(), headers=BEARER, timeout=20).status_code
    except httpx.WriteError:  # it hung up while more was coming
        status = 413
    assert status == 413
    assert post(url, {**COMPLETION, "prompt": "a" * 5000}).status_code == 413
    assert stub.requests == []


def test_prompt_of_a_million_tokens_is_rejected(guarded, stub):
    url = guarded(Limits(max_body_bytes=1 << 24, max_prompt_tokens=20, read_seconds=10, seconds=20))
    for prompt in ("a " * 10**6, [1] * 10**6):
        answer = post(url, {**COMPLETION, "prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["message"][:28]) == (422, "a prompt has 1000000 tokens,")
    assert stub.requests == []


def test_cheap_requests_are_rejected_cheaply(guarded, stub):
    url = guarded(Limits())
    counted, texts = [], [""] * 250_000

    def count(text):
        counted.append(text)
        return 0

    with pytest.raises(Rejected, match="250000 prompts x n 1 exceed the 16 allowed responses; serve --max-responses"):
        check("/v1/completions", {"prompt": texts}, Limits(), count)
    assert counted == []
    parts = [{"type": "text", "text": ""}] * 30_000
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}, Limits(), count)
    assert len(counted) == 1
    assert post(url, {"prompt": texts}).status_code == 422
    assert stub.requests == []


def test_every_limit_has_an_option_of_the_command():
    options = {action.dest for action in serve.make_parser()._actions}
    assert {limit.name for limit in fields(Limits)} <= options
    assert option_hint("max_prompt_tokens") == "; serve --max-prompt-tokens sets the limit"


def test_too_slow_request_is_504_and_the_model_is_stopped(guarded, stub):
    url = guarded()
    stub.answer = lambda scope: asyncio.sleep(30)
    began = time.monotonic()
    assert post(url).status_code == 504
    assert time.monotonic() - began < 3
    assert (stub.at_work, stub.ended) == (0, 1)


def test_disconnected_client_stops_the_model(guarded, stub):
    url = guarded(Limits(seconds=30))
    stub.answer = lambda scope: asyncio.sleep(30)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=COMPLETION, headers=BEARER, timeout=0.3)
    end = time.monotonic() + 5
    while not stub.ended and time.monotonic() < end:
        time.sleep(0.02)
    assert (stub.at_work, stub.ended) == (0, 1)


def streamed(parts):
    return lambda scope: StreamingResponse(parts(), media_type="text/event-stream")


def test_stream_is_forwarded_immediately_and_limited_in_time(guarded, stub):
    async def parts():
        for number in range(1000):
            yield f"data: {number}\n\n".encode()
            await asyncio.sleep(0.15)

    stub.answer = streamed(parts)
    seen = []
    began = time.monotonic()
    with httpx.stream(
        "POST", f"{guarded()}/v1/completions", json={**COMPLETION, "stream": True}, headers=BEARER
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen += [(time.monotonic() - began, text) for text in answer.iter_lines() if text]
    assert [text for _, text in seen[:3]] == ["data: 0", "data: 1", "data: 2"]
    assert seen[2][0] - seen[0][0] > 0.2  # not all at once at the end
    assert json.loads(seen[-1][1].removeprefix("data: "))["error"]["code"] == 504
    assert seen[-1][0] < 3


def test_application_error_ends_only_its_request(guarded, stub):
    async def parts():
        yield b"data: 0\n\n"
        raise FloatingPointError("no luck today")

    def fail(scope):
        raise FloatingPointError("no luck today")

    url = guarded()
    stub.answer = fail
    assert post(url).status_code == 500
    stub.answer = streamed(parts)
    with pytest.raises(httpx.RemoteProtocolError):
        post(url, {**COMPLETION, "stream": True})
    stub.answer = lambda scope: JSONResponse({})
    assert post(url).status_code == 200
    end = time.monotonic() + 5
    while stub.at_work and time.monotonic() < end:  # the response arrives before the handler ends
        time.sleep(0.01)
    assert stub.at_work == 0


def test_client_that_does_not_read_its_stream_is_disconnected(guarded, stub, monkeypatch):
    monkeypatch.setattr(module, "_END_SECONDS", 0.1)
    ended = threading.Event()
    answer = RequestGuard.__call__

    async def watched(self, scope, receive, send):
        await answer(self, scope, receive, send)
        ended.set()

    async def flood():
        while True:
            yield b"x" * 65536

    monkeypatch.setattr(RequestGuard, "__call__", watched)
    stub.answer = streamed(flood)
    host, port = guarded().removeprefix("http://").split(":")
    body = json.dumps({**COMPLETION, "stream": True})
    request = line("/v1/completions", "POST").replace(b"Length: 0", f"Length: {len(body)}".encode()) + body.encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request)
        assert ended.wait(10)


def test_pipelined_requests_do_not_hide_a_disconnected_client(guarded, stub):
    url = guarded(Limits(seconds=30))
    stub.answer = lambda scope: asyncio.sleep(30)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(COMPLETION)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request * 3)
        end = time.monotonic() + 5
        while not stub.requests and time.monotonic() < end:
            time.sleep(0.02)
    while not stub.ended and time.monotonic() < end:
        time.sleep(0.02)
    assert (stub.at_work, stub.ended) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_simultaneous_requests_are_answered_or_temporarily_rejected(guarded, stub, requests):
    url = guarded(Limits(concurrency=3, seconds=60))

    async def slow(scope):
        await asyncio.sleep(0.05)
        return JSONResponse({})

    stub.answer = slow
    with ThreadPoolExecutor(requests // 4) as threads:
        answers = list(threads.map(lambda _: post(url), range(requests)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) == len(stub.requests) >= 3
    assert stub.most <= 3
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 429)
    assert post(url).status_code == 200


def test_slow_clients_are_disconnected_while_others_are_served(guarded, stub):
    url = guarded()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 4000\r\n\r\n"
    openings = {
        "nothing": b"",
        "half a header": b"GET /health HT",
        "a header and no end": b"GET /health HTTP/1.1\r\nX: ",
    }
    slow = {name: socket.create_connection((host, int(port))) for name in [*openings, "half a body"] for _ in range(1)}
    many = [socket.create_connection((host, int(port))) for _ in range(200)]
    for name, connection in slow.items():
        connection.sendall(openings.get(name, head.encode() + b'{"prompt'))
    end, ended = time.monotonic() + 4, {}
    assert httpx.get(f"{url}/health").status_code == 200
    while len(ended) < len(slow) and time.monotonic() < end:
        for name, connection in slow.items():
            if name in ended:
                continue
            connection.settimeout(0.05)
            try:
                if name != "nothing":
                    connection.sendall(b"x")
                received = connection.recv(4096)
                ended[name] = received.split(b"\r\n")[0]
            except TimeoutError:
                continue
            except OSError:
                ended[name] = b""
    assert ended.keys() == slow.keys()
    assert ended["half a body"] in (b"HTTP/1.1 408 Request Timeout", b"")
    for connection in many:
        connection.settimeout(3)
        assert connection.recv(1) == b""
    for connection in [*many, *slow.values()]:
        connection.close()
    assert [request[:3] for request in stub.requests] == [("GET", "/health", b"")]


def test_second_request_of_a_connection_has_a_timeout_too(guarded):
    url = guarded()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        began = time.monotonic()
        assert connection.recv(4096) == b""
        assert time.monotonic() - began < 2


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="concurrency must be positive, got 0"):
        Limits(concurrency=0)
