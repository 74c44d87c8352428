# SPDX-License-Identifier: Apache-2.0
"""Consistency between ranks: all ranks report the first difference, without secrets."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from bionemo.common.errors import UserError
from bionemo.training.rank_consistency import check_equal_on_all_ranks, flatten_config


class World:
    """Ranks as threads, with the parts of Lightning's trainer that broadcast and reduce."""

    root_device = torch.device("cpu")

    def __init__(self, facts: list[dict[str, str]]) -> None:
        self._facts, self._met, self._slots = facts, threading.Barrier(len(facts)), {}
        self.here = threading.local()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self._exchange(value)[src]

    def reduce(self, value: torch.Tensor, reduce_op: str) -> torch.Tensor:
        values = torch.stack(list(self._exchange(value).values()))
        return values.sum(0) if reduce_op == "sum" else values.amax(0)

    def _exchange(self, value: Any) -> dict[int, Any]:
        self._met.wait()
        self._slots[self.here.rank] = value
        self._met.wait()
        return dict(self._slots)

    def compare(self) -> set[str]:
        """Return the errors of all ranks for their values."""

        def compare(rank: int) -> str:
            self.here.rank = rank
            trainer: Any = SimpleNamespace(strategy=self, global_rank=rank, world_size=len(self._facts))
            try:
                check_equal_on_all_ranks(trainer, self._facts[rank])
            except UserError as error:
                return str(error).split(": all ranks")[0]
            return ""

        with ThreadPoolExecutor(len(self._facts)) as pool:
            return set(pool.map(compare, range(len(self._facts))))


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
