# SPDX-License-Identifier: Apache-2.0
"""Benchmark saving, verifying and loading an ESM-2 checkpoint against Lightning, alternately.

    python checkpoint.py --millions 85 --repeats 5 --directory . --directory /dev/shm
    python checkpoint.py --position

The checkpoint has weights and two Adam moments in fp32, 1 GB for 85 million parameters. Our checkpoint is hashed and
flushed to disk when `save` returns. Lightning's TorchCheckpointIO computes no hashes and does not flush; `lightning,
flushed` adds an fsync of file and directory, `ours, not flushed` omits ours. Each measurement runs in its own process
and starts after all earlier writes are on disk. Peak memory is measured above that of the process without any
tensors, as a multiple of the size of the tensors. `verify` hashes every file and `load` copies every tensor; both
read from the page cache. Lightning verifies nothing.

`--position` times the first training batch at step 1,000,000 and at step 0.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HIDDEN, FEED_FORWARD = 768, 3072
KINDS = ("ours", "lightning", "lightning, flushed", "ours, not flushed")


def shapes(millions: float) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of an ESM-2 of about this size."""
    layer = {
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN), "self_attention.linear_qkv.bias": (3 * HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN), "self_attention.linear_proj.bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (FEED_FORWARD, HIDDEN), "mlp.linear_fc1.bias": (FEED_FORWARD,),
        "mlp.linear_fc2.weight": (HIDDEN, FEED_FORWARD), "mlp.linear_fc2.bias": (HIDDEN,),
        "input_layernorm.weight": (HIDDEN,), "input_layernorm.bias": (HIDDEN,),
        "pre_mlp_layernorm.weight": (HIDDEN,), "pre_mlp_layernorm.bias": (HIDDEN,),
    }  # fmt: skip
    layers = round(millions * 1e6 / sum(map(math.prod, layer.values())))
    return {"word_embeddings.weight": (64, HIDDEN)} | {
        f"encoder.layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()
    }


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(kind: str, directory: Path, millions: float) -> dict[str, float]:
    """Save, verify and load once in this process."""
    import torch

    from bionemo import checkpoint

    if "lightning" in kind:
        from lightning.pytorch.plugins.io import TorchCheckpointIO
    torch.set_num_threads(1)
    if kind == "ours, not flushed":
        os.fsync = lambda descriptor: None  # type: ignore[assignment]
    os.sync()
    peak_before = peak()
    random = torch.randn(HIDDEN * FEED_FORWARD)  # the largest tensor; the others are prefixes of it
    state = {
        group: {name: random[: math.prod(shape)].view(shape).clone() for name, shape in shapes(millions).items()}
        for group in ("weights", "exp_avg", "exp_avg_sq")
    }
    payload = sum(values.nbytes for group in state.values() for values in group.values())
    path = directory / "checkpoint"
    loaded: Any = None

    def ours() -> None:
        pieces = [
            checkpoint.Piece(f"{group}/{name}", tuple(values.shape), (0,) * values.ndim, values)
            for group, tensors in state.items()
            for name, values in tensors.items()
        ]
        checkpoint.save(path, {"global_step": 1}, pieces)

    def read_ours() -> None:
        nonlocal loaded
        saved = checkpoint.Checkpoint(path)
        loaded = [saved.read(name).clone() for name in saved.shapes()]

    def lightning() -> None:
        weights = state["weights"]
        moments = {name: (state["exp_avg"][name], state["exp_avg_sq"][name]) for name in weights}
        TorchCheckpointIO().save_checkpoint({"state_dict": weights, "optimizer_states": [moments]}, path)
        for place in (path, directory) if "flushed" in kind else ():
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def read_lightning() -> None:
        nonlocal loaded
        loaded = TorchCheckpointIO().load_checkpoint(path)

    save, read = (ours, read_ours) if "ours" in kind else (lightning, read_lightning)
    figures = {"save": timed(save), "payload": payload}
    figures["peak"] = (peak() - peak_before) / payload
    figures["verify"] = timed(lambda: checkpoint.check(path)) if "ours" in kind else 0.0
    state.clear()
    figures["load"] = timed(read)
    return figures


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(values: list[float]) -> str:
    """Format median and range."""
    return f"{median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def compare(parent: Path, millions: float, repeats: int) -> None:
    """Measure all variants alternately."""
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, found in figures.items():
            with tempfile.TemporaryDirectory(dir=parent) as directory:
                command = [sys.executable, __file__, "--measure", kind, "--directory", directory]
                done = subprocess.run(
                    [*command, f"--millions={millions}"], check=True, stdout=subprocess.PIPE, text=True
                )
                found.append(json.loads(done.stdout.splitlines()[-1]))
    disk = shutil.disk_usage(parent)
    print(f"{parent.absolute()} ({disk.free / 1e9:,.0f} GB free), {figures['ours'][0]['payload'] / 1e6:,.0f} MB")
    for kind, found in figures.items():
        rates = [reading["payload"] / reading["save"] / 1e6 for reading in found]
        print(f"  {kind:20} save {summary(rates)} MB/s, peak {summary([reading['peak'] for reading in found])}, "
              f"verify {summary([reading['verify'] for reading in found])} s, "
              f"load {summary([reading['load'] for reading in found])} s")  # fmt: skip
        pairs = zip(figures["ours"], found, strict=True)
        print(f"  {'':20} ours saves {summary([b['save'] / a['save'] for a, b in pairs])} times as fast")


