# SPDX-License-Identifier: Apache-2.0
"""Consistency between ranks: all ranks report the first difference, without secrets."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from bionemo.common.errors import UserError
from bionemo.training import rank_consistency
from bionemo.training.rank_consistency import check_equal_on_all_ranks, check_shared, flatten_config


class World:
    """Ranks as threads that broadcast and gather values."""

    def __init__(self, facts: list[dict[str, str]]) -> None:
        self._facts, self._met, self._slots = facts, threading.Barrier(len(facts)), {}
        self.here = threading.local()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self._exchange(value)[src]

    def all_gather(self, value: Any) -> list[Any]:
        return [found for _, found in sorted(self._exchange(value).items())]

    def _exchange(self, value: Any) -> dict[int, Any]:
        self._met.wait()
        self._slots[self.here.rank] = value
        self._met.wait()
        return dict(self._slots)

    def compare(self) -> set[str]:
        """Return the errors of all ranks for their values."""
        errors = self.run(lambda trainer, rank: check_equal_on_all_ranks(trainer, self._facts[rank]))
        return {error.split(": all ranks")[0] for error in errors}

    def run(self, check: Callable[[Any, int], None]) -> set[str]:
        """Return the errors of all ranks for a check."""

        def run(rank: int) -> str:
            self.here.rank = rank
            size = len(self._facts)
            trainer = SimpleNamespace(strategy=self, global_rank=rank, world_size=size, is_global_zero=rank == 0)
            try:
                check(trainer, rank)
            except UserError as error:
                return str(error)
            return ""

        with (
            patch.object(rank_consistency, "_all_gather", self.all_gather),
            ThreadPoolExecutor(len(self._facts)) as pool,
        ):
            return set(pool.map(run, range(len(self._facts))))


def test_all_ranks_report_the_first_difference() -> None:
    at = f"(host {socket.gethostname()})"
    same = {"a": "1", "b": "2"}
    assert World([same] * 4).compare() == {""}
    assert World([same, same, {"a": "1", "b": "3"}]).compare() == {f"b is 2 on rank 0, 3 on rank 2 {at}"}
    more = World([same, {"a": "1"}, {"b": "2"}, same]).compare()
    assert more == {f"b is 2 on rank 0, not set on rank 1 {at} and 1 more ranks"}
    assert World([same, {**same, "c": "x"}]).compare() == {f"c is not set on rank 0, x on rank 1 {at}"}


def test_secrets_are_compared_but_not_printed() -> None:
    trees = [{"logger": {"api_key": key, "name": "x", "tags": ["y"]}} for key in ("open", "sesame")]
    facts = [dict(flatten_config(tree)) for tree in trees]
    assert facts[0]["logger.name"] == "x"
    assert World(facts).compare() == {
        f"logger.api_key differs between rank 0 and rank 1 (host {socket.gethostname()})"
    }
    assert not {"open", "sesame"} & {value for each in facts for value in each.values()}


def test_a_directory_that_hosts_do_not_share_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is on a host where the path leads to another disk, as in a mount namespace of its own."""
    world, exists = World([{}] * 3), Path.exists
    monkeypatch.setattr(rank_consistency, "_VISIBLE_SECONDS", 0.3)
    assert world.run(lambda trainer, rank: check_shared(trainer, [tmp_path])) == {""}

    monkeypatch.setattr(Path, "exists", lambda path: world.here.rank != 2 and exists(path))
    here = socket.gethostname()
    assert world.run(lambda trainer, rank: check_shared(trainer, [tmp_path])) == {
        f"exp_manager.exp_dir: {tmp_path} is not the same directory on host {here} (rank 0) and host {here} (rank 2): "
        "choose a directory on a file system that all machines share"
    }
    assert list(tmp_path.iterdir()) == []
