"""Images of prompts on the report page and in the inspector: thumbnails, bounds, strange values, hostile files."""

import base64
import io
import json
from http.client import HTTPConnection

import pytest
from PIL import Image

from lightning_rlhf.extras.report import page as page_module
from lightning_rlhf.extras.report.page import report_page, run_data, samples_of
from lightning_rlhf.extras.report.run_directory import RunDirectory
from tests.extras.report.page_data import response, with_responses
from tests.extras.report.test_inspector import click
from tests.extras.report.test_report_page import ROWS
from tests.extras.report.test_run_files import answer, write_validation

pytestmark = pytest.mark.timeout(180)
NAME, OTHER = "0123456789abcdef.jpg", "fedcba9876543210.jpg"
HOSTILE = [
    "../../secret", "../images/" + NAME, "javascript:window.hacked=1", 'x" onerror="window.hacked=1',
    "images/../../secret.jpg", f"images/{NAME}\n", f"images/{NAME}?x", f"images/{NAME.upper()}", f"/images/{NAME}",
    f"http://127.0.0.1:9/images/{NAME}", "data:image/svg+xml,<svg onload=window.hacked=1>", NAME, "images/", "",
    "__proto__", "images/0000000000000000.jpg", 7, None, True, ["images/" + NAME], {"images": NAME},
]  # fmt: skip
SIZES = [-1, 0, 1.5, None, "<b>24</b>", [24], 10**400, float("nan"), True]
STRANGE = [None, 1, "x", {}, {"file": 1}, [], [None], [[]], ["x"], [{}], [1, [2]]]
PICTURES = "[...document.querySelectorAll('.pictures > *')].map((own) => [own.tagName, own.alt ?? own.textContent])"
WIDTHS = "[...document.images].map((own) => own.naturalWidth)"
VISIBLE = "document.images.length > 0 && [...document.images].every((own) => own.complete && own.checkVisibility())"


def jpeg(width=24, height=16, color="teal"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "JPEG")
    return buffer.getvalue()


def image(file=f"images/{NAME}", width=24, height=16):
    return {"file": file, "width": width, "height": height}


def row(*images, **changes):
    return {"prompt": "what?", "images": list(images), "response": "a", "reward": 1.0, "group": 0, **changes}


def write_thumbnails(folder):
    (folder / "rollouts/images").mkdir(exist_ok=True)
    for name in (NAME, OTHER):
        (folder / "rollouts/images" / name).write_bytes(jpeg())
    return folder


@pytest.fixture
def folder(run_directory):
    """Write the directory of a run with these responses, and thumbnails."""
    return lambda *rows, name="a": write_thumbnails(run_directory(name, ROWS, {1: rows}))


def data_of(*folders, live=False):
    data = run_data([RunDirectory(path) for path in folders], live)
    return json.loads(json.dumps(data, allow_nan=False))


# -- data of the page -------------------------------------------------------------------------------------------------


def test_page_has_the_thumbnails_of_its_responses_once(folder):
    (data,) = data_of(folder(row(image()), row(image(), image("images/1111111111111111.jpg", 9, 9))))
    rows = data["samples"][0]["rows"]
    assert [shown["images"] for shown in rows] == [[image()], [image(), image("images/1111111111111111.jpg", 9, 9)]]
    address = f"data:image/jpeg;base64,{base64.b64encode(jpeg()).decode()}"
    assert data["thumbnails"] == {f"images/{NAME}": address}
    (live,) = data_of(folder(row(image()), name="b"), live=True)
    assert "thumbnails" not in live  # its server has them


def test_thumbnails_of_validations_are_on_the_page(folder):
    made = folder(row())
    write_validation(made, 0, [answer(0, images=[image(f"images/{OTHER}")])])
    (data,) = data_of(made)
    assert list(data["thumbnails"]) == [f"images/{OTHER}"]
    assert data["answers"][0]["rows"][0]["images"] == [image(f"images/{OTHER}")]


def test_bytes_of_thumbnails_are_bounded_over_all_runs(folder, monkeypatch):
    rows = [row(image(), image(f"images/{OTHER}"))]
    folders = [folder(*rows, name=name) for name in "ab"]
    size = len(f"data:image/jpeg;base64,{base64.b64encode(jpeg()).decode()}")
    monkeypatch.setattr(page_module, "_MOST_IMAGE_BYTES", 2 * size)
    assert [list(data["thumbnails"]) for data in data_of(*folders)] == [[f"images/{NAME}"]] * 2
    (alone,) = data_of(folders[0])
    assert list(alone["thumbnails"]) == [f"images/{NAME}", f"images/{OTHER}"]
    assert len(report_page([RunDirectory(folders[0])])) > 2 * size


