# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation that are generated from the code, or are files outside of docs/."""

import ast
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from jupyter_client.manager import KernelManager
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bionemo.cli.main import COMMANDS
from bionemo.common.figures import PALETTE, new_figure, render
from bionemo.config import schema
from bionemo.config.compose import load
from bionemo.config.hints import alternatives, describe
from bionemo.data.packing import pack, pad

ROOT = Path(__file__).parents[1]
COPIED = {  # files of the repository and their pages
    "README.md": "index.md",
    "SECURITY.md": "explanation/security.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "conf/README.md": "reference/configuration-files.md", "scripts/benchmark/RESULTS.md": "explanation/benchmarks.md",
}  # fmt: skip
_CONFIGURATIONS = [  # one size of each model
    ("protein/esm1nv", "pretrain_small"), ("protein/esm1b", "pretrain_esm1b"), ("protein/esm2nv", "pretrain_esm2_8M"),
    ("protein/esmc", "pretrain_esmc_300M"), ("protein/prott5nv", "pretrain_small"),
    ("molecule/megamolbart", "pretrain_xsmall_span_aug"), ("gpt3", "pretrain_gpt3_126m"),
]  # fmt: skip
_PREPARATIONS = {"text": ["source=FILE", "vocab_file=FILE", "merge_file=FILE"], "uspto50k": ["source=FILE"]}
_MOST_DEFAULTS = 3  # values of a key in the table
_PEERS = """
Training on proteins is several times as fast as with Hugging Face transformers, because rows contain
[no padding](explanation/packing.md). Each bar is the ratio of useful tokens per second to those of the peer named, in
fp32 on two cores of a CPU, with the range of five pairs of runs ([Benchmarks](explanation/benchmarks.md)):

![Speed relative to Hugging Face transformers for training and embedding](peers.svg)
"""
_NOTEBOOKS = ("examples/notebooks/", "docs/tutorials/")  # the second has links to the first
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
_SUBCOMMANDS = {"evaluate": ["compare", "average"]}  # those that the help text of the command does not list


