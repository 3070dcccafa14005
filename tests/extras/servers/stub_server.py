"""A server with the protocol of vLLM's, whose answers and faults a test sets; it generates nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_stand_in import HTTPStandIn
from tests.rollout.engines import MAX_TOKENS, setup_of, source_of

DONE = 200, {"message": "done"}
GENERATE = "/inference/v1/generate"


class StubServer:
    """Answers with ``answers[path]``, or 200.

    An answer is (status, body), whose bytes are sent as they are; None, which breaks the connection; or a function of
    the request's body that returns one of these.
    """

    def __init__(self):
        self.requested, self.answers, self.key, self.version = [], {}, None, "default"
        self.breaks = False  # whether all connections break
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._answer(None)

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                path = self.path.partition("?")[0]
                stub.requested.append((self.path, body))
                answer = stub.answers.get(path, DONE)
                if stub.key and self.headers["Authorization"] != f"Bearer {stub.key}":
                    answer = 401, {"error": "Unauthorized"}
                if callable(answer):
                    answer = answer(body)
                if answer is None or stub.breaks:
                    self.close_connection = True
                    return
                status, result = answer
                data = json.dumps(result).encode() if not isinstance(result, bytes) else result
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *message):
                pass

        class Server(HTTPStandIn):
            request_queue_size = 512

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def paths(self):
        return [path for path, _ in self.requested]

    def before_answers(self, path, action):
        """Call a function before each answer to a path, in the thread of the request; it may wait."""
        usual = self.answers.get(path, DONE)

        def answer(body):
            action()
            return usual(body) if callable(usual) else usual

        self.answers[path] = answer

    def changes_answer(self, edit):
        """Let a function edit the body of each response that it generates."""
        usual = self.answers[GENERATE]

        def answer(body):
            status, response = usual(body)
            edit(response)
            return status, response

        self.answers[GENERATE] = answer

    def restart(self):
        """Have other weights, as after a restart of the program."""
        self.version = "default"

    def bodies(self):
        """Return the bodies of all requests for responses."""
        return [body for path, body in self.requested if path == GENERATE]

    def generated(self):
        """Return for how many responses it was asked; a request with prompt_logprobs compares weights after a push."""
        return sum("prompt_logprobs" not in body["sampling_params"] for body in self.bodies())

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def serve_model(server, **changes):
    """Write the config of a server's model, with changes to the architecture of the tests."""
    setup_of(source_of(**changes), Path(server.config["model_config"]["model"]))


def valid_server(folder):
    """Return a server whose completions repeat the first token of the prompt as often as the prompt has tokens.

    Args:
        folder: folder for the config of its model.
    """
    server = StubServer()
    server.config = {
        "model_config": {
            "model": str(folder / "served"),
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": MAX_TOKENS,
        },
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
        "weight_transfer_config": {"backend": "shared_memory"},
    }
    serve_model(server)

    def relabel(name):
        def answer(body):
            server.version = body.get(name, server.version)
            return DONE

        return answer

    def generate(body):
        ids = body["token_ids"]
        count = min(len(ids), body.get("sampling_params", {}).get("max_tokens", len(ids)))
        choice = {
            "token_ids": ids[:1] * count,
            "finish_reason": "stop",
            "weight_versions": [{"version": server.version, "start": 0, "end": count}],
            "logprobs": {"content": [{"token_id": ids[0], "logprob": -0.5}] * count},
        }
        response = {"choices": [choice]}
        if "prompt_logprobs" in body.get("sampling_params", {}):
            response["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]
        return 200, response

    server.answers = {
        "/version": (200, {"version": "0.32.0"}),
        "/weight_info": lambda body: (200, {"weight_version": server.version}),
        "/server_info": lambda body: (200, {"vllm_config": server.config}),
        "/update_weight_version": relabel("new_version"),
        "/finish_weight_update": relabel("weight_version"),
        "/reset_prefix_cache": (200, {"success": True}),
        GENERATE: generate,
    }
    return server