def test_newest_responses_keep_their_thumbnails(run_directory, monkeypatch):
    folder = write_thumbnails(run_directory("a", ROWS, {1: [row(image())], 2: [row(image(f"images/{OTHER}"))]}))
    monkeypatch.setattr(page_module, "_MOST_IMAGE_BYTES", 1500)
    (data,) = data_of(folder)
    assert list(data["thumbnails"]) == [f"images/{OTHER}"]


def test_number_of_images_of_a_prompt_is_bounded():
    (sample,) = samples_of([row(*[image()] * 20)])
    assert sample["images"] == [image()] * 16
    assert sample["images_left_out"] == 4


@pytest.mark.parametrize("images", STRANGE)
def test_strange_values_of_images_are_ignored(folder, images):
    made = folder({**row(), "images": images}, {"prompt": "older", "response": "a", "reward": 0.0})
    (data,) = data_of(made)
    assert data["thumbnails"] == {}
    for sample in data["samples"][0]["rows"]:
        assert all(shown == image(None, None, None) for shown in sample.get("images", []))
    assert report_page([RunDirectory(made)])


@pytest.mark.parametrize("file", HOSTILE)
def test_file_with_another_name_is_not_on_the_page(folder, file):
    (data,) = data_of(folder(row(image(file))))
    assert data["thumbnails"] == {}
    assert data["samples"][0]["rows"][0]["images"][0]["file"] in (None, "images/0000000000000000.jpg")


@pytest.mark.parametrize("kind", ["link", "folder", "other format", "large", "folder of links", "empty", "denied"])
def test_only_small_jpeg_files_of_the_run_are_thumbnails(folder, tmp_path, monkeypatch, kind):
    made = folder(row(image()))
    run, path = RunDirectory(made), made / "rollouts/images" / NAME
    assert run.thumbnail(NAME) == jpeg()
    path.unlink()
    (tmp_path / "outside.jpg").write_bytes(jpeg())
    if kind == "link":
        path.symlink_to(tmp_path / "outside.jpg")
    elif kind == "folder":
        path.mkdir()
    elif kind == "folder of links":
        path.write_bytes(jpeg())
        path.parent.rename(tmp_path / "images")
        path.parent.symlink_to(tmp_path / "images")
    elif kind == "denied":
        path.write_bytes(jpeg())
        monkeypatch.setattr(type(path), "open", lambda *arguments: (_ for _ in ()).throw(PermissionError(13, "x")))
    else:
        contents = {"other format": b"<script>", "large": jpeg() + b"x" * (1 << 16), "empty": b""}
        path.write_bytes(contents[kind])
    assert run.thumbnail(NAME) is None


# -- the page in a browser --------------------------------------------------------------------------------------------


