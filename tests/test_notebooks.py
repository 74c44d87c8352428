# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, produce the expected results, and are stored without outputs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

# Assertions about the variables of each executed notebook, and its number of figures.
OUTCOMES = {
    "pretrain": (
        """
        assert best < reached < frequencies - 0.05
        steps, losses = zip(*curves["val_loss"])
        assert list(steps) == [40, 80, 120]
        assert losses[-1] == min(losses)
        assert any("resuming from" in line for line in lines)
        assert Path("run/checkpoints/esm2-mock.nemo").is_file()
        """,
        2,
    ),
    "embed": (
        """
        assert embeddings.shape == (120, 64) and [each.shape for each in hiddens] == [(10, 64), (19, 64)]
        assert agreement > 0.6
        assert np.allclose(arrays["embeddings"], embeddings, atol=1e-5)
        assert not np.allclose(arrays["begin"], embeddings, atol=1e-2)
        assert arrays["id"].tolist() == [f"protein{number}" for number in range(120)]
        assert (natural < mixed).mean() > 0.6
        """,
        1,
    ),
    "proteins": (
        """
        assert natural.mean() < mixed.mean() - 3
        assert Path("report.html").is_file()
        assert len(known) == 8 and all(set(text) <= set(LETTERS) for text in known)
        """,
        1,
    ),
    "molecules": (
        """
        assert agreement > 0.4
        assert len(new) > 30
        assert len(Path("queries.csv").read_text().splitlines()) == 21
        """,
        2,
    ),
    "finetune": (
        """
        assert alone > commonest + 5
        assert report["test_accuracy"] > alone + 3
        assert Path("head/head.safetensors").is_file()
        """,
        1,
    ),
    "variants": (
        """
        assert masked.shape == unmasked.shape == (90, 20)
        assert inside < outside - 0.5
        assert correlation > 0.7
        one, two, both, wild = score_variants(model, sequence, ["V31D", "G33A", "V31D:G33A", "wt"])
        assert abs(one + two - both) < 1e-4 and wild == 0 and abs(one - masked.loc[31, "D"]) < 1e-4
        assert area > 0.75
        """,
        4,
    ),
}


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncKernelManager]:
    """Start the Python that runs the tests, whatever kernels are installed, with sockets in its own directory."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # an unused compiler that takes seconds to import
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # socket paths must be short
        yield AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=f"{sockets}/kernel.json",
            transport="ipc",
        )


def test_every_notebook_has_assertions() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(OUTCOMES)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, kernel: AsyncKernelManager, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    outcome, pictures = OUTCOMES[path.stem]
    notebook.cells.append(nbformat.v4.new_code_cell(f"if True:{outcome}"))
    here = tmp_path / "here"
    here.mkdir()
    NotebookClient(notebook, km=kernel, timeout=1200, resources={"metadata": {"path": here}}).execute(cleanup_kc=True)
    assert not list(here.iterdir()), "it writes beside itself"
    outputs = [output for cell in notebook.cells[:-1] if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    text = "".join(output.get("text", "") for output in outputs)
    assert not [word for word in ("Traceback", "error:", "Warning", "\x1b") if word in text], text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 6 <= len(code) <= 12
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert not any(cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown"
