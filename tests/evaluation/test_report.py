# SPDX-License-Identifier: Apache-2.0
"""Reports of `bionemo evaluate`: pages, comparisons, and damaged files."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import bionemo
from bionemo.cli.evaluate import main
from bionemo.common.errors import UserError
from bionemo.evaluation.suites import open_suite
from tests.evaluation.test_proteingym import evaluate
from tests.support.huggingface import theirs
from tests.support.proteingym import write_csv, write_suite

EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "esm"
    theirs(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite with published results, whose names are HTML."""
    path = tmp_path_factory.mktemp("data") / "proteingym"
    path.mkdir()
    write_suite(path, 4)
    rows = (path / "DMS_substitutions.csv").read_text().replace("Human", f'"{EVIL.replace(chr(34), chr(34) * 2)}"')
    (path / "DMS_substitutions.csv").write_text(rows)
    header = ["DMS ID", EVIL, "partial", "Selection Type", "UniProt ID", "MSA_Neff_L_category", "Taxon"]
    published = [
        (f"P{n // 2}_{n}", 0.25 * n, 1 if n else "", "Activity", f"P{n // 2}", "Low", "Human") for n in range(4)
    ]
    write_csv(path / "Spearman_per_assay.csv", [header, *published])
    return path


@pytest.fixture(scope="module")
def results(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("results") / "first"
    evaluate(model, data, output)
    return output


class Page(HTMLParser):
    """Tables of a page, and all tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href") or name.endswith(":href")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data.strip()


def run(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
        main()


def rows_of(table: list[list[str]]) -> list[dict[str, str]]:
    """Return the rows; the column of names has no header."""
    return [dict(zip(["name", *table[0][1:]], row, strict=True)) for row in table[1:]]


def test_the_page_shows_the_figures_next_to_published_ones(results: Path, model: Path) -> None:
    summary = json.loads((results / "report.json").read_text())["suites"]["proteingym"]["summary"]
    averages, published, best, tasks = map(rows_of, Page(results / "report.html").tables)
    for row in averages:
        found = summary["averages"][row["name"]]
        assert (row["overall"], row["error"]) == (f"{found['overall']:.4g}", f"{found['error']:.4g}")
        assert row["selection Activity"] == f"{found['selection']['Activity']:.4g}"
        assert row["model"] == str(model)
    (other,) = published  # `partial` has no result for one of the assays
    assert (other["name"], other["overall"]) == (EVIL, "0.375")  # (0 + 0.25) / 2 and (0.5 + 0.75) / 2
    assert [row["name"] for row in best] == ["best"]
    assert len(tasks) == 4


def test_the_page_needs_no_network_and_escapes_names(results: Path) -> None:
    page = Page(results / "report.html")
    assert "script" not in page.tags
    assert not page.links
    assert not re.search(r"@import|url\(", (results / "report.html").read_text())


def test_models_are_compared(results: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    theirs(other, layers=1)
    evaluate(other, data, tmp_path / "second", "--method=wild-type-marginal")
    run("compare", results, tmp_path / "second", "--output", tmp_path / "page.html")
    averages, _, _, tasks = map(rows_of, Page(tmp_path / "page.html").tables)
    assert [row["model"] for row in averages] == ["first", "second"] * 5
    for directory in (results, tmp_path / "second"):
        report = json.loads((directory / "report.json").read_text())
        values = {
            task["task"]: f"{task['metrics']['spearman']:.4g}" for task in report["suites"]["proteingym"]["results"]
        }
        assert {row["name"]: row["spearman"] for row in tasks if row["model"] == directory.name} == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ('{"suites": {"proteingym": {}}}', "is damaged"),
        ('{"suites": {"x": {"suite": "x"}}, "versions": {}, "model": "", "precision": ""}', "is damaged"),
    ],
)
def test_damaged_reports(
    content: str | None, message: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(SystemExit):
        run("compare", results, tmp_path, "--output", tmp_path / "page.html")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_faulty_selections(data: Path, tmp_path: Path) -> None:
    for suite, path, settings, message in (
        ("x", data, {}, "there is no suite 'x'"),
        ("proteingym", data, {"x": 1}, "has no setting 'x'"),
        ("proteingym", data, {"method": "fast"}, "method='fast' is unknown: choose from masked-marginal"),
        ("proteingym", tmp_path, {}, "DMS_substitutions.csv"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            open_suite(suite, path, settings).tasks()


def test_python(model: Path, data: Path, results: Path, tmp_path: Path) -> None:
    report = bionemo.evaluate(bionemo.load(model, "cpu"), "proteingym", data, output=tmp_path / "output")
    assert report == json.loads((tmp_path / "output" / "report.json").read_text())
    assert (
        report["suites"]["proteingym"]["summary"]
        == (json.loads((results / "report.json").read_text())["suites"]["proteingym"]["summary"])
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(results: Path, tmp_path: Path, width: int) -> None:
    """A headless browser draws the page without messages on its console."""
    profile = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        ["chromium", *profile, "--enable-logging=stderr", f"--window-size={width},2000", "--hide-scrollbars",
         f"--screenshot={tmp_path / 'page.png'}", (results / "report.html").as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    from matplotlib.image import imread

    assert imread(tmp_path / "page.png").std() > 0.05