def on_startup(**_: Any) -> None:
    """Encrypt the connections to the kernels that execute the tutorials; otherwise each kernel writes a warning."""
    KernelManager.transport_encryption.default_value = "auto"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    os.environ.pop("BIONEMO_HOME", None)  # it would be part of default paths
    pages = {page: _relink((ROOT / source).read_text(), ROOT / source, page) for source, page in COPIED.items()}
    pages["index.md"] += _PEERS
    pages["reference/configuration.md"] = "\n".join(_configuration())
    pages["reference/command-line.md"] = "\n".join(_command_line())
    pages["packing.svg"] = _plot_packing()
    pages["peers.svg"] = _plot_peers()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace the links to files of the repository outside of docs/."""
    path = ROOT / "docs" / page.file.src_uri
    return _relink(markdown, path, page.file.src_uri) if path.suffix == ".md" and path.is_file() else markdown


def _plot_packing(max_length: int = 1024, shown: int = 12) -> str:
    """Plot padded and packed rows of sequences with the lengths of UniRef50 (lognormal, median 210, mean 278)."""
    lengths_N = np.random.default_rng(0).lognormal(math.log(210), math.sqrt(2 * math.log(278 / 210)), 2048)
    lengths_N = np.clip(lengths_N, 30, max_length - 2).astype(np.int64) + 2  # with begin and end tokens
    with new_figure() as figure:
        for axes, name, rows in zip(
            figure.subplots(1, 2), ("padded", "packed"),
            (pad(lengths_N, max_length, 0), pack(lengths_N, max_length, 0)), strict=True,
        ):  # fmt: skip
            for number, row in enumerate(rows[:shown]):
                ends = np.cumsum(lengths_N[row])
                for count, (end, length) in enumerate(zip(ends, lengths_N[row], strict=True)):
                    color = PALETTE[count % len(PALETTE)]
                    axes.barh(number, length, left=end - length, color=color, edgecolor="white", linewidth=0.5)
            share = lengths_N.sum() / (len(rows) * max_length)
            axes.set(xlim=(0, max_length), yticks=[], xlabel="tokens", title=f"{name}: {100 * share:.1f} % full")
            axes.set_facecolor("#dddddd")  # padding
        return render(figure, ".svg").decode()


def _plot_peers() -> str:
    """Plot the first table of RESULTS.md with the columns what, ours, peer and ratio."""
    text = (ROOT / "scripts" / "benchmark" / "RESULTS.md").read_text()
    table = text[text.index("| what | ours | peer | ratio |") :].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    ratios = [[float(number) for number in re.findall(r"[\d.]+", row[3])] for row in cells]
    middle, low, high = np.array(ratios).T
    with new_figure() as figure:
        axes = figure.subplots()
        axes.barh(range(len(cells)), middle, xerr=(middle - low, high - middle), ecolor="black", capsize=3)
        axes.axvline(1, color="gray", linestyle=":")
        axes.set(yticks=range(len(cells)), yticklabels=[row[0] for row in cells], xlabel="times the speed of the peer")
        axes.invert_yaxis()
        return render(figure, ".svg").decode()


def _relink(text: str, path: Path, page: str) -> str:
    """Let the links of a file lead from its page to other pages; links to files without a page become text."""

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[2]))
        name = str(target.relative_to(ROOT)).replace(*_NOTEBOOKS)
        if (found := COPIED.get(name, name)).startswith("docs/"):
            found = found.removeprefix("docs/")
        elif found == name:
            assert target.exists(), f"{path}: {match[2]} does not exist"
            return match[1]
        return f"[{match[1]}]({os.path.relpath(found, Path(page).parent)}{match[3] or ''})"

    return _LINK.sub(replace, text)


def _configuration() -> Iterator[str]:
    """Yield a section with a table for each dataclass of the schema."""
    yield "---\nsearch: {boost: 0.001}\n---\n\n# Configuration keys\n"  # guides are found before it
    yield (
        "Every key can be set in a file or on the command line. The defaults are those of the configurations of one "
        "size of each model, of the clusters, preparations, fine-tuning and predictions; *several* means that more "
        f"than {_MOST_DEFAULTS} values occur. `bionemo COMMAND --config-name=NAME --cfg job` prints those of one "
        "configuration.\n"
    )
    defaults, places = _defaults()
    classes = [each for each in vars(schema).values() if is_dataclass(each) and isinstance(each, type)]
    modules = dict.fromkeys(each.__module__ for each in classes)
    for module in modules:
        yield f"## {(inspect.getdoc(sys.modules[module]) or '').splitlines()[0]}\n"
        for name, each in vars(sys.modules[module]).items():
            if is_dataclass(each) and isinstance(each, type) and each.__module__ == module:
                own = [field for field in fields(each) if field.name in each.__annotations__]
                yield f"### {name}\n"
                bases = [base.__name__ for base in each.__bases__ if is_dataclass(base)]
                inherited = f" It also has the keys of {', '.join(bases)}." if bases else ""
                yield " ".join((inspect.getdoc(each) or "").split()) + inherited + "\n"
                if own:
                    prefixes = sorted(
                        places.get(name, {""}), key=lambda place: (place.count("."), "train" not in place, place)
                    )
                    if len(prefixes) > 1:
                        yield f"Also at {', '.join(f'`{each}*`' for each in prefixes[1:])}.\n"
                    yield "| key | type | default | meaning |\n|---|---|---|---|"
                    hints, meanings = get_type_hints(each), _meanings(each)
                    for field in own:
                        found = defaults.get((name, field.name)) or _schema_default(field)
                        hint = hints[field.name]
                        kind = _escape(describe(hint))
                        options = [each for option in alternatives(hint) for each in (option, *get_args(option)[1:])]
                        if group := next(filter(is_dataclass, options), None):
                            kind = f"[{group.__name__}](#{group.__name__.lower()})"
                        found = found or ("" if group else "none")  # of a source of a mixture
                        key, meaning = f"{prefixes[0]}{field.name}", _escape(meanings[field.name])
                        yield f"| `{key}` | {kind} | {_escape(found)} | {meaning} |"
                    yield ""


def _escape(cell: str) -> str:
    """Escape characters that have a meaning in a Markdown table; in code only those that end a cell."""
    return re.sub(r"[|]" if cell.startswith("`") else r"[|<\[*_]", lambda match: f"&#{ord(match[0])};", cell)


def _defaults() -> tuple[dict[tuple[str, str], str], dict[str, set[str]]]:
    """Return the values of each key, by the name of its dataclass and its own, in some configurations.

    Also returns the places of each dataclass, such as `model.optim.`.
    """
    examples = ROOT / "examples"
    esm2nv = examples / "protein" / "esm2nv" / "conf"
    configs: list[Any] = [load(name, config_dir=examples / directory / "conf") for directory, name in _CONFIGURATIONS]
    for cluster in sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml")):
        configs.append(load("pretrain_esm2_8M", [f"cluster={cluster}"], esm2nv))
    tuned = ("downstream_flip_scl", esm2nv), ("finetune_config", examples / "molecule" / "megamolbart" / "conf")
    for name, directory in tuned:
        configs.append(load(name, ["model.restore_encoder_path=MODEL"], directory, schema.DownstreamConfig))
    preparation = ROOT / "conf" / "preparation"
    for name, files in _PREPARATIONS.items():
        configs.append(load(name, ["output=DIR", *files], preparation, schema.PreparationConfig))
    paths = ["model.downstream_task.restore_from_path=MODEL", "model.data.dataset_path=FILE"]
    configs.append(load("predict", paths, schema=schema.InferConfig))
    values: dict[tuple[str, str], dict[str, None]] = {}
    places: dict[str, set[str]] = {}
    for config in configs:
        _collect_values(config, "", values, places)
    defaults = {
        key: " or ".join(f"`{value}`" for value in found) if len(found) <= _MOST_DEFAULTS else "several"
        for key, found in values.items()
    }
    return defaults, places


def _collect_values(
    config: Any, place: str, values: dict[tuple[str, str], dict[str, None]], places: dict[str, set[str]]
) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            _collect_values(value, f"{place}{field.name}.", values, places)
        elif not (isinstance(value, list) and any(map(is_dataclass, value))):
            owner = next(each for each in type(config).__mro__ if field.name in vars(each).get("__annotations__", {}))
            text = "null" if value is None else str(value)
            values.setdefault((owner.__name__, field.name), {})[text] = None
            places.setdefault(owner.__name__, set()).add(place)


def _schema_default(field: Any) -> str:
    if field.default is not MISSING:
        return f"`{field.default}`"
    if field.default_factory is not MISSING:
        found = field.default_factory()
        return "" if is_dataclass(found) else f"`{found}`"
    return ""


def _meanings(dataclass: type) -> dict[str, str]:
    """Return the comments that describe keys: after them, or `#:` lines above them."""
    lines = inspect.getsource(dataclass).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            first = statement.lineno - 1
            while lines[first - 1].strip().startswith("#:"):
                first -= 1
            above = " ".join(line.strip().removeprefix("#:").strip() for line in lines[first : statement.lineno - 1])
            after = lines[(statement.end_lineno or 0) - 1].partition("  # ")[2]
            meaning = above or after
            assert meaning, f"{dataclass.__name__}.{statement.target.id} has no description"
            found[statement.target.id] = meaning
    return found


def _command_line() -> Iterator[str]:
    """Yield the help texts of all commands."""
    yield "# Command line\n"
    for name, description in COMMANDS.items():
        yield f"## bionemo {name}\n\n{description[0].upper()}{description[1:]}.\n"
        text = _help(name)
        yield text
        arguments = text.partition("positional arguments:\n")[2].partition("\n\n")[0]
        for subcommand in re.findall(r"^    ([a-z-]+)$|^    ([a-z-]+)  ", arguments, re.MULTILINE):
            yield _help(name, "".join(subcommand))
        for subcommand in _SUBCOMMANDS.get(name, ()):
            yield _help(name, subcommand)


def _help(*arguments: str) -> str:
    """Return the help text of a command as a block."""
    command = [sys.executable, "-m", "bionemo.cli", *arguments, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    text = re.sub(r"\((/[^)]*)/bionemo", "(bionemo", done.stdout).replace(str(ROOT), "")
    return f"```text\n$ bionemo {' '.join(arguments)} --help\n{text.rstrip()}\n```\n"
