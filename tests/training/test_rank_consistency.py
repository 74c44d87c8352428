# SPDX-License-Identifier: Apache-2.0
"""What ranks must have in common: the first difference is named, by all alike, and no secret with it."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from bionemo.common.errors import UserError
from bionemo.training.rank_consistency import flat, same_everywhere


class World:
    """Ranks that are threads: enough of Lightning's trainer to broadcast and reduce."""

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
        """What all ranks say of their facts."""

        def compare(rank: int) -> str:
            self.here.rank = rank
            trainer: Any = SimpleNamespace(strategy=self, global_rank=rank, world_size=len(self._facts))
            try:
                same_everywhere(trainer, self._facts[rank])
            except UserError as error:
                return str(error).split(": all ranks")[0]
            return ""

        with ThreadPoolExecutor(len(self._facts)) as pool:
            return set(pool.map(compare, range(len(self._facts))))


def test_the_first_difference_is_told_by_all_ranks_alike() -> None:
    at = f"(host {socket.gethostname()})"
    same = {"a": "1", "b": "2"}
    assert World([same] * 4).compare() == {""}
    assert World([same, same, {"a": "1", "b": "3"}]).compare() == {f"b is 2 on rank 0, 3 on rank 2 {at}"}
    more = World([same, {"a": "1"}, {"b": "2"}, same]).compare()
    assert more == {f"b is 2 on rank 0, not set on rank 1 {at} and 1 more ranks"}
    assert World([same, {**same, "c": "x"}]).compare() == {f"c is not set on rank 0, x on rank 1 {at}"}


def test_secrets_are_compared_and_not_shown() -> None:
    trees = [{"logger": {"api_key": key, "name": "x", "tags": ["y"]}} for key in ("open", "sesame")]
    facts = [dict(flat(tree)) for tree in trees]
    assert facts[0]["logger.name"] == "x"
    assert World(facts).compare() == {
        f"logger.api_key differs between rank 0 and rank 1 (host {socket.gethostname()})"
    }
    assert not {"open", "sesame"} & {value for each in facts for value in each.values()}
