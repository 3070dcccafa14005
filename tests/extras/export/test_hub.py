"""Uploads of exports, to a stand-in of the hub that speaks its protocol on loopback."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler

import huggingface_hub.constants
import pytest
from transformers import AutoModelForCausalLM

from lightning_rlhf.callbacks import HFExport
from tests.http_stand_in import HTTPStandIn

TOKEN = "hf_of_the_test"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # huggingface_hub's own use of httpx2


class Hub:
    """Keeps the files of repositories: small ones in commits, weights by Git LFS.

    Attributes:
        repositories: files of each repository by their names.
        commits: messages of the commits.
        created: requests for new repositories.
        status: status with which a kind of request is answered, if not 200.
    """

    def __init__(self):
        self.repositories, self.commits, self.created, self.status, self._objects = {}, [], [], {}, {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                kind = next((each for each in hub.status if each in self.path), None)
                status, answer = (hub.status[kind], {"error": "no"}) if kind else hub.answer(self, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_HEAD = _answer

        self._server = HTTPStandIn(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, request, body):
        path = request.path.partition("?")[0]
        if path.startswith("/lfs/"):
            self._objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            made = json.loads(body)
            self.created.append(made)
            name = f"{made['organization']}/{made['name']}" if made.get("organization") else f"me/{made['name']}"
            self.repositories.setdefault(name, {})
            return 200, {"url": f"{self.url}/{name}"}
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            actions = [
                {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
                for each in wanted
                if each["oid"] not in self._objects
            ]
            return 200, {"objects": actions, "transfer": "basic"}
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": file, "uploadMode": _mode(file), "shouldIgnore": False, "oid": None} for file in files]
            return 200, {"files": modes}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                self._apply(self.repositories[name], line["key"], line["value"])
            return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        if "/tree/" in path:
            files = self.repositories[name].items()
            return 200, [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files]
        if path == "/api/validate-yaml":
            return 200, {"warnings": []}
        return 200, {
            "id": name,
            "sha": "1",
            "siblings": [{"rfilename": file} for file in self.repositories.get(name, ())],
        }

    def _apply(self, files, kind, value):
        if kind == "header":
            self.commits.append(value["summary"])
        elif kind == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            files[value["path"]] = self._objects[value["oid"]]
            assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
        elif kind == "deletedFile":
            del files[value["path"]]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def _mode(file):
    return "lfs" if file.endswith(".safetensors") else "regular"


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    made.close()


def test_final_export_is_uploaded_and_replaces_an_earlier_one(run, hub, tmp_path, caplog):
    hub.repositories["me/model"] = {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    caplog.set_level("INFO")
    run(callbacks=[HFExport(every_n_steps=1, push_to="me/model")]).fit()
    files = hub.repositories["me/model"]
    assert files.pop("notes.txt") == b"mine"
    assert sorted(files) == sorted(path.name for path in (tmp_path / "export").iterdir())
    for name, data in files.items():
        assert (tmp_path / "export" / name).read_bytes() == data
    (tmp_path / "fetched").mkdir()
    for name, data in files.items():
        (tmp_path / "fetched" / name).write_bytes(data)
    AutoModelForCausalLM.from_pretrained(tmp_path / "fetched", use_safetensors=True)
    assert hub.commits == ["lightning-rlhf: step 2"]
    assert [made["visibility"] for made in hub.created] == ["private"]
    assert "Uploaded" in caplog.text
    assert TOKEN not in caplog.text


def test_repository_can_be_public(run, hub):
    run(callbacks=[HFExport(push_to="me/model", private=False)]).fit()
    assert [made["visibility"] for made in hub.created] == ["public"]


@pytest.mark.parametrize(
    ("repository", "token", "status", "message"),
    [
        ("me/model", "wrong", {}, "which this token may not create or change: set HF_TOKEN"),
        ("me/model", TOKEN, {"auth-check": 403}, "which this token may not create or change: set HF_TOKEN"),
        ("me/model", TOKEN, {"repos/create": 500}, "push_to is me/model, which could not be created: .*500"),
        ("me/a/model", TOKEN, {}, "push_to must be owner/name of a repository, got 'me/a/model'"),
        ("me/mo del", TOKEN, {}, "push_to must be owner/name of a repository, got 'me/mo del'"),
    ],
)
def test_upload_that_would_fail_ends_the_run_before_it_trains(
    run, hub, monkeypatch, repository, token, status, message
):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.status = status
    made = run(callbacks=[HFExport(push_to=repository)])
    with pytest.raises(ValueError, match=message):
        made.fit()
    assert made.trainer.global_step == 0
    assert hub.commits == []


def test_hub_that_cannot_be_reached_ends_the_run_before_it_trains(run, hub, monkeypatch):
    hub.close()
    with pytest.raises(
        ValueError, match=r"the hub cannot be reached .*: remove push_to .*'hf upload me/model DIRECTORY'"
    ):
        run(callbacks=[HFExport(push_to="me/model")]).fit()


def test_failed_upload_loses_nothing_and_says_how_to_repeat_it(run, hub, tmp_path, caplog):
    made = run(callbacks=[HFExport(push_to="me/model")])
    hub.status = {"/commit/": 413}
    made.fit()
    assert (tmp_path / "export/model.safetensors").is_file()
    assert f"It is complete: run 'hf upload me/model {tmp_path}/export' to try again." in caplog.text
    assert hub.repositories["me/model"] == {}


def test_nothing_is_uploaded_in_a_fast_dev_run_or_a_validation(run, hub):
    run(callbacks=[HFExport(push_to="me/model")], trainer={"fast_dev_run": True}).fit()
    assert hub.created == hub.commits == []
