"""Run `python -m bionemo.launch` in this process."""

import os
import sys
from pathlib import Path

import pytest

from bionemo.cli.launch import main
from tests.support.runs import tiny

BCP = ["cluster=bcp", "cluster.instance=dgxa100.80g.8.norm", "cluster.image=org/bionemo:1", "cluster.total_runtime=6H"]
MOCK_RUN = tiny("trainer.devices=2", "trainer.num_nodes=2", "name=small")


def launch(monkeypatch: pytest.MonkeyPatch, here: Path, *arguments: str, path: Path | None = None) -> int:
    """Run the command in a directory, with the programs of `path` first in PATH; return the exit status."""
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["launch.py", "--config-name=pretrain_esm2_8M", *arguments])
    if path is not None:
        monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
