"""Several versions, saves at time intervals, and copies at a URL that resume a run whose local disk is lost."""

import logging
import shutil
from types import SimpleNamespace

import fsspec
import pytest
import torch

from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.callbacks.survival.checkpoint import checkpoint_to_resume
from lightning_rlhf.extras.remote_checkpoints import copies as remote
from lightning_rlhf.strategies import registry as registry  # the names of our strategies
from lightning_rlhf.strategies.checkpoints import manifest
from tests.faults.runs import assert_same, callback, checkpoint, output, ppo, rows
from tests.stand_ins import quiet_trainer


def with_checkpoints(every, max_steps=12, **arguments):
    config = ppo(every, max_steps=max_steps, val_check_interval=3, check_val_every_n_epoch=None)
    config["trainer"]["callbacks"] = [
        entry for entry in config["trainer"]["callbacks"] if not entry["class_path"].endswith(".RunCheckpoint")
    ]
    config["trainer"]["callbacks"].append(callback("RunCheckpoint", every_n_steps=every, **arguments))
    return config


@pytest.mark.slow
def test_earlier_version_leads_to_the_same_end_as_an_uninterrupted_run(forge, undisturbed, tmp_path):
    config = with_checkpoints(2, keep_last=3)
    assert forge.attempt(tmp_path, with_checkpoints(2, max_steps=8, keep_last=3)) == 0
    last = tmp_path / "run/checkpoints/last.ckpt"
    assert manifest.kept_versions(last) == ["v000004", "v000003", "v000002"]
    assert manifest.step_of(last) == 8
    assert forge.attempt(tmp_path, config, resume="run/checkpoints/last.ckpt/v000002") == 0
    reference = undisturbed(with_checkpoints(2))
    assert rows(tmp_path) == rows(reference)
    for file in ("export/model.safetensors", "export/config.json"):
        assert (tmp_path / "run" / file).read_bytes() == (reference / "run" / file).read_bytes()


def test_saves_by_minutes_are_independent_of_saves_by_steps_and_need_room(tmp_path, monkeypatch, caplog):
    clock, free = [0.0], [2399]  # bytes: 100 trained weights of 8 bytes with two moments need 2400
    monkeypatch.setattr("lightning_rlhf.callbacks.survival.checkpoint.time.monotonic", lambda: clock[0])
    usage = "lightning_rlhf.callbacks.survival.checkpoint.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda path: SimpleNamespace(free=free[0]))
    monkeypatch.setattr("lightning_rlhf.callbacks.survival.checkpoint.training_ends", lambda trainer: False)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    module = torch.nn.Linear(10, 10, bias=False, dtype=torch.float64)
    trainer = SimpleNamespace(default_root_dir=tmp_path, global_step=7, lightning_module=module, callbacks=[])
    saved = RunCheckpoint(every_n_steps=1000)
    due = []
    for clock[0], free[0] in ((1.0, 2400), (599.0, 2400), (600.0, 2399), (601.0, 2400), (1200.0, 2400)):
        due.append(saved._due(trainer))
    assert due == [False, False, False, False, True]
    (line,) = caplog.messages
    assert line.startswith("No checkpoint is written 10 minutes after the last one: it needs about 0.0 GB, and ")
    assert RunCheckpoint(every_n_minutes=None)._due(trainer) is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_minutes": 0}, "every_n_minutes must be positive or null, got 0"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"best": "val/x", "keep_last": 2}, "every_n_minutes and keep_last apply to the last checkpoint"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        RunCheckpoint(**arguments)


def test_url_without_write_access_is_rejected_before_training(tmp_path):
    saved = RunCheckpoint(copy_to="nowhere://bucket/run")
    trainer = quiet_trainer(
        callbacks=[saved], strategy="rlhf_single", enable_checkpointing=True, default_root_dir=tmp_path
    )
    with pytest.raises(ValueError, match=r"cannot copy to 'nowhere://bucket/run': .*; use the URL of a folder that"):
        saved.setup(trainer, None, "fit")


def finished(folder, number):
    version = manifest.begin(folder)
    (version / "actor").mkdir()
    (version / "actor/optimizer.json").write_text(str(number))
    (version / "state.pt").write_bytes(bytes([number]) * 1000)
    manifest.publish(version)
    return version


