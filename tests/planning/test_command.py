# SPDX-License-Identifier: Apache-2.0
"""`bionemo plan` on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.cli.plan import main
from bionemo.planning.report import _format_count, format_time
from tests.conftest import EXAMPLES, ROOT

HEAVY = "torch", "lightning", "megatron", "nemo", "transformers"
RUN_WITHOUT_TORCH = f"""
import sys
from bionemo.cli.plan import main
try:
    main()
finally:
    assert not {{*{HEAVY}}} & set(sys.modules)
"""


def run_plan(
    directory: Path, *arguments: str, code: str = "from bionemo.cli.plan import main; main()"
) -> tuple[int, str, str]:
    """Run the command; it must not write files."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list(directory.iterdir())
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--help", ""), ("model.hiden_size=3", "hidden_size"), ("trainer.devices=auto", "give a number")],
)
def test_help_and_errors_do_not_import_torch(argument: str, message: str, tmp_path: Path) -> None:
    status, out, err = run_plan(tmp_path, argument, code=RUN_WITHOUT_TORCH)
    assert status == bool(message)
    assert bool(out) != bool(message)
    assert message in err
    assert err.count("\n") == bool(message)


@pytest.mark.slow
def test_plan_from_any_directory(tmp_path: Path) -> None:
    arguments = (
        "trainer.devices=8",
        "trainer.num_nodes=4",
        "trainer.precision=bf16-mixed",
        "model.tensor_model_parallel_size=2",
        "model.global_batch_size=2048",
    )
    status, out, err = run_plan(tmp_path, "--config-name=pretrain_esm2_650M", *arguments)
    assert (status, err) == (0, "")
    for part in (
        "651,164,288 parameters",
        "32 x H100 80 GB: data 16 x tensor 2 x pipeline 1",
        ": fits",
        "MFU",
        "days",
    ):
        assert part in out
    assert max(map(len, out.splitlines())) < 160


def test_plan_of_an_encoder_decoder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", "--config-name=pretrain_small_span_aug"])
    main()
    out, _ = capsys.readouterr()
    for part in ("2,048 sequences of 36 + 44 tokens", "as in ZINC15", ": fits", "MFU", "days"):
        assert part in out


def test_many_gpus_of_a_node_are_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config-name=pretrain_esm2_8M", "trainer.devices=32", "--tokens=999.6M", "--json"]
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
    main()
    assert "note: trainer.devices=32: " in (err := capsys.readouterr().err)
    assert "set trainer.devices=8 trainer.num_nodes=4" in err


def test_format() -> None:
    assert [format_time(each) for each in (46, 3600, 86400)] == ["0.767 minutes", "1 hours", "1 days"]
    assert [_format_count(each) for each in (1e11, 999.6e6, 1.5e12, 12345)] == [
        "100 billion", "1 billion", "1.5 trillion", "12,345",
    ]  # fmt: skip


@pytest.mark.slow
def test_json_of_a_layout_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--config-name=pretrain_esm2_15B", f"--config-dir={EXAMPLES / 'esm2nv' / 'conf'}"
    given = [*arguments, "--device", "a100-40", "--json", "model.micro_batch_size=4"]
    monkeypatch.setattr(sys, "argv", ["plan.py", *given])
    main()
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_memory"] > 0.92 * 40 * 2**30
    assert plan["fits"] is False
    assert sum(plan["parameters"].values()) == 15_129_584_768


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.hiden_size=3"], "hidden_size"),
        (["trainer.devices=3", "model.tensor_model_parallel_size=2"], "not divisible"),
        (["trainer.devices=auto"], "give a number"),
        (["--device=h1000"], "choose one of"),
    ],
)
def test_error_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    out, err = capsys.readouterr()
    assert (ending.value.code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_lists_the_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", "--help"])
    main()
    out = capsys.readouterr().out
    for text in ("--device=a100-40", "--json", "pretrain_esm2_8M", "tensor_model_parallel_size=2"):
        assert text in out
