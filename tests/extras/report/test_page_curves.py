"""Curves, health checks and the state of the controls on the report page, from data defined here."""

import re
from pathlib import Path

import pytest

from lightning_rlhf.extras.report import page as page_module
from tests.extras.report.page_data import page, run, table
from tests.extras.report.test_report_page import chart

pytestmark = pytest.mark.timeout(180)
CSS = (Path(page_module.__file__).parent / "assets/report.css").read_text()


def legend(metric):
    return (
        f"[...document.querySelectorAll('[data-metric=\"{metric}\"] .u-series')].map((own) => "
        "own.querySelector('.u-label').textContent + '=' + own.querySelector('.u-value').textContent)"
    )


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_defined():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1])
def test_colors_of_runs_and_texts_contrast_with_the_panel(theme):
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", CSS)
    colours = {name: [re.sub(r"^#(.)(.)(.)$", r"#\1\1\2\2\3\3", item) for item in both][theme] for name, *both in pairs}
    series = [colour for name, colour in colours.items() if name.startswith("series-")]
    assert len(set(series)) == 8
    assert min(contrast(colour, colours["panel"]) for colour in series) >= 3
    for name in ("text", "muted", "accent", "bad", "failed"):
        assert min(contrast(colours[name], colours[ground]) for ground in ("panel", "ground")) >= 4.5, name


@pytest.mark.parametrize("dark", [False, True])
def test_curves_have_the_colors_of_the_theme(show, dark):
    browser = show(page(run("a"), run("b")), dark=dark)
    expected = ["rgb(106, 168, 247)", "rgb(255, 159, 69)"] if dark else ["rgb(31, 111, 214)", "rgb(194, 98, 0)"]
    series = "document.querySelector('.chart').plot.series.slice(1).map((own) => own.stroke())"
    assert browser.evaluate(series) == expected
    keys = "[...document.querySelectorAll('.runs .key')].map((own) => getComputedStyle(own).backgroundColor)"
    assert browser.evaluate(keys) == expected


def test_legend_has_the_last_value_of_each_run(show):
    shorter = run("b", training=table(step=[1, 2], reward__mean=[0.1, 0.7]))
    browser = show(page(run("a"), shorter))
    assert browser.evaluate(legend("reward/mean")) == ["steps=3", "a=0.4", "b=0.7 at 2"]
    browser.evaluate("document.querySelector('.chart').plot.setCursor({ left: 1, top: 10 }), 0")
    assert browser.evaluate(legend("reward/mean")) == ["steps=1", "a=0.1", "b=0.1"]


def test_legend_has_the_bounds_of_an_interval(show):
    validation = table(
        step=[0, 2],
        val__fraction_correct_greedy=[0.25, 0.75],
        val__fraction_correct_greedy_low=[0.2, 0.7],
        val__fraction_correct_greedy_high=[0.3, 0.8],
    )
    browser = show(page(run(validation=validation)))
    entries = "[...document.querySelectorAll('[data-metric=\"val/fraction_correct_greedy\"] .u-series')]"
    shown = browser.evaluate(f"{entries}.filter((own) => own.offsetHeight).map((own) => own.textContent)")
    assert shown == ["steps2", "fraction_correct_greedy0.75 (95 %: 0.7 to 0.8)"]
    browser.evaluate("document.getElementById('smoothing').value = 0.5, window.report.redraw()")
    assert (
        browser.evaluate(legend("val/fraction_correct_greedy"))[2]
        == "fraction_correct_greedy (smoothed)=0.5833 (95 %: 0.5333 to 0.6333)"
    )


@pytest.mark.parametrize("name", ["reward/mean", "mine", "constructor", "__proto__", "val/fraction_correct_greedy"])
def test_metric_in_only_one_table_is_drawn_at_its_steps(show, name):
    validation = {"step": [2, 4], name: [0.5, 0.75]}
    empty = {"step": [1, 2], name: [None, None], "no/values": [None, None]}
    browser = show(
        page(
            run("a", training=table(step=[1, 2], train__loss=[2.0, 1.0]), validation=validation),
            run("b", training=empty),
            run("c", training={"step": []}),
        ),
    )
    browser.evaluate("document.querySelectorAll('.groups details').forEach((own) => own.open = true)")
    browser.wait(f"document.querySelector('[data-metric=\"{name}\"]') !== null")
    assert browser.evaluate(chart(name)) == [[2, 4], [0.5, 0.75]]
    assert browser.evaluate(chart("train/loss")) == [[1, 2], [2, 1]]
    assert browser.evaluate("document.querySelector('[data-metric=\"no/values\"]')") is None
    assert not browser.problems


