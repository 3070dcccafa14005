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


def test_a_run_has_a_page_with_its_metrics_and_responses(run, tmp_path):
    run(callbacks=[RolloutLog(), MetricsCSV(), ReportPage()]).fit()
    assert json.loads((tmp_path / "end.json").read_text()) == {"error": None}
    page = (tmp_path / "report.html").read_text()
    assert '"reward/mean": [' in page
    assert '"samples": [{"step": 1, "rows": [{"prompt": "' in page


def test_a_run_that_fails_has_a_page_until_its_last_step_and_its_own_error(run, tmp_path):
    callbacks = [MetricsCSV(), ReportPage()]
    with pytest.raises(Exception, match="broken reward"):
        run(loop={"rewards": [RewardFunction(fails_later)]}, callbacks=callbacks).fit()
    page = (tmp_path / "report.html").read_text()
    assert '"training": {"step": [1]' in page
    assert '"state": "failed"' in page
    assert "broken reward" in json.loads((tmp_path / "end.json").read_text())["error"]


def test_the_end_of_the_run_that_is_continued_is_removed(run, tmp_path):
    (tmp_path / "end.json").write_text('{"error": "an earlier one"}')
    seen = []

    class Seen(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append((tmp_path / "end.json").exists())

    run(callbacks=[ReportPage(), Seen()]).fit()
    assert seen == [False]


def test_an_interrupted_run_has_ended(run, tmp_path):
    page, made = ReportPage(), run(callbacks=[MetricsCSV()])
    made.fit()
    page.on_exception(made.trainer, made.module, KeyboardInterrupt())
    assert json.loads((tmp_path / "end.json").read_text()) == {"error": "KeyboardInterrupt"}


def test_an_error_of_the_page_does_not_hide_that_of_the_run(run, tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    callbacks = [MetricsCSV(), ReportPage()]
    with pytest.raises(Exception, match="broken reward"):
        run(loop={"rewards": [RewardFunction(fails_later)]}, callbacks=callbacks).fit()
    assert "report.html was not written: IsADirectoryError" in caplog.text


def test_an_error_of_the_page_does_not_fail_a_run(run, tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    run(callbacks=[MetricsCSV(), ReportPage()]).fit()
    assert "report.html was not written: IsADirectoryError" in caplog.text


def test_without_metrics_there_is_no_page(run, tmp_path):
    run(callbacks=[ReportPage()]).fit()
    assert not (tmp_path / "report.html").exists()