def position(repeats: int) -> None:
    """Time the first batch at two positions of the stream."""
    from proteins import proteins

    import bionemo
    from bionemo.config.compose import load
    from bionemo.config.micro_batches import divide_batch
    from bionemo.data.data_module import SequenceData
    from bionemo.data.proteins.masking import MaskedDataset
    from bionemo.data.sampler import DataPosition
    from bionemo.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        fasta = Path(directory) / "train.fasta"
        fasta.write_text("".join(f">{i}\n{s}\n" for i, s in enumerate(proteins(None, 200_000))))
        words = ["dataset_path=" + directory, f"dataset.train={fasta}", f"dataset.val={fasta}"]
        examples = Path(bionemo.__file__).parents[1] / "examples" / "protein" / "esm2nv" / "conf"
        overrides = ["data@model.data=fasta", *(f"model.data.{word}" for word in words)]
        cfg = load("pretrain_esm2_8M", overrides, examples)
        micro_batches = divide_batch(cfg.model, cfg.trainer, 1, on_gpu=False)
        data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm2nv"), MaskedDataset, micro_batches)
        records = len(data.dataset("train").records)
        rows_of_a_window = len(data.training_steps().sampler._pack_window(0))
        window, row = divmod(1_000_000 * micro_batches.size, rows_of_a_window)
        late = DataPosition(window, row, window * cfg.model.data.packing_window, 1)
        seconds: dict[DataPosition, list[float]] = {DataPosition(): [], late: []}
        for _ in range(repeats * 5):
            for start, found in seconds.items():
                data.position = start
                found.append(timed(lambda: next(iter(data.training_steps()))) * 1e3)
        print(f"first batch of {records:,} sequences, {micro_batches.size} rows of {cfg.model.seq_length} tokens")
        print(f"  at step 0          {summary(seconds[DataPosition()])} ms")
        print(f"  at step 1,000,000  {summary(seconds[late])} ms (window {late.window:,})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=85, help="parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, action="append", help="where to write; . and /dev/shm by default")
    parser.add_argument("--measure", choices=KINDS, help="one measurement in this process, as a JSON line")
    parser.add_argument("--position", action="store_true", help="time the first batch of a resumed training instead")
    options = parser.parse_args()
    directories = options.directory or [Path(), Path("/dev/shm")]
    if options.measure:
        print(json.dumps(measure(options.measure, directories[0], options.millions)))
    elif options.position:
        position(options.repeats)
    else:
        for directory in directories:
            compare(directory, options.millions, options.repeats)


if __name__ == "__main__":
    main()
