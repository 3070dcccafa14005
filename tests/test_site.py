"""The documentation site builds without warnings, loads nothing from other servers, and refers to existing names."""

import ast
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from torch.optim import AdamW

from lightning_rlhf.cli.signatures import find_class

ROOT = Path(__file__).resolve().parents[1]
CHANGES_OF_PEERS = ("from_trl", "from_verl")
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class Loaded(HTMLParser):
    """Addresses that a browser loads automatically when it shows a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        instance = dict(attributes)
        if tag == "link" and instance.get("rel") in ("stylesheet", "icon", "preload"):
            self.addresses.append(instance["href"])
        elif instance.get(LOADING.get(tag, "")):
            self.addresses.append(instance[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
    return directory


@pytest.mark.slow
def test_site_has_the_schema_of_configurations(site):
    assert (site / "schema.json").read_text() == (ROOT / "lightning_rlhf/extras/schema/schema.json").read_text()


@pytest.mark.slow
def test_pages_load_nothing_from_other_servers(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        addresses = Loaded(page.read_text(encoding="utf-8")).addresses
        assert addresses
        for address in addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"


@pytest.mark.slow
def test_search_works_in_pages_opened_from_disk(site, browser):
    browser.open((site / "reference/callbacks.html").as_uri(), ready="document.readyState === 'complete'")
    browser.evaluate("document.querySelector('#__search').click(), document.querySelector('.md-search__input').focus()")
    browser.call("Input.insertText", text="RolloutLoop")
    browser.wait("document.querySelectorAll('.md-search-result__item').length > 3")


@pytest.mark.slow
def test_links_to_files_outside_the_documents_point_to_pages_with_their_text(site):
    page = (site / "real_model.html").read_text(encoding="utf-8")
    assert 'href="files/examples/smollm2/grpo.yaml.html"' in page
    assert "keep_groups" in (site / "files/examples/smollm2/grpo.yaml.html").read_text(encoding="utf-8")
    nested = (site / "files/configs/README.md".replace("README.md", "index.html")).read_text(encoding="utf-8")
    assert 'href="quickstart/ppo.yaml.html"' in nested


@pytest.mark.slow
def test_pipe_in_code_in_a_table_has_no_backslash(site):
    text = (site / "reference/callbacks.html").read_text(encoding="utf-8")
    assert "<code>str | None</code> = <code>None</code></td>" in text
    assert "responses per prompt, at least 1" in text  # an argument line of RolloutLoop


@pytest.mark.slow
def test_names_in_tables_break_after_slashes_and_commas(site):
    page = (site / "metrics.html").read_text(encoding="utf-8")
    assert "<code>reward/<wbr>after_kl_{mean,<wbr>max,<wbr>min}</code>" in page
    assert "<code>val/...</code>" in page  # outside of a table
    assert 'href="site.css"' in page


def test_navigation_entries_are_unique():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    names = re.findall(r"^ *- (.+): \S+\.md$", navigation, re.MULTILINE)
    assert len(names) == navigation.count(".md") > 40
    assert [name for name in names if names.count(name) > 1] == []


def test_images_are_small():
    images = [path for path in (ROOT / "docs/images").iterdir() if path.suffix in (".png", ".svg")]
    assert len(images) >= 5
    assert max(path.stat().st_size for path in images) < 300_000


def arguments():
    """Return the names of arguments, methods and attributes of all classes that a configuration can refer to."""
    names = set()
    for module in (path for folder in ("lightning_rlhf", "callbacks") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                        names |= {argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)}
                    elif isinstance(item, ast.FunctionDef):
                        names.add(item.name)
                    elif isinstance(item, ast.AnnAssign | ast.Assign):
                        targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets
                        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", CHANGES_OF_PEERS)
def test_options_in_the_comparison_with_other_libraries_exist(page):
    trainer = set(inspect.signature(Trainer).parameters)
    paths = ("PPOModule", "strategies.fsdp.RLHFFSDPStrategy")
    known = arguments() | trainer | {name for path in paths for name in find_class(f"lightning_rlhf.{path}").options}
    known |= set(inspect.signature(AdamW).parameters)
    known |= {
        "rlhf_single",
        "rlhf_ddp",
        "rlhf_fsdp",
        "rlhf_fsdp_offload",
        "rlhf_deepspeed_stage_3",
        "rlhf_deepspeed_stage_3_offload",
        "bf16-mixed",
    }
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text.partition("\n## Options\n")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[1] for row in re.findall(r"^\| `.*", table, re.MULTILINE)]
    assert len(cells) > 8
    named = {
        name
        for cell in cells
        for code in re.findall(r"`([^`]+)`", cell)
        for path in re.findall(r"[A-Za-z_][\w.-]*", code)
        for name in [path.rpartition(".")[2]]
    }
    named -= {"class_path", "init_args", "true", "True", "", "data_source", "log_metric", "lightning-rlhf"}
    named -= {"ckpt_path", "last", "path", "py", "name", "rollouts", "export", "sequence"}
    assert {name for name in named if name not in known} == set()
