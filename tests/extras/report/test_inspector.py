"""The inspector in a real browser: the viewer of responses, a run that continues, and requests that are rejected."""

import csv
import json
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection

import pytest

from lightning_rlhf.extras.report import inspect
from lightning_rlhf.extras.report.inspector.server import InspectServer
from tests.extras.report.test_report_page import HOSTILE, ROWS, SCRIPT, chart

pytestmark = pytest.mark.timeout(180)


def tokens(texts, advantage, **changes):
    count = len(texts)
    numbers = {"logprob": -1.0, "rollout_logprob": -1.0, "ref_logprob": -1.5, "weight": 1.0, "version": 3}
    return {
        "ids": list(range(count)),
        "texts": texts,
        **{name: [value] * count for name, value in numbers.items()},
        "advantage": advantage,
        "sampled": [True] * count,
        "in_loss": [True] * count,
        **changes,
    }


def response(prompt, texts, reward, group, **changes):
    return {
        "prompt": prompt,
        "response": "".join(texts),
        "reward": reward,
        "rewards": {"right": reward},
        "kl": 0.5,
        "group": group,
        "truncated": reward == 0,
        "tokens": tokens(texts, **{"advantage": [reward - 1.0] * len(texts), **changes}),
    }


RESPONSES = [
    response(
        "one",
        ["a", "b", "c"],
        2.0,
        0,
        advantage=[0.5, -1.0, 2.0],
        entropy=[0.25, 0.5, 1.0],
        in_loss=[True, False, True],
    ),
    response("one", ["a", "x", "c", "d"], 0.0, 0, sampled=[True, True, False, True]),
    response("two", ["e"], 1.0, 1),
    {"prompt": "two", "response": "without values", "reward": 1.0, "rewards": {}, "group": 1, "truncated": False},
]


@pytest.fixture
def page(inspect_page):
    return inspect_page


LINES = (  # the texts of each line by column
    "[...document.querySelectorAll('button.line')].map((line) => Object.fromEntries("
    "[...line.children].map((cell, i) => "
    "[document.querySelectorAll('.heading .sort')[i].dataset.column, cell.textContent])))"
)
SPANS = "[...document.querySelectorAll('.sample')].map((card) => [...card.querySelectorAll('.tokens span')].map("


def choose(name, value, event="change"):
    """Return a script that sets a control."""
    instance = f"document.getElementById('{name}')"
    return f"{instance}.value = '{value}', {instance}.dispatchEvent(new Event('{event}')), 0"


def sort(column):
    return f"document.querySelector('[data-column=\"{column}\"]').click()"


def click(*numbers):
    return ";".join(f"document.querySelectorAll('button.line')[{number}].click()" for number in numbers)


def test_responses_are_sorted_and_filtered(page, run_directory):
    browser = page(run_directory("a", ROWS, {1: RESPONSES}))
    assert [line["reward"] for line in browser.evaluate(LINES)] == ["2", "0", "1", "1"]
    browser.evaluate(sort("reward"))
    assert [line["reward"] for line in browser.evaluate(LINES)] == ["2", "1", "1", "0"]
    browser.evaluate(sort("tokens"))
    assert [line["tokens"] for line in browser.evaluate(LINES)] == ["4", "3", "1", "–"]
    assert browser.evaluate(LINES)[0] == {
        "reward": "0", "right": "0", "tokens": "4", "end": "length", "prompt": "one", "response": "axcd"
    }  # fmt: skip
    browser.evaluate(choose("only", "truncated"))
    assert [line["response"] for line in browser.evaluate(LINES)] == ["axcd"]
    browser.evaluate(choose("only", "differing"))
    assert {line["prompt"] for line in browser.evaluate(LINES)} == {"one"}
    browser.evaluate(choose("only", "all"))
    browser.evaluate(choose("text", "WITHOUT", "input"))
    assert [line["response"] for line in browser.evaluate(LINES)] == ["without values"]
    assert not browser.problems