def test_smoothed_curves_are_marked_and_drawn_over_raw_values(show):
    browser = show(page(run()), fragment="#smoothing=0.5")
    _, raw, smoothed = browser.evaluate(chart("reward/mean"))
    assert raw == [0.1, 0.2, 0.4]
    assert smoothed == pytest.approx([0.1, (0.05 + 0.2) / 1.5, (0.025 + 0.1 + 0.4) / 1.75])
    shown = [text for text in browser.evaluate(legend("reward/mean")) if text.startswith("mean")]
    assert shown == ["mean (smoothed)=0.3"]
    assert browser.evaluate("getComputedStyle(document.querySelector('.u-legend .unlisted')).display") == "none"


def test_address_keeps_the_controls_and_the_section(show):
    browser = show(page(run()))
    browser.evaluate("smoothing.value = 0.5, smoothing.dispatchEvent(new Event('change')), 0")
    browser.evaluate("axis.value = 'seconds', axis.dispatchEvent(new Event('change')), log.click(), 0")
    assert browser.evaluate("location.hash") == "#smoothing=0.5&axis=seconds&log=true"
    browser.evaluate("document.querySelector('a[href=\"#configuration\"]').click()")
    browser.wait("location.hash === '#configuration&smoothing=0.5&axis=seconds&log=true'")
    browser = show(page(run()), fragment="#configuration&smoothing=0.5&axis=seconds&log=true", height=300)
    assert browser.evaluate("[smoothing.value, axis.value, log.checked]") == ["0.5", "seconds", True]
    assert browser.evaluate("scrollY") > 100
    browser.evaluate("log.click(), axis.value = 'step', axis.dispatchEvent(new Event('change')), 0")
    assert browser.evaluate("location.hash") == "#configuration&smoothing=0.5"
    browser = show(page(run()), fragment="#axis=nonsense&smoothing=x")
    assert browser.evaluate("axis.value") == "step"
    assert not browser.problems


def test_log_scale_is_offered_for_positive_curves(show):
    training = table(step=[1, 2], reward__mean=[-1.0, 2.0], kl__ref=[0.001, 1.0], grad_norm__actor=[1.0, 1.02])
    browser = show(page(run(training=training)), fragment="#log=true")
    kinds = "[...document.querySelectorAll('.chart')].map((box) => [box.dataset.metric, box.plot.scales.y.distr])"
    assert dict(browser.evaluate(kinds)) == {"reward/mean": 1, "kl/ref": 3, "grad_norm/actor": 3}
    assert "above 0" in browser.evaluate("document.querySelector('[data-metric=\"reward/mean\"]').textContent")
    marks = "document.querySelector('[data-metric=\"{}\"]').plot.axes[1]._splits"
    assert browser.evaluate(marks.format("kl/ref")) == pytest.approx([0.001, 0.01, 0.1, 1])
    assert browser.evaluate(marks.format("grad_norm/actor")) == pytest.approx([0.95, 1, 1.05, 1.1])
    assert not browser.problems


def test_zoom_can_be_undone(show):
    browser = show(page(run()))
    plot = "document.querySelector('.chart').plot"
    assert browser.evaluate("document.getElementById('reset').hidden")
    assert "double-click" in browser.evaluate("document.getElementById('curves').innerText")
    drag = (
        f"(() => {{ const over = {plot}.over, box = over.getBoundingClientRect(), at = (kind, x) => "
        "(kind === 'mouseup' ? document : over).dispatchEvent(new MouseEvent(kind, { clientX: box.left + x, clientY: "
        "box.top + 20, movementX: 5, button: 0, bubbles: true }));"
        "at('mousemove', 10); at('mousedown', 10); at('mousemove', box.width / 2); at('mouseup', box.width / 2); })()"
    )
    browser.evaluate(drag)
    browser.wait(f"{plot}.scales.x.max < 2.5")
    assert not browser.evaluate("document.getElementById('reset').hidden")
    browser.evaluate("document.getElementById('reset').click()")
    browser.wait(f"{plot}.scales.x.max === 3")
    assert browser.evaluate("document.getElementById('reset').hidden")


