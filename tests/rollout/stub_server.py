"""A server with the protocol of vLLM's, whose answers and faults a test sets; it generates nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubServer:
    """Answers with ``answers[path]``: (status, body), bytes before a break, or a function of the request's body."""

    def __init__(self):
        self.requested, self.answers, self.key, self.version = [], {}, None, "default"
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
                answer = stub.answers.get(path, (200, {}))
                if stub.key and self.headers["Authorization"] != f"Bearer {stub.key}":
                    answer = 401, {"error": "Unauthorized"}
                if callable(answer):
                    answer = answer(body)
                if answer is None:  # breaks off
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

        class Server(ThreadingHTTPServer):
            request_queue_size = 512
            daemon_threads = True

            def handle_error(self, request, client_address):  # a client that waits no longer
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def paths(self):
        return [path for path, _ in self.requested]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