@pytest.fixture
def bucket():
    url = "memory://bucket/run/last.ckpt"
    yield url
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_copy_is_verified_like_other_checkpoints_and_holds_one_version(tmp_path, bucket):
    for number in (1, 2):
        remote.upload(finished(tmp_path / "last.ckpt", number), bucket)
    files = fsspec.filesystem("memory").find("/bucket")
    assert {file.split("last.ckpt/")[1] for file in files} == {
        "manifest.json",
        "v000002/actor/optimizer.json",
        "v000002/state.pt",
    }
    remote.download(bucket, tmp_path / "fetched")
    assert manifest.verified(tmp_path / "fetched").name == "v000002"
    assert (tmp_path / "fetched/v000002/state.pt").read_bytes() == b"\2" * 1000


def test_interrupted_copy_leaves_the_previous_one(tmp_path, bucket, monkeypatch):
    remote.upload(finished(tmp_path / "last.ckpt", 1), bucket)
    fs = type(fsspec.filesystem("memory"))
    put = fs.put_file

    def fail(self, source, target, **options):
        if "state.pt" in target:
            raise OSError("the network is gone")
        put(self, source, target, **options)

    monkeypatch.setattr(fs, "put_file", fail)
    version = finished(tmp_path / "last.ckpt", 2)
    with pytest.raises(OSError, match="the network is gone"):
        remote.upload(version, bucket)
    remote.download(bucket, tmp_path / "fetched")
    assert manifest.verified(tmp_path / "fetched").name == "v000001"


def test_damaged_copy_is_detected(tmp_path, bucket):
    remote.upload(finished(tmp_path / "last.ckpt", 1), bucket)
    fsspec.filesystem("memory").pipe_file("/bucket/run/last.ckpt/v000001/state.pt", b"other")
    remote.download(bucket, tmp_path / "fetched")
    with pytest.raises(ValueError, match=r"state\.pt does not have the size and SHA-256"):
        manifest.verified(tmp_path / "fetched")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at memory://bucket/none: there is no manifest\.json"):
        remote.download("memory://bucket/none", tmp_path / "fetched")


@pytest.mark.slow
def test_run_whose_disk_is_lost_resumes_from_the_copy(forge, undisturbed, tmp_path):
    url = f"file://{tmp_path}/store/run"
    assert forge.attempt(tmp_path, with_checkpoints(2, max_steps=8, copy_to=url)) == 0
    shutil.rmtree(tmp_path / "run")
    assert forge.attempt(tmp_path, with_checkpoints(2, copy_to=url), resume="last") == 0
    assert "has no last.ckpt yet" not in output(tmp_path)
    reference = undisturbed(with_checkpoints(2))
    assert checkpoint(tmp_path)["global_step"] == 12
    for file in ("export/model.safetensors", "export/config.json"):
        assert (tmp_path / "run" / file).read_bytes() == (reference / "run" / file).read_bytes()
    ours, theirs = ([dict(row) for row in rows(directory)[-3:]] for directory in (tmp_path, reference))
    assert ours == theirs
    assert not (tmp_path / "run/checkpoints/fetched.ckpt").exists()


def test_failed_copy_warns_and_a_failed_last_copy_fails_the_run(tmp_path, caplog):
    saved = RunCheckpoint(copy_to=f"file://{tmp_path}/file/run")
    (tmp_path / "file").touch()
    saved.dirpath = str(tmp_path)
    saved._copy(finished(tmp_path / "last.ckpt", 1))
    assert isinstance(saved._copy_failed, OSError)
    (tmp_path / "file").unlink()
    saved._copy(finished(tmp_path / "last.ckpt", 2))
    assert saved._copy_failed is None


def test_last_selects_the_local_checkpoint_then_the_copy_and_is_rejected_if_others_exist(tmp_path):
    url = f"file://{tmp_path}/store"
    saved = RunCheckpoint(copy_to=url)
    trainer = quiet_trainer(callbacks=[saved], enable_checkpointing=True, default_root_dir=tmp_path / "run")
    assert checkpoint_to_resume(trainer) is None
    best = finished(tmp_path / "run/checkpoints/best.ckpt", 1)
    with pytest.raises(ValueError, match=r"has best\.ckpt but no last\.ckpt: resume with --ckpt_path .*best\.ckpt, or"):
        checkpoint_to_resume(trainer)
    remote.upload(best, f"{url}/last.ckpt")
    assert checkpoint_to_resume(trainer) == f"{url}/last.ckpt"
    last = finished(tmp_path / "run/checkpoints/last.ckpt", 3).parent
    assert checkpoint_to_resume(trainer) == str(last)
    (last / manifest.NAME).unlink()
    assert checkpoint_to_resume(trainer) == str(last)  # reading it raises, because its manifest is missing


