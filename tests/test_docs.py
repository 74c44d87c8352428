# SPDX-License-Identifier: Apache-2.0
"""The documentation site: a strict build, complete tables of keys, and a headless browser with search."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bionemo.config import schema
from bionemo.config.compose import load
from bionemo.inference.array_descriptions import ARRAY_DESCRIPTIONS
from tests.conftest import ROOT

pytest.importorskip("mkdocs")


def build(site: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EXECUTE_TUTORIALS": "false", "NO_MKDOCS_2_WARNING": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site; the tutorials are not executed here, but in tests/test_notebooks.py."""
    directory = tmp_path_factory.mktemp("site")
    done = build(directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_key_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "configuration.html").read_text()
    for each in vars(schema).values():
        if is_dataclass(each):
            for field in fields(each):
                assert re.search(rf"<code>([\w.]+\.)?{field.name}</code>", page), f"{each}.{field.name}"
    assert "sent before the time limit; the run then saves a checkpoint" in page
    rows = {}
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        if len(cells) == 4:
            name, default = (re.sub("<[^>]*>", "", cells[number]) for number in (0, 2))
            assert default or "<a href" in cells[1], f"{name} has no default"  # a link leads to a group of keys
            rows[name.rpartition(".")[2]] = default
    data = load("pretrain_esm2_8M").model.data
    assert isinstance(data, schema.MaskedDataConfig)
    assert (rows["mask_percent"], rows["hidden_size"]) == (str(data.mask_percent), "several")


def test_every_array_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "file-formats.md").read_text()
    for name, text in ARRAY_DESCRIPTIONS.items():
        assert f"| `{name}` | {text} |" in page


def test_the_example_of_masks(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "docs/explanation/masking.md").read_text(), re.DOTALL
    )[0]
    exec(code, {})
    assert capsys.readouterr().out == output


def test_no_page_refers_to_another_host(site: Path) -> None:
    """Styles, scripts, fonts and images are part of the site."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)", page.read_text())
        loaded += re.findall(r"<link[^>]+rel=\"stylesheet\"[^>]+href=\"(https?:[^\"]+)", page.read_text())
        assert [each for each in loaded if "mathjax" not in each.lower()] == [], page


@pytest.mark.slow
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for source in ROOT.iterdir():
        if source.name != "docs" and not source.name.startswith("."):
            (root / source.name).symlink_to(source)
    shutil.copytree(ROOT / "docs", root / "docs", symlinks=True)
    with (root / "docs" / "how-to" / "plan.md").open("a") as page:
        page.write("\n[missing](nowhere.md)\n")
    done = build(tmp_path / "site", root)
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "page",
    ["index.html", "tutorials/embed.html", "how-to/slurm.html", "reference/configuration.html",
     "explanation/benchmarks.html"],
)  # fmt: skip
def test_a_browser_shows_the_pages(address: str, tmp_path: Path, page: str, width: int) -> None:
    """Without messages on the console."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", f"--window-size={width},1400", "--virtual-time-budget=8000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([*command, f"{address}/{page}"], capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert "<h1" in done.stdout


SEARCHES = {  # words, and the page that is found first
    "LoRA": "how-to/fine-tune", "modify_percent": "explanation/masking", "preempted": "how-to/cluster",
    "scaffold": "how-to/prepare-data", "ProteinGym": "how-to/evaluate", "sbatch": "how-to/slurm",
    "cluster_tsv": "how-to/prepare-data", "Hugging Face": "how-to/export", "Kubernetes": "how-to/kubernetes",
    "parquet": "how-to/pretrain",
}  # fmt: skip


class _Browser:
    """A window of Chromium, controlled through Chrome's DevTools protocol."""

    def __init__(self, url: str) -> None:
        import websocket

        self._connection = websocket.create_connection(url, timeout=30)

    def evaluate(self, expression: str) -> Any:
        message = {"id": 1, "method": "Runtime.evaluate"}
        self._connection.send(json.dumps(message | {"params": {"expression": expression, "returnByValue": True}}))
        while (answer := json.loads(self._connection.recv())).get("id") != 1:
            pass
        return answer["result"]["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        end = time.monotonic() + 30
        while not (value := self.evaluate(expression)) and time.monotonic() < end:
            time.sleep(0.1)
        return value

    def open(self, page: str) -> None:
        self.evaluate(f"window.location = {page!r}")
        time.sleep(0.3)
        assert self.wait_for("document.readyState == 'complete' && !!document.querySelector('.md-search__input')"), (
            page
        )
        time.sleep(0.3)


@pytest.fixture
def browser(tmp_path: Path, width: int) -> Iterator[_Browser]:
    pytest.importorskip("websocket")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
               "--remote-allow-origins=*", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={width},900"]  # fmt: skip
    with subprocess.Popen([*command, "about:blank"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"ws://(\S+?)/", line) for line in process.stderr)))
            new = urllib.request.Request(f"http://{found[1]}/json/new?about:blank", method="PUT")
            with urllib.request.urlopen(new) as response:
                yield _Browser(json.load(response)["webSocketDebuggerUrl"])
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_search(browser: _Browser, address: str) -> None:
    browser.open(f"{address}/index.html")
    found = {}
    for words in SEARCHES:
        browser.evaluate(
            "document.querySelector('#__search').checked = true; var field = document.querySelector("
            f"'.md-search__input'); field.focus(); field.value = {words!r}; "
            "field.dispatchEvent(new Event('keyup')); field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        time.sleep(0.5)
        links = browser.wait_for("[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)")
        found[words] = re.sub(rf"{address}/|\.html.*", "", (links or [""])[0])
    print(found)
    assert found == SEARCHES


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_neither_pages_nor_commands_are_wider_than_the_window(browser: _Browser, address: str, site: Path) -> None:
    wide = []
    for page in sorted(each.relative_to(site) for each in site.rglob("*.html") if each.name != "404.html"):
        browser.open(f"{address}/{page}")
        if not browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"):
            wide.append(str(page))
        wide += browser.evaluate(
            "[...document.querySelectorAll('.language-bash code')].filter(each => each.scrollWidth > "
            f"each.clientWidth + 1).map(each => '{page}: ' + each.textContent)"
        )
    assert wide == []
