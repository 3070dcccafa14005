"""A headless Chromium for tests of pages, driven by the DevTools protocol."""

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

from websockets.sync.client import connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip


class CommandError(Exception):
    """Raised when Chromium answers a command with an error."""


class Browser:
    """A browser tab; :attr:`problems` collects console errors and network requests."""

    def __init__(self):
        self._profile = tempfile.mkdtemp()
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = Path(self._profile, "DevToolsActivePort")
        end = time.monotonic() + 60
        while not port_file.is_file() or not port_file.read_text().strip():
            assert time.monotonic() < end, "Chromium does not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list") as pages:
            address = next(page for page in json.load(pages) if page["type"] == "page")["webSocketDebuggerUrl"]
        self._open = ExitStack()
        # Pings would use `random` in a thread, which Hypothesis reports in the test that runs at that time.
        self._socket = self._open.enter_context(connect(address, max_size=None, proxy=None, ping_interval=None))
        self._numbers = itertools.count(1)
        self.problems = []
        self.allowed = ("file:", "data:", "about:")  # beginnings of addresses that a page may request
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command and return its result; events that arrive before it are checked for problems."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                if "error" in message:
                    raise CommandError(message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message):
        name, content = message["method"], message["params"]
        if name == "Runtime.exceptionThrown":
            self.problems.append(content["exceptionDetails"]["exception"].get("description"))
        elif name == "Log.entryAdded" or (
            name == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(content)[:500])
        elif name == "Network.requestWillBeSent" and not content["request"]["url"].startswith(self.allowed):
            self.problems.append(f"a request to {content['request']['url']}")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression):
        """Wait until an expression is true; if the page is replaced meanwhile, evaluate it again."""
        end = time.monotonic() + 30
        while not self._evaluated(expression):
            assert time.monotonic() < end, f"not true in 30 s: {expression}"
            time.sleep(0.05)

    def _evaluated(self, expression):
        try:
            return self.evaluate(expression)
        except CommandError as error:
            if "navigated" not in str(error):
                raise
            return None

    def open(
        self, address, width=1280, height=900, dark=False, ready="document.documentElement?.dataset.ready === 'yes'"
    ):
        """Open a URL in a window of a size, and wait until it is ready."""
        self.leave()
        self.problems.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._navigate(address)
        self.wait(ready)

    def leave(self):
        """Open a blank page, so that the current one makes no further requests."""
        self._navigate("about:blank")

    def _navigate(self, address):
        self.call("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)}")

    def close(self):
        self._open.close()
        self._process.terminate()
        self._process.wait(30)
        shutil.rmtree(self._profile, ignore_errors=True)