def test_thumbnails_are_visible_on_the_page(browser, folder, tmp_path):
    made = folder(row(image(), image(None, 640, 480), image(width=None)))
    write_validation(made, 0, [answer(0, images=[image()])])
    path = tmp_path / "page.html"
    path.write_text(report_page([RunDirectory(made)]), encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait(VISIBLE)
    assert browser.evaluate(WIDTHS) == [24, 24, 24]
    assert browser.evaluate(PICTURES) == [
        ["IMG", "image, 24 x 16 pixels"],  # of the validation
        ["IMG", "image, 24 x 16 pixels"],
        ["SPAN", "image, 640 x 480 pixels"],
        ["IMG", "image"],
    ]
    assert browser.evaluate("[...document.images].every((own) => own.src.startsWith('data:image/jpeg;base64,/9j/'))")
    assert not browser.problems


def hostile_data():
    """Return the data of a page that this package would not write: hostile files, addresses and sizes."""
    addresses = {
        f"images/{i:016x}.jpg": address
        for i, address in enumerate(
            [
                "javascript:window.hacked=1", 'x" onerror="window.hacked=1', "http://127.0.0.1:9/x.jpg",
                "data:image/svg+xml;base64,PHN2Zz4=", "data:text/html;base64,PGI+", "data:image/jpeg;base64,/9j/\n<",
                f"x data:image/jpeg;base64,{'A' * 8}", 7, None,
            ]
        )
    }  # fmt: skip
    address = f"data:image/jpeg;base64,{base64.b64encode(jpeg()).decode()}"
    images = [image(file) for file in [*HOSTILE, *addresses]]
    rows = [response(images=images[:15]), response(images=images[15:])]
    return with_responses(
        *rows,
        *(response(images=images) for images in STRANGE),
        *(response(images=[image("x", width=size)]) for size in SIZES),
        thumbnails={**addresses, **{str(file): address for file in HOSTILE if file != "images/0000000000000000.jpg"}},
    )


def test_hostile_files_show_and_run_nothing(show):
    browser = show(hostile_data())
    browser.evaluate("document.querySelectorAll('details').forEach((own) => own.open = true)")
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("typeof window.hacked") == "undefined"
    sizes = [text for _, text in browser.evaluate(PICTURES)]
    assert set(sizes) == {"image, 24 x 16 pixels", "image"}
    assert browser.evaluate("document.querySelectorAll('.sample').length") == 2 + len(STRANGE) + len(SIZES)
    assert not browser.problems


def test_number_of_further_images_is_shown(show):
    browser = show(with_responses(response(images=[image(None)] * 16, images_left_out=1234)))
    assert browser.evaluate(PICTURES)[-1] == ["SPAN", "and 1,234 more images"]


# -- the inspector ----------------------------------------------------------------------------------------------------


def test_inspector_shows_thumbnails(inspect_page, folder):
    made = folder(row(image(), image(None, 640, 480)), row(*[image(f"images/{OTHER}")] * 20, reward=0.0))
    write_validation(made, 0, [answer(0, images=[image()])])
    browser = inspect_page(made)
    browser.evaluate(click(0, 1))
    browser.wait("document.images.length === 17")
    browser.wait(VISIBLE)
    assert set(browser.evaluate(WIDTHS)) == {24}
    shown = browser.evaluate(PICTURES)
    assert shown[:2] == [["IMG", "image, 24 x 16 pixels"], ["SPAN", "image, 640 x 480 pixels"]]
    assert shown[-1] == ["SPAN", "and 4 more images"]
    browser.evaluate(click(0, 1))
    browser.evaluate("document.querySelector('#prompts details').open = true")
    browser.wait("document.querySelector('#prompts img')?.naturalWidth === 24")
    assert not browser.problems


def test_second_run_of_the_inspector_has_its_own_thumbnails(inspect_page, folder):
    first, second = (folder(row(image()), name=name) for name in "ab")
    (second / "rollouts/images" / NAME).write_bytes(jpeg(30, 10))
    browser = inspect_page(first, second)
    browser.evaluate("document.getElementById('run').value = '1'")
    browser.evaluate("document.getElementById('run').dispatchEvent(new Event('change')), 0")
    browser.wait("document.querySelectorAll('button.line').length === 1")
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    browser.evaluate(click(0))
    browser.wait("document.images[0]?.naturalWidth === 30")
    assert not browser.problems


def test_hostile_files_show_and_run_nothing_in_the_inspector(inspect_page, folder):
    files = [file for file in HOSTILE if file != "images/0000000000000000.jpg"]
    rows = [row(*[image(file) for file in files[:10]]), row(*[image(file) for file in files[10:]])]
    rows += [{**row(), "images": images} for images in STRANGE]
    rows += [row(image("x", width=size)) for size in SIZES if size == size]
    browser = inspect_page(folder(*rows))
    for number in range(0, len(rows), 2):
        browser.evaluate(click(number, number + 1) if number + 1 < len(rows) else click(number))
        browser.evaluate("new Promise((done) => setTimeout(done, 20))")
        assert browser.evaluate("document.querySelectorAll('.sample').length") > 0
        assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert not browser.problems


def get(server, path, host="localhost"):
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, reply.headers, body


def test_server_has_only_thumbnails_under_their_names(serve, folder):
    made = folder(row(image()))
    images = made / "rollouts/images"
    (made / "secret.jpg").write_bytes(jpeg())
    for name in ("x.jpg", f"{NAME}.rank0", "0123456789ABCDEF.jpg"):
        (images / name).write_bytes(jpeg())
    server = serve(made, folder(row(), name="b"))
    for run in (0, 1):
        status, headers, body = get(server, f"/{server.key}/images/{run}/{NAME}")
        assert (status, headers["Content-Type"], body) == (200, "image/jpeg", jpeg())
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
    wrong = [
        f"2/{NAME}", f"{NAME}", f"-1/{NAME}", f"0/{NAME}x", f"0/{NAME}%0A", f"0/{NAME}?x", "0/", "0/x.jpg", "x/" + NAME,
        f"0/{NAME}.rank0", "0/0123456789ABCDEF.jpg", "0/../../secret.jpg", "0/..%2F..%2Fsecret.jpg",
        "0/step-000001.jsonl", "0/0000000000000000.jpg", f"0//{NAME}", f"0/images/{NAME}",
    ]  # fmt: skip
    for path in wrong:
        assert get(server, f"/{server.key}/images/{path}")[0] == 404, path
    assert get(server, f"/images/0/{NAME}")[0] == 404
    assert get(server, f"/x{server.key}/images/0/{NAME}")[0] == 404
    assert get(server, f"/{server.key}/images/0/{NAME}", host="evil.example")[0] == 403
