"""The report page at the end of a run, whether it succeeds or fails."""

import json

import pytest
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import MetricsCSV, ReportPage, RolloutLog
from lightning_rlhf.rewards.function import RewardFunction


def fails_later(completions, trainer_state):
    if trainer_state.global_step == 1:
        raise KeyError("broken reward")
    return [1.0 for _ in completions]


def test_run_has_a_page_with_its_metrics_and_responses(run, tmp_path):
    run(callbacks=[RolloutLog(), MetricsCSV(), ReportPage()]).fit()
    assert json.loads((tmp_path / "end.json").read_text()) == {"error": None}
    page = (tmp_path / "report.html").read_text()
    assert '"reward/mean": [' in page
    assert '"samples": [{"step": 1, "rows": [{"prompt": "' in page
    assert '"engine": "a script"' in page


def test_failed_run_has_a_page_up_to_its_last_step_and_its_error(run, tmp_path):
    callbacks = [MetricsCSV(), ReportPage()]
    with pytest.raises(Exception, match="broken reward"):
        run(loop={"rewards": [RewardFunction(fails_later)]}, callbacks=callbacks).fit()
    page = (tmp_path / "report.html").read_text()
    assert '"training": {"step": [1]' in page
    assert '"state": "failed"' in page
    assert "broken reward" in json.loads((tmp_path / "end.json").read_text())["error"]


def test_resumed_run_removes_the_recorded_end(run, tmp_path):
    (tmp_path / "end.json").write_text('{"error": "an earlier one"}')
    seen = []

    class Seen(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append((tmp_path / "end.json").exists())

    run(callbacks=[ReportPage(), Seen()]).fit()
    assert seen == [False]


def test_interrupted_run_is_recorded_as_ended(run, tmp_path):
    page, made = ReportPage(), run(callbacks=[MetricsCSV()])
    made.fit()
    page.on_exception(made.trainer, made.module, KeyboardInterrupt())
    assert json.loads((tmp_path / "end.json").read_text()) == {"error": "KeyboardInterrupt"}


def test_error_of_the_page_does_not_hide_the_error_of_the_run(run, tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    callbacks = [MetricsCSV(), ReportPage()]
    with pytest.raises(Exception, match="broken reward"):
        run(loop={"rewards": [RewardFunction(fails_later)]}, callbacks=callbacks).fit()
    assert "report.html was not written: IsADirectoryError" in caplog.text


def test_error_of_the_page_does_not_fail_a_run(run, tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    run(callbacks=[MetricsCSV(), ReportPage()]).fit()
    assert "report.html was not written: IsADirectoryError" in caplog.text


def test_error_of_the_engines_file_does_not_fail_a_run(run, tmp_path, caplog):
    (tmp_path / "engine.json").mkdir()
    run(callbacks=[MetricsCSV(), ReportPage()]).fit()
    assert "engine.json was not written: IsADirectoryError" in caplog.text


def test_run_without_metrics_has_no_page(run, tmp_path):
    run(callbacks=[ReportPage()]).fit()
    assert not (tmp_path / "report.html").exists()