@pytest.mark.slow
def test_run_with_a_lost_manifest_is_rejected_for_last_and_for_its_path(forge, tmp_path):
    assert forge.attempt(tmp_path, ppo(1, max_steps=2)) == 0
    (tmp_path / "run/checkpoints/last.ckpt/manifest.json").unlink()
    table = rows(tmp_path)
    for resume in ("last", "run/checkpoints/last.ckpt"):
        assert forge.attempt(tmp_path, ppo(1, max_steps=3), resume=resume) == 2
        last = output(tmp_path).strip().splitlines()[-1]
        assert "has no manifest.json: its manifest is lost; resume from another" in last
    assert rows(tmp_path) == table
    assert (tmp_path / "run/checkpoints/last.ckpt/v000002/state.pt").is_file()


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_is_written(forge, undisturbed, tmp_path):
    config = ppo(every=4)
    position = ("lightning_rlhf.strategies.checkpoints.manifest:publish", 2, ["slow"])
    assert forge.attempt(tmp_path, config, position=position) == 0
    assert_same(tmp_path, undisturbed(config))
    written = output(tmp_path).index("slow")
    steps = [output(tmp_path).index(f"step {step}:") for step in (4, 6)]
    assert steps[0] < written < steps[1] < output(tmp_path).index("slow is over")


@pytest.mark.slow
def test_versions_of_a_new_machine_are_numbered_after_those_of_the_copy(forge, tmp_path):
    url = f"file://{tmp_path}/store/run"
    assert forge.attempt(tmp_path, with_checkpoints(4, max_steps=4, copy_to=url)) == 0
    assert remote.newest(f"{url}/last.ckpt") == 1
    shutil.rmtree(tmp_path / "run")
    assert forge.attempt(tmp_path, with_checkpoints(4, max_steps=8, copy_to=url), resume="last") == 0
    assert manifest.kept_versions(tmp_path / "run/checkpoints/last.ckpt") == ["v000002"]
    assert manifest.kept_versions(tmp_path / "store/run/last.ckpt") == ["v000002"]
    # a run from the beginning would replace the copy
    assert forge.attempt(tmp_path, with_checkpoints(4, max_steps=8, copy_to=url)) == 2
    assert "is a checkpoint of an earlier run, which this run would replace" in output(tmp_path).splitlines()[-1]
    assert (tmp_path / "run/checkpoints/last.ckpt/v000002/state.pt").is_file()


@pytest.mark.slow
def test_validate_without_a_last_checkpoint_is_rejected(forge, tmp_path):
    config = with_checkpoints(2, max_steps=2)
    assert forge.attempt(tmp_path, config, resume="last", command="validate") == 2
    assert "run has no last checkpoint to validate: remove --ckpt_path" in output(tmp_path).splitlines()[-1]


@pytest.mark.slow
def test_run_that_ends_in_a_validation_keeps_its_last_step(forge, tmp_path):
    config = with_checkpoints(100, max_steps=12)
    stop = {"monitor": "val/digits_sampled", "mode": "min", "patience": 1, "strict": True}
    config["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": stop}
    )
    assert forge.attempt(tmp_path, config) == 0
    steps = [line.split(":")[0] for line in output(tmp_path).splitlines() if "reward/mean" in line]
    assert len(steps) < 12
    assert f"step {checkpoint(tmp_path)['global_step']}" == steps[-1]


def test_client_errors_of_a_store_are_warnings_like_others(tmp_path, monkeypatch):
    class OfTheClient(Exception):
        pass

    def fail(url):
        raise OfTheClient("no credentials")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    saved = RunCheckpoint(copy_to="memory://bucket")
    saved._copy(finished(tmp_path / "last.ckpt", 1))
    assert "OfTheClient: no credentials" in str(saved._copy_failed)


def test_checkpoint_of_another_branch_is_not_used_for_the_run(tmp_path):
    saved = RunCheckpoint()
    saved.dirpath = str(tmp_path)
    version = manifest.begin(saved.path)
    manifest.publish(version, step=47)
    assert saved.saved_step is None
    saved._own_steps.add(47)
    assert saved.saved_step == 47
