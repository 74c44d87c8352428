# SPDX-License-Identifier: Apache-2.0
"""examples/own_model: a model outside the package supports every command."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import bionemo
from bionemo.checkpoint import Checkpoint, tools
from bionemo.cli.main import main
from bionemo.cli.pretrain import pretrain
from bionemo.common.errors import UserError
from bionemo.config import targets
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.formats import nemo_archive
from tests.conftest import ROOT
from tests.support.finetuning import overrides, written
from tests.support.finetuning import run as fine_tune
from tests.support.runs import MOCK, TINY, fingerprint, last_checkpoint, train

EXAMPLE = ROOT / "examples" / "own_model"
SEQUENCES = ["MKTAYIAKQR", "GAVL", "MSLLTEVETYVLSIIPSGPLKAEIAQRLEDVFAGK"]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the package importable, with the entry point of its pyproject.toml."""
    metadata = tmp_path_factory.mktemp("site") / "own_model-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-model\nVersion: 0.1.0\n")
    entry = re.search(r'"bionemo.models"\].*\n(\w+ = )"(\S+)"', (EXAMPLE / "pyproject.toml").read_text())
    assert entry
    (metadata / "entry_points.txt").write_text(f"[bionemo.models]\n{entry[1]}{entry[2]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(metadata.parent))
        patch.syspath_prepend(str(EXAMPLE))
        yield
    sys.modules.pop("own_model", None)


def configured(directory: Path, *overrides: str) -> RunConfig:
    given = [*TINY, *MOCK, "model.conv_dilation=2", f"exp_manager.exp_dir={directory}", *overrides]
    return load("pretrain_own_model", given, EXAMPLE / "conf")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run without interruption."""
    directory = tmp_path_factory.mktemp("own_model") / "run"
    pretrain(configured(directory))
    return directory


def command(monkeypatch: pytest.MonkeyPatch, *given: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bionemo", *map(str, given)])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # main() replaces it
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    main()


def test_convolution_equals_that_of_torch_for_each_sequence() -> None:
    from own_model import PackedConvolution

    torch.manual_seed(0)
    lengths, channels = [7, 1, 12], 8
    for kernel, dilation in ((1, 1), (3, 1), (5, 2)):
        convolution = PackedConvolution(channels, kernel, dilation)
        torch.nn.init.normal_(convolution.weight)
        x_TD = torch.randn(sum(lengths), channels)
        expected = [
            F.conv1d(part.T, convolution.weight.T[:, None], padding="same", dilation=dilation, groups=channels).T
            for part in x_TD.split(lengths)
        ]
        segment_ids = torch.repeat_interleave(torch.tensor(lengths))
        torch.testing.assert_close(convolution(x_TD, segment_ids), torch.cat(expected))


def test_resumed_run_is_bitwise_equal(trained: Path, tmp_path: Path) -> None:
    train(configured(tmp_path / "run"), stop_before_step=6)
    pretrain(configured(tmp_path / "run"))
    assert fingerprint(tmp_path / "run") == fingerprint(trained)


def test_resuming_with_another_dilation_is_an_error(trained: Path) -> None:
    with pytest.raises(UserError, match=r"model.conv_dilation was 2 and is now 1"):
        pretrain(configured(trained, "model.conv_dilation=1", "trainer.max_steps=9"))


def test_loaded_model_uses_the_saved_configuration(trained: Path) -> None:
    model = bionemo.load(last_checkpoint(trained), "cpu")
    config = model.network.config
    assert (config.conv_kernel, config.conv_dilation) == (5, 2)  # type: ignore[attr-defined]
    network = model.network
    embedded = model.embed(SEQUENCES)
    network.convolution.dilation = 1  # type: ignore[union-attr, assignment]
    assert np.abs(model.embed(SEQUENCES) - embedded).max() > 1e-4


def test_predict_writes_the_embeddings(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"id": ["a", "b", "c"], "sequence": SEQUENCES}).to_csv(tmp_path / "x.csv", index=False)
    command(
        monkeypatch, "predict", f"model.downstream_task.restore_from_path={last_checkpoint(trained)}",
        f"model.data.dataset_path={tmp_path}/x.csv", f"model.data.output_fname={tmp_path}/out.npz",
        "trainer.accelerator=cpu",
    )  # fmt: skip
    expected = bionemo.load(last_checkpoint(trained), "cpu").embed(SEQUENCES)
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["embeddings"], expected, atol=1e-6)


@pytest.mark.parametrize("allowed_by", ["entry point", "variable"])
def test_nemo_archive_has_the_same_embeddings(
    trained: Path, allowed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allowed_by == "variable":
        monkeypatch.setattr(targets, "_entry_points", list)
        monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "own_model")
    command(monkeypatch, "checkpoint", "convert", last_checkpoint(trained), tmp_path / "x.nemo")
    command(monkeypatch, "checkpoint", "convert", tmp_path / "x.nemo", tmp_path / "back")
    expected = bionemo.load(last_checkpoint(trained), "cpu").embed(SEQUENCES)
    for path in (tmp_path / "x.nemo", tmp_path / "back"):
        assert np.array_equal(bionemo.load(path, "cpu").embed(SEQUENCES), expected)


def test_nemo_archive_of_a_class_that_is_not_allowed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(monkeypatch, "checkpoint", "convert", last_checkpoint(trained), tmp_path / "x.nemo")
    monkeypatch.setattr(targets, "_entry_points", list)
    for path, problem in ((tmp_path / "x.nemo", "have no .nemo format"), (last_checkpoint(trained), "cannot import")):
        monkeypatch.delitem(sys.modules, "own_model", raising=False)
        with pytest.raises(UserError, match=rf"{problem}.*entry point bionemo.models or .*BIONEMO_TRUSTED_PACKAGES"):
            bionemo.load(path, "cpu")
        assert "own_model" not in sys.modules


SHAPE = {"convolution.weight": ("conv_kernel", "hidden_size")}
TABLES: dict[str, tuple[list[str], dict[str, tuple[str | int, ...]], str]] = {
    "name missing": ([], SHAPE, "1 weights are unknown: 'convolution.weight'"),
    "extra name": (
        ["convolution.weight", "more.weight"],
        SHAPE | {"more.weight": (3,)},
        "1 weights are missing: 'more.weight'",
    ),
    "wrong shape": (
        ["convolution.weight"],
        {"convolution.weight": ("conv_kernel", 3)},
        r"has shape \(5, 32\), expected \(5, 3\)",
    ),
    "no shape": (["convolution.weight"], {}, "the shape of convolution.weight is unknown"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_wrong_table_of_weights_ends_the_run_at_the_start(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from own_model import ConvolutionalEncoder

    names, shapes, problem = TABLES[case]
    table = ConvolutionalEncoder.nemo.names
    monkeypatch.delitem(table.names, "convolution.weight")  # type: ignore[attr-defined]
    monkeypatch.delitem(table.shapes, "convolution.weight")  # type: ignore[attr-defined]
    for name in names:
        monkeypatch.setitem(table.names, name, name)  # type: ignore[arg-type]
    for name, shape in shapes.items():
        monkeypatch.setitem(table.shapes, name, shape)  # type: ignore[arg-type]
    key = "exp_manager.checkpoint_callback_params.save_nemo_on_train_end"
    with pytest.raises(UserError, match=rf"^no .nemo file of own_model.Convolutional.*{problem}.*{key}=False$"):
        pretrain(configured(tmp_path / "run", f"{key}=True"))
    assert not list(tmp_path.glob("run/**/*.*"))


def test_a_key_that_was_added_later_has_the_default_of_the_dataclass(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from own_model import ConvolutionalEncoderConfig

    saved = Checkpoint(last_checkpoint(trained))
    config = {key: value for key, value in saved.config.items() if key != "conv_kernel"}
    tools.write_weights(tmp_path / "old", saved.state | {"config": config}, tools.iterate_weights(saved))
    expected = r"give model.conv_kernel=.* give a new key a default in the dataclass of own_model.Convolution"
    with pytest.raises(UserError, match=expected):
        bionemo.load(tmp_path / "old", "cpu")
    monkeypatch.setattr(ConvolutionalEncoderConfig.__dataclass_fields__["conv_kernel"], "default", 5)
    command(monkeypatch, "checkpoint", "convert", tmp_path / "old", tmp_path / "x.nemo")
    assert nemo_archive.read(tmp_path / "x.nemo").config["conv_kernel"] == 5
    embedded = bionemo.load(last_checkpoint(trained), "cpu").embed(SEQUENCES)
    assert np.array_equal(bionemo.load(tmp_path / "x.nemo", "cpu").embed(SEQUENCES), embedded)


def test_plan_counts_the_parameters_of_the_class(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [word for word in TINY if word.startswith("model.")]
    command(
        monkeypatch, "plan", f"--config-dir={EXAMPLE}/conf", "--config-name=pretrain_own_model", *overrides, *MOCK,
        "model.conv_dilation=2",
    )  # fmt: skip
    network = bionemo.load(last_checkpoint(trained), "cpu").network
    assert f"{sum(parameter.numel() for parameter in network.parameters()):,}" in capsys.readouterr().out


def test_fine_tuning(trained: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data")
    given = overrides(last_checkpoint(trained), data, tmp_path / "run")
    fine_tune(*given, "model.encoder_frozen=False")
    assert last_checkpoint(tmp_path / "run").is_dir()
