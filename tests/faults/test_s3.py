"""Copies of checkpoints on an S3 server; needs s3fs and moto[server], which the project does not install."""

import pytest

from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.callbacks.survival.checkpoint import checkpoint_to_resume
from lightning_rlhf.extras.remote_checkpoints import copies as remote
from lightning_rlhf.strategies.checkpoints import manifest
from tests.faults.test_copies import finished
from tests.stand_ins import quiet_trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of an S3 server in this process."""
    s3fs = pytest.importorskip("s3fs", reason="needs pip install s3fs 'moto[server]'")
    server = pytest.importorskip("moto.server", reason="needs pip install s3fs 'moto[server]'").ThreadedMotoServer(
        port=0
    )
    server.start()
    host, port = server.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket{port}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/runs/x"
    server.stop()


def test_checkpoints_are_copied_to_s3_and_resumed_from_there(bucket, tmp_path):
    remote.check_url(bucket)
    url = f"{bucket}/last.ckpt"
    assert not remote.exists(url)
    for number in (1, 2, 3):
        remote.upload(finished(tmp_path / "last.ckpt", number), url)
    assert remote.exists(url)
    remote.download(url, tmp_path / "fetched")
    version = manifest.verified(tmp_path / "fetched")
    assert version.name == "v000003"
    assert (version / "state.pt").read_bytes() == b"\3" * 1000
    trainer = quiet_trainer(
        callbacks=[RunCheckpoint(copy_to=bucket)], enable_checkpointing=True, default_root_dir=tmp_path / "run"
    )
    assert checkpoint_to_resume(trainer) == url