def test_charts_have_units_definitions_and_labels(show):
    definitions = {
        "reward/mean": {"unit": "reward", "meaning": "before <b>any</b> penalty"},
        "kl/ref": {"unit": "nats", "meaning": ""},
        "policy/clip_fraction": {"unit": "fraction", "meaning": "fraction of tokens"},
    }
    training = table(step=[1, 2, 3], reward__mean=[0.1, None, 0.4], kl__ref=[1.0, 2.0, None])
    training["policy/clip_fraction"] = [0.5, 0.5, 0.25]
    browser = show(page(run(training=training), definitions=definitions))
    texts = browser.evaluate("[...document.querySelectorAll('.definition')].map((own) => own.textContent)")
    assert texts == ["reward: before <b>any</b> penalty", "nats", "fraction of tokens"]
    names = "[...document.querySelectorAll('.chart canvas')].map((own) => own.role + ' ' + own.ariaLabel)"
    assert browser.evaluate(names) == [
        "img reward/mean: 0.1 at step 1, 0.4 at step 3", "img kl/ref: 1 at step 1, 2 at step 2",
        "img policy/clip_fraction: 0.5 at step 1, 0.25 at step 3",
    ]  # fmt: skip


def test_checks_that_ran_are_listed(show):
    states = ["passed", "passed", "failed", "no data", "too early", "too early", "not applicable"]
    checks = [{"name": f"check {i}", "state": state, "note": f"note {i}"} for i, state in enumerate(states)]
    browser = show(page(run(checks=checks)))
    summary = "document.querySelector('.checks summary').textContent"
    expected = "3 checks ran, 1 of them failed, 1 had no data, 2 need more steps, 1 does not apply to this run"
    assert browser.evaluate(summary) == expected
    assert not browser.evaluate("document.querySelector('.checks').open")
    assert browser.evaluate("document.querySelectorAll('.checks tr').length") == 7
    assert "note 3" in browser.evaluate("document.querySelector('.checks').textContent")


