# SPDX-License-Identifier: Apache-2.0
"""`bionemo doctor` prints versions and devices."""

import os
from importlib import metadata

import pytest
import torch

from bionemo.cli import doctor


def test_versions_and_devices() -> None:
    topics = dict(doctor.describe_machine())
    assert f"torch {metadata.version('torch')}" in topics["packages"]
    assert topics["CPU"].startswith(f"{len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}")
    assert ("GPU" in topics) == (not torch.cuda.is_available())


def test_amx_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "amx_is_broken", lambda: True)
    assert ", AMX that does not work (oneDNN does not use it); memory" in dict(doctor.describe_machine())["CPU"]
