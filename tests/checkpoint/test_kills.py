# SPDX-License-Identifier: Apache-2.0
"""Processes that save repeatedly are killed at random times; saved checkpoints are complete, nothing else remains."""

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
from bionemo.checkpoint import Piece, split_into_blocks
from bionemo.megatron.async_save import CheckpointWriter
from bionemo.training.checkpointing import CheckpointCallback
from tests.checkpoint.samples import names, newest
from tests.support.runs import config

FORK = multiprocessing.get_context("fork")  # the child imports nothing again
SIZE = 60_000  # values of the tensor
KEPT = 2  # best ones


def state(step: int) -> dict[str, Any]:
    loss = random.Random(step).random()  # sometimes a new best one
    return {"global_step": step, "metrics": {"val_loss": loss}}


def pieces(step: int, rank: int, ranks: int) -> list[Piece]:
    """Return this process's range of a matrix, which does not consist of whole rows."""
    shape, start, stop = (SIZE // 100, 100), SIZE * rank // ranks + 7 * rank, SIZE * (rank + 1) // ranks
    stop += 7 * (rank + 1) * (rank + 1 < ranks)
    return [
        Piece("weights/w", shape, offset, torch.full(size, float(step)))
        for offset, size in split_into_blocks(shape, start, stop)
    ]


def save_without_end(
    callback: CheckpointCallback, saved: Any, begun: Any, way: str, store: Path, rank: int = 0, ranks: int = 1
) -> None:
    """Clean up, resume from the newest checkpoint, and save, keeping the last and the best, like a run."""
    if way == "copies":
        os.link = lambda *_: os.stat("/no hard links here")  # type: ignore[assignment]
    saver = CheckpointWriter(asynchronous=way == "behind")
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        saver.create_process_group()
    directory = callback.directory
    found, messages = newest(directory)
    assert not messages, messages
    step = read(found) if found else 0
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        checkpoint.remove_unfinished(directory)
    while True:
        step += 1
        begun.value = step
        save_one(callback, saver, step, pieces(step, rank, ranks), partial(setattr, saved, "value", step))


def save_one(
    callback: CheckpointCallback, saver: CheckpointWriter, step: int, parts: list[Piece], done: Callable[[], None]
) -> None:
    last = callback.directory / f"step={step}-last"

    def prune() -> None:
        done()
        callback._link_and_prune(last, f"step={step}")

    saver.save(last, state(step), parts)
    saver.after_save(prune)


def read(path: Path) -> int:
    """Return the step of a checkpoint, after checking that all values equal it."""
    checkpoint.check(path)
    saved = checkpoint.Checkpoint(path)
    step = int(saved.state["global_step"])
    assert (saved.read("weights/w") == step).all()
    return step


def kill_while_saving(directory: Path, kills: int, way: str) -> None:
    directory.mkdir()
    params = "exp_manager.checkpoint_callback_params"
    overrides = (f"{params}.save_top_k={KEPT}", f"{params}.monitor=val_loss", f"{params}.mode=min")
    callback = CheckpointCallback(directory, config(directory.with_name("run"), *overrides).exp_manager)
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
        while saved.value == before:  # it has entered the loop
            time.sleep(0.0005)
            assert all(process.is_alive() for process in processes)
        time.sleep(generator.uniform(0, 0.05))
        for process in generator.sample(processes, ranks):
            process.kill()
            time.sleep(generator.choice([0, generator.uniform(0, 0.02)]))
        for process in processes:
            process.join()
        midway += begun.value > saved.value or len(names(directory)) > 1 + KEPT

        found, messages = newest(directory)
        assert messages == []
        assert found is not None
        step = read(found)
        assert saved.value <= step <= begun.value <= saved.value + 1 + (way == "behind")
        checkpoint.remove_unfinished(directory)  # like the next start
        save_one(callback, CheckpointWriter(), step + 1, pieces(step + 1, 0, 1), lambda: None)
        assert read(directory / f"step={step + 1}-last") == step + 1
        kept = names(directory) - {f"step={step + 1}-last"}
        assert len(kept) == KEPT if step >= KEPT else len(kept) <= KEPT
        assert not [name for name in kept if "last" in name or not name.removeprefix("step=").isdigit()]
        for path in directory.iterdir():
            manifest = checkpoint.load_manifest(path)
            assert names(path) == {"manifest.json", *manifest["bytes"]}
        saved.value = begun.value = step + 1
    assert midway > kills / 3


WAYS = ["links", "copies", "behind", "two processes"]


@pytest.mark.parametrize("way", WAYS)
def test_kills_while_saving(tmp_path: Path, way: str) -> None:
    kill_while_saving(tmp_path / "saved", 8 if way in ("copies", "behind") else 15, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_kills_while_saving_300_times(tmp_path: Path, way: str) -> None:
    kill_while_saving(tmp_path / "saved", 300, way)