def test_failed_run_has_a_separate_color_and_its_complete_error(show):
    error = "RunError: " + "reward failed, set {function: x} " * 20 + "x" * 300 + " END"
    for width in (390, 900, 1400):
        browser = show(page(run(state="failed", error=error)), width=width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        inside = (
            "(() => { const box = document.querySelector('.finding pre'), range = new Range(); "
            "range.selectNodeContents(box); return [box.textContent.endsWith('END'), "
            "box.scrollHeight <= box.clientHeight, range.getBoundingClientRect().right <= innerWidth]; })()"
        )
        assert browser.evaluate(inside) == [True, True, True]
    colour = "getComputedStyle(document.querySelector('.figure.failed b')).color"
    assert browser.evaluate(colour) == "rgb(179, 38, 30)"
    browser = show(page(run("a", state="failed"), run("b")))
    assert browser.evaluate("[...document.querySelectorAll('td.failed')].map((own) => own.textContent)") == ["failed"]


def test_single_step_is_drawn_as_points(show):
    rewards = [{"step": 7, "quantiles": [0, 0, 0.1, 0.5, 0.8, 1, 1]}]
    browser = show(page(run(training=table(step=[7], reward__mean=[0.5]), rewards=rewards)))
    ranges = "[...document.querySelectorAll('.chart')].map((box) => [box.plot.scales.x.min, box.plot.scales.x.max])"
    assert browser.evaluate(ranges) == [[3.5, 10.5]] * 2
    series = "document.querySelector('[data-metric=\"reward quantiles\"]').plot.series.slice(1)"
    assert all(browser.evaluate(f"{series}.map((own) => own.points.show())"))


@pytest.mark.parametrize(("value", "least", "largest"), [(0, -0.1, 1), (0.5, 0, 1), (-3, -6, 0)])
def test_constant_curve_has_an_axis_from_0(show, value, least, largest):
    browser = show(page(run(training=table(step=[1, 2], reward__mean=[value] * 2))))
    scale = "(({ min, max }) => [min, max])(document.querySelector('.chart').plot.scales.y)"
    assert browser.evaluate(scale) == [least, largest]


def test_summary_has_held_out_rewards_that_differ_from_correctness(show):
    values = {"val/fraction_correct_greedy": [0, 0.5], "val/exact_greedy": [0, 0.5], "val/close_greedy": [0.25, 0.75]}
    names = "[...document.querySelectorAll('.figure')].map((own) => own.innerText.split('\\n'))"
    browser = show(page(run(validation={"step": [0, 4], **values})))
    shown = {name: value for value, name in browser.evaluate(names)}
    assert shown["val/fraction_correct_greedy"] == "0 → 0.5"
    assert shown["val/close_greedy"] == "0.25 → 0.75"
    assert "val/exact_greedy" not in shown


def test_summary_has_the_change_of_the_same_prompts(show):
    values = {"val/loss": [3.0, 2.0], "val/fraction_correct_greedy": [0.25, 0.75]}
    changes = {"change": [None, 0.5], "change_low": [None, -0.125], "change_high": [None, 1.125]}
    values |= {f"val/fraction_correct_greedy_{end}": numbers for end, numbers in changes.items()}
    names = "[...document.querySelectorAll('.figure')].map((own) => own.innerText.split('\\n'))"
    browser = show(page(run(validation={"step": [0, 4], **values})))
    shown = {name: further for _, name, *further in browser.evaluate(names)}
    assert shown["val/fraction_correct_greedy"] == ["change +0.5 (-0.125 to +1.125)"]
    assert shown["val/loss"] == []


def test_correct_responses_of_each_source_are_a_table(show):
    values = {
        "val/sums/fraction_correct_greedy": [0.25, 0.75],
        "val/sums/fraction_correct_greedy_change": [None, 0.5],
        "val/sums/fraction_correct_greedy_change_low": [None, 0.25],
        "val/sums/fraction_correct_greedy_change_high": [None, 0.75],
        "val/<b>times/fraction_correct_greedy": [0, 0],
        "val/<b>times/fraction_correct_sampled": [0, 0.125],
    }
    rows = "[...document.querySelectorAll('.sources tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    browser = show(page(run(validation={"step": [0, 4], **values})), width=390)
    assert browser.evaluate(rows) == [
        ["source", "fraction correct, greedy", "fraction correct, sampled"],
        ["<b>times", "0 → 0", "0 → 0.125"],
        ["sums", "0.25 → 0.75\nchange +0.5 (+0.25 to +0.75)", ""],
    ]
    only = {name: numbers for name, numbers in values.items() if "times" not in name}
    browser = show(page(run(validation={"step": [0, 4], **only})))
    assert browser.evaluate(rows) == []


@pytest.mark.parametrize(("state", "message"), [("passed", "No check failed."), ("too early", "No check has run yet.")])
def test_run_without_finished_checks_is_not_called_healthy(show, state, message):
    browser = show(page(run(checks=[{"name": "clipping", "state": state, "note": ""}])))
    assert browser.evaluate("document.querySelector('.healthy').textContent") == message


def test_empty_sections_give_the_reason(show):
    browser = show(page(run(training={"step": []})))
    text = browser.evaluate("document.body.innerText")
    for message in ("No metrics were written yet.", "The metrics have no times", "No responses were written"):
        assert message in text
    browser = show(page(run()))
    browser.evaluate("search.value = 'nothing', search.dispatchEvent(new Event('input'))")
    browser.wait("document.getElementById('curves').innerText.includes('No metric has this in its name.')")


def test_times_have_the_color_of_their_run_and_keep_their_units(show):
    times = table(step=[1], time__step_s=[100.0], time__update_s=[24.0])
    browser = show(page(run("a", training=times), run("b", training=times)), width=390)
    bars = "[...document.querySelectorAll('#time .bar')].map((own) => getComputedStyle(own).backgroundColor)"
    assert browser.evaluate(bars) == ["rgb(31, 111, 214)"] * 2 + ["rgb(194, 98, 0)"] * 2
    assert browser.evaluate("document.querySelectorAll('#time h3 .key').length") == 2
    cells = "[...document.querySelectorAll('#time .number')].map((own) => getComputedStyle(own).whiteSpace)"
    assert set(browser.evaluate(cells)) == {"nowrap"}


def test_printed_page_has_no_controls(show):
    browser = show(page(run()))
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