def test_color_scale_covers_both_selected_responses(page, run_directory):
    browser = page(run_directory("a", ROWS, {1: RESPONSES}))
    legend = "document.getElementById('legend').innerText"
    assert browser.evaluate(legend) == ""
    browser.evaluate(click(0))  # advantages of 0.5, -1 and 2
    assert browser.evaluate(legend).split() == ["-2", "2"]
    browser.evaluate(click(2))  # advantages of 0
    colours = browser.evaluate(f"{SPANS} (span) => span.style.backgroundColor))")
    assert colours[0][2] == "rgba(31, 120, 209, 0.75)"
    assert colours[1] == ["rgba(31, 120, 209, 0)"]
    browser.evaluate(choose("colour", "logprob"))
    assert browser.evaluate(legend).split("\n") == ["-5 nats", "0 nats"]
    browser.evaluate(choose("colour", "entropy"))
    assert browser.evaluate(legend).split("\n") == ["0 nats", "1 nats"]
    browser.evaluate(click(2) + ";" + click(0))
    browser.evaluate(click(2))  # its file has no entropies
    assert browser.evaluate(legend) == "The files of this run have no entropies."
    browser.evaluate(choose("colour", "version"))
    assert browser.evaluate(legend).split("\n") == ["version 3", "version 4"]
    assert not browser.problems


def test_colors_follow_the_values(page, run_directory):
    browser = page(run_directory("a", ROWS, {1: RESPONSES}))
    browser.evaluate(click(0))
    colours = browser.evaluate(f"{SPANS} (span) => span.style.backgroundColor))")[0]
    blue, orange, strongest = ([float(part) for part in re.findall(r"[\d.]+", colour)] for colour in colours)
    assert (blue[:3], orange[:3]) == ([31, 120, 209], [224, 123, 0])  # advantages of 0.5, -1 and 2
    assert [item[3] for item in (blue, orange, strongest)] == pytest.approx([0.75 / 4, 0.75 / 2, 0.75], abs=0.01)
    browser.evaluate(choose("colour", "kl"))
    colours = browser.evaluate(f"{SPANS} (span) => span.style.backgroundColor))")[0]
    assert len(set(colours)) == 1  # the KL of every token is 0.5
    titles = browser.evaluate(f"{SPANS} (span) => span.title))")[0]
    assert "advantage -1" in titles[1]
    assert "KL 0.5" in titles[1]
    assert "version 3" in titles[1]
    assert titles[1].endswith("not in the loss")
    browser.evaluate(choose("colour", "entropy"))  # 0.25, 0.5 and 1 nats
    colours = browser.evaluate(f"{SPANS} (span) => span.style.backgroundColor))")[0]
    strengths = [float(re.findall(r"[\d.]+", colour)[3]) for colour in colours]
    assert strengths == pytest.approx([0.75 / 4, 0.75 / 2, 0.75], abs=0.01)
    browser.evaluate(choose("colour", "none"))
    assert set(browser.evaluate(f"{SPANS} (span) => span.style.backgroundColor))")[0]) == {""}
    assert not browser.problems


def test_two_responses_are_compared_token_by_token(page, run_directory):
    browser = page(run_directory("a", ROWS, {1: RESPONSES}))
    browser.evaluate(click(0, 1))
    differing = browser.evaluate(f"{SPANS} (span) => [span.textContent, span.classList.contains('differs')]))")
    assert [text for text, differs in differing[0] if differs] == ["b"]
    assert [text for text, differs in differing[1] if differs] == ["x", "d"]
    written = browser.evaluate(f"{SPANS} (span) => span.classList.contains('written')))")
    assert written == [[False] * 3, [False, False, True, False]]
    browser.evaluate(click(3))  # without values of tokens
    assert "without values" in browser.evaluate("document.getElementById('detail').textContent")
    assert not browser.problems


