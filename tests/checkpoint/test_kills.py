# SPDX-License-Identifier: Apache-2.0
"""Processes that save without end are killed at any moment: what they had saved is there, whole, and nothing else."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bionemo import checkpoint
from bionemo.checkpoint import Piece, blocks
from bionemo.megatron.async_save import Saver
from bionemo.training.checkpointing import Checkpoints
from tests.checkpoint.samples import names, newest
from tests.training.runs import config

FORK = multiprocessing.get_context("fork")  # nothing to import again
SIZE = 60_000  # values of the tensor
KEPT = 2  # best ones


def state(step: int) -> dict[str, Any]:
    loss = random.Random(step).random()  # a new best one every now and then
    return {"global_step": step, "metrics": {"val_loss": loss}}


def pieces(step: int, rank: int, ranks: int) -> list[Piece]:
    """This process's stretch of a matrix, cut so that it is no number of rows."""
    shape, start, stop = (SIZE // 100, 100), SIZE * rank // ranks + 7 * rank, SIZE * (rank + 1) // ranks
    stop += 7 * (rank + 1) * (rank + 1 < ranks)
    return [
        Piece("weights/w", shape, offset, torch.full(size, float(step))) for offset, size in blocks(shape, start, stop)
    ]


def save_without_end(
    callback: Checkpoints, saved: Any, begun: Any, way: str, store: Path, rank: int = 0, ranks: int = 1
) -> None:
    """What a run does with its checkpoints: clear up, go on from the newest, save, keep the last and the best."""
    if way == "copies":
        os.link = lambda *_: os.stat("/no hard links here")  # type: ignore[assignment]
    saver = Saver(behind=way == "behind")
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        saver.connect()
    directory = callback.directory
    found, heard = newest(directory)
    assert not heard, heard
    step = read(found) if found else 0
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        checkpoint.clean(directory)
    while True:
        step += 1
        begun.value = step
        save_one(callback, saver, step, pieces(step, rank, ranks), partial(setattr, saved, "value", step))


def save_one(callback: Checkpoints, saver: Saver, step: int, parts: list[Piece], done: Callable[[], None]) -> None:
    last = callback.directory / f"step={step}-last"

    def then() -> None:
        done()
        callback._prune(last, f"step={step}")

    saver.save(last, state(step), parts, then)


def read(path: Path) -> int:
    """Step of a checkpoint, all of whose values are that."""
    checkpoint.check(path)
    saved = checkpoint.Checkpoint(path)
    step = int(saved.state["global_step"])
    assert (saved.read("weights/w") == step).all()
    return step


def kill_while_saving(directory: Path, kills: int, way: str) -> None:
    directory.mkdir()
    params = "exp_manager.checkpoint_callback_params"
    words = (f"{params}.save_top_k={KEPT}", f"{params}.monitor=val_loss", f"{params}.mode=min")
    callback = Checkpoints(directory, config(directory.with_name("run"), *words).exp_manager)
    ranks, generator = 2 if way == "two processes" else 1, random.Random(kills)
    saved, begun = FORK.Value("q", 0, lock=False), FORK.Value("q", 0, lock=False)
    midway = 0
    for kill in range(kills):
        before, store = saved.value, directory.with_name(f"store {kill}")
        processes = [
            FORK.Process(target=save_without_end, args=(callback, saved, begun, way, store, rank, ranks))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while saved.value == before:  # it has found its way into the loop
            time.sleep(0.0005)
            assert all(process.is_alive() for process in processes)
        time.sleep(generator.uniform(0, 0.05))
        for process in generator.sample(processes, ranks):
            process.kill()
            time.sleep(generator.choice([0, generator.uniform(0, 0.02)]))
        for process in processes:
            process.join()
        midway += begun.value > saved.value or len(names(directory)) > 1 + KEPT

        found, heard = newest(directory)
        assert heard == []
        assert found is not None
        step = read(found)
        assert saved.value <= step <= begun.value <= saved.value + 1 + (way == "behind")
        checkpoint.clean(directory)  # as the next start does
        save_one(callback, Saver(), step + 1, pieces(step + 1, 0, 1), lambda: None)
        assert read(directory / f"step={step + 1}-last") == step + 1
        kept = names(directory) - {f"step={step + 1}-last"}
        assert len(kept) == KEPT if step >= KEPT else len(kept) <= KEPT
        assert not [name for name in kept if "last" in name or not name.removeprefix("step=").isdigit()]
        for path in directory.iterdir():
            manifest = checkpoint.manifest_of(path)
            assert names(path) == {"manifest.json", *manifest["bytes"]}
        saved.value = begun.value = step + 1
    assert midway > kills / 3


WAYS = ["links", "copies", "behind", "two processes"]


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_while_saving_loses_nothing_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    kill_while_saving(tmp_path / "saved", 8 if way in ("copies", "behind") else 15, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_three_hundred_kills_while_saving(tmp_path: Path, way: str) -> None:
    kill_while_saving(tmp_path / "saved", 300, way)
