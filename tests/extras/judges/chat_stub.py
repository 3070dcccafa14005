"""A chat server on the loopback whose answers a function gives; it counts and keeps the questions."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler

from lightning_rlhf.extras.judges.asking import Judge
from lightning_rlhf.extras.judges.endpoint import Endpoint
from tests.http_stand_in import HTTPStandIn


class ChatStub:
    """Answers each question with what ``answer`` returns for its text; other attributes describe the requests."""

    def __init__(self, answer):
        self.answer = answer
        self.bodies = []
        self.delay_s = 0.0
        self.finish_reason = "stop"
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    stub.bodies.append(body)
                time.sleep(stub.delay_s)
                answer = stub.answer(text_of(body))
                message = {"role": "assistant", "content": answer}
                reply = {
                    "choices": [{"message": message, "finish_reason": stub.finish_reason}],
                    "usage": {"total_tokens": 10},
                }
                payload = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *arguments):
                pass

        self.server = HTTPStandIn(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/chat/completions"

    @property
    def texts(self):
        return [text_of(body) for body in self.bodies]

    def judge(self, limits=None, **options):
        """Return a judge that asks this server."""
        return Judge(Endpoint(self.url, **(limits or {})), **({"model": "judge"} | options))

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def text_of(body):
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def criterion_of(text):
    """Return the question of the criterion at the end of a text."""
    return text.rpartition("Criterion: ")[2].partition("\n")[0]


def grade(number):
    return json.dumps({"reason": "because", "grade": number})