def test_running_run_is_updated_without_reloading_the_page(page, run_directory):
    folder = run_directory("a", ROWS[:3], {1: RESPONSES})
    browser = page(folder)
    browser.evaluate("window.marker = 1, document.getElementById('search').value = 'reward/mean', 0")
    (folder / "rollouts/step-000003.jsonl").write_text(json.dumps(RESPONSES[2]) + "\n")
    with (folder / "metrics.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    with (folder / "metrics.csv").open("a", newline="") as file:
        csv.DictWriter(file, columns, restval="").writerow({"step": 3, "reward/mean": 0.75})
    browser.wait("window.report.runs[0].training.step.length === 3")
    browser.wait(f"{chart('reward/mean')}[1].at(-1) === 0.75")
    browser.wait(
        "document.querySelectorAll('button.line').length === 1"
    )  # the newest step is shown, if none was chosen
    assert browser.evaluate("window.marker") == 1
    assert browser.evaluate("document.getElementById('search').value") == "reward/mean"
    assert not browser.problems


@pytest.mark.slow
def test_end_of_a_run_and_errors_of_its_files_are_shown(page, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    browser = page(folder)
    browser.wait("document.querySelector('.figure b').textContent === 'running'")
    (folder / "end.json").write_text('{"error": null}')
    browser.wait("document.querySelector('.figure b').textContent === 'ended'")
    (folder / "end.json").write_text("[")
    browser.wait("document.getElementById('note').textContent.includes('end.json cannot be read, the file is damaged')")
    (folder / "end.json").unlink()
    browser.wait("document.querySelector('.figure b').textContent === 'running'")
    assert browser.evaluate("document.getElementById('note').textContent") == ""


def test_several_runs_are_shown(page, run_directory):
    browser = page(
        run_directory("a", ROWS, {1: RESPONSES}), run_directory("b", ROWS, {2: RESPONSES[:1], 5: RESPONSES[:2]})
    )
    browser.evaluate(choose("run", "1"))
    browser.wait("document.querySelectorAll('button.line').length === 2")
    browser.evaluate(choose("step", "2"))
    browser.wait("document.querySelectorAll('button.line').length === 1")
    assert not browser.problems


def test_hostile_texts_are_shown_as_text(page, run_directory):
    rows = [response(text, [text, text], 1.0, i) for i, text in enumerate(HOSTILE)]
    rows += [
        {"prompt": text, "response": text, "segments": [{"from": text, "text": text}], "rewards": {text: 1}}
        for text in HOSTILE
    ]
    browser = page(run_directory("a", ROWS, {1: rows}))
    for number in range(0, len(rows), 2):
        browser.evaluate(click(number, number + 1))
        browser.evaluate("new Promise((done) => setTimeout(done, 20))")
    assert browser.evaluate("typeof window.hacked") == "undefined"
    kinds = browser.evaluate(
        "[...document.querySelectorAll('script, img, svg, iframe, base, link, form')].map((own) => own.tagName)"
    )
    assert kinds == ["SCRIPT"] * browser.evaluate("document.documentElement.outerHTML").count("<script")
    assert SCRIPT in browser.evaluate("document.body.textContent")
    assert not browser.problems


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_ten_thousand_responses_fit_narrow_and_dark_windows(page, run_directory, width, dark):
    rows = [response(f"prompt {i // 8}", ["a", str(i)], float(i % 3), i // 8) for i in range(10_000)]
    browser = page(run_directory("a", ROWS, {1: rows}), width=width, dark=dark)
    browser.wait("document.querySelectorAll('button.line').length === 10000")
    browser.evaluate(choose("text", "a777", "input"))
    assert {line["response"] for line in browser.evaluate(LINES)} == {"a777", *(f"a777{i}" for i in range(10))}
    browser.evaluate(click(0, 1))
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert not browser.problems


def get(server, path, host=None, method="GET"):
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_only_requests_with_the_key_and_the_local_host_are_answered(serve, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    (folder.parent / "secret.jsonl").write_text("{}")
    server = serve(folder)
    answer, body = get(server, f"/{server.key}/responses/0/1")
    assert answer.status == 200
    assert len(json.loads(body)) == len(RESPONSES)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in answer.headers
    foreign = ("/", "/x/", "//", "/%C3%A9/")
    beyond = ("x", "responses/1/1", "responses/0/../../secret", "../config.yaml")
    inside = (f"/{server.key}", f"/{server.key}x/", *(f"/{server.key}/{path}" for path in beyond))
    for path in (*foreign, *inside):
        assert get(server, path)[0].status == 404, path
    assert get(server, f"/{server.key}/data", host="evil.example:80")[0].status == 403
    assert get(server, f"/{server.key}/data", method="POST")[0].status == 501
    assert server.server_address[0] == "127.0.0.1"
    with socket.create_connection(server.server_address) as broken:
        broken.sendall(b"GET / HTTP/1.1\r\n")
    assert get(server, f"/{server.key}/data")[0].status == 200


@pytest.mark.parametrize("command", ["report.inspect", "report.command", "commands.new"])
def test_light_commands_do_not_import_torch(command):
    code = f"import sys, lightning_rlhf.extras.{command}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_command_starts_the_inspector(run_directory, monkeypatch, capsys):
    folder = run_directory("a", ROWS)
    monkeypatch.setattr(InspectServer, "serve_forever", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert inspect.run([str(folder)]) == 0
    assert re.fullmatch(r"open http://127\.0\.0\.1:\d+/[\w-]{20,}/\n", capsys.readouterr().out)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        assert inspect.run([str(folder), "--port", str(used.getsockname()[1])]) == 2
        assert "cannot be used: Address already in use; choose another --port" in capsys.readouterr().err
    assert inspect.run([str(folder), "--port", "-1"]) == 2
    assert inspect.run([str(folder.parent), str(folder)]) == 2
