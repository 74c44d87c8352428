# SPDX-License-Identifier: Apache-2.0
"""Training of a tiny model on several processes with several parallel layouts, without a trainer."""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bionemo.checkpoint import Checkpoint, save_distributed
from bionemo.config.compose import load
from bionemo.config.micro_batches import divide_batch
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.loader import StepBatch
from bionemo.data.sampler import DataPosition
from bionemo.megatron import groups
from bionemo.megatron.sharded_state_dict import load_optimizer, load_weights, optimizer_pieces, weight_pieces
from bionemo.megatron.train_step import ParallelModel
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from bionemo.training.optimizers import build_optimizer
from tests.support.runs import FORK, MODELS, tiny

ROWS = 8  # sequences per global batch


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sharded: bool = False
    sequence: bool = False

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        marks = "+sharded" * self.sharded + "+sp" * self.sequence
        return f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}{marks}"

    def config(self, model: str) -> RunConfig:
        family = MODELS[model]
        return load(
            family.name,
            tiny(
                f"model.tensor_model_parallel_size={self.tensor}", f"model.sequence_parallel={self.sequence}",
                f"model.pipeline_model_parallel_size={self.pipeline}", f"trainer.devices={self.processes}",
                f"model.optim.name={'distributed_fused_adam' if self.sharded else 'fused_adam'}",
                "model.num_layers=4", "model.optim.lr=4e-4", "model.num_attention_heads=4", "model.micro_batch_size=2",
                f"trainer.accumulate_grad_batches={ROWS // 2 // self.data}", model=model,
            ),
            family.directory / "conf",
        )  # fmt: skip


UP_TO_FOUR = [
    Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(data=2), Layout(data=2, sharded=True), Layout(tensor=4),
    Layout(pipeline=4), Layout(data=4), Layout(data=4, sharded=True), Layout(tensor=2, pipeline=2),
    Layout(tensor=2, pipeline=2, sequence=True), Layout(tensor=2, data=2), Layout(tensor=2, data=2, sharded=True),
    Layout(pipeline=2, data=2), Layout(pipeline=2, data=2, sharded=True),
]  # fmt: skip


class Run:
    """A model, its optimizer and its data during training."""

    def __init__(self, layout: Layout, model: str) -> None:
        cfg = layout.config(model)
        kind = load_model_class(cfg.model._target_)
        vocabulary = load_tokenizer(kind.tokenizer, cfg.model.tokenizer)
        module = kind(cfg.model, vocabulary)
        module.initialize_weights(seed=1)
        self.model = ParallelModel(module, nullcontext, layout.sharded)
        self.optimizer = build_optimizer(
            cfg.model.optim, self.model.optimizer_shards, self.model.model.learning_rate_factor
        )
        micro_batches = divide_batch(cfg.model, cfg.trainer, layout.processes, on_gpu=False)
        data = SequenceData(cfg.model, cfg.trainer, vocabulary, kind.dataset, micro_batches)
        strategy = SimpleNamespace(data_parallel_rank=groups.data_rank(), data_parallel_size=groups.data_size())
        data.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
        self._data, self.step = data, 0

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Return loss and gradient norm of the next steps."""
        seen = []
        batches = iter(self._data.training_steps())
        for _ in range(steps):
            step: StepBatch = next(batches)
            loss, count = self.model.forward_backward(step.micro_batches)
            norm = self.model.gradient_norm()
            seen.append((float(loss / count), float(norm)))
            self.optimizer.grad_scale = self.model.gradient_scale(norm)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.model.finish_update()
            self._data.position, self.step = step.next_position, self.step + 1
        return seen

    def save(self, path: Path) -> None:
        state = {"global_step": self.step, "position": vars(self._data.position)}
        pieces = [*weight_pieces(self.model), *optimizer_pieces(self.model, self.optimizer)]
        save_distributed(path, state, pieces, dist.get_rank(), exchange)

    def load(self, path: Path) -> None:
        saved = Checkpoint(path)
        self.step, self._data.position = saved.state["global_step"], DataPosition(**saved.state["position"])
        load_weights(self.model.shards, saved)
        load_optimizer(self.model, self.optimizer, saved, self.step)


def exchange(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_process(layout: Layout, work: Callable[..., Any], *arguments: Any, directory: Path) -> Any:
    """Run `work(layout, *arguments)` on all processes of the layout; return the result of rank 0."""
    result = directory / f"{layout}.result"
    store = directory / f"{layout}.{uuid.uuid4().hex}.store"  # a file, because another process may take a free port
    processes = [
        FORK.Process(target=_process, args=(layout, rank, store, result, work, arguments))
        for rank in range(layout.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, f"{layout}: {process.exitcode}"
    return torch.load(result)


def _process(layout: Layout, rank: int, store: Path, result: Path, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=layout.processes)
    groups.initialize(layout.tensor, layout.pipeline)
    done = work(layout, *arguments)
    if rank == 0:
        torch.save(done, result)
    dist.barrier()
    dist.destroy_process_group()
