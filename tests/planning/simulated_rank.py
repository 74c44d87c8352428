# SPDX-License-Identifier: Apache-2.0
"""Small models of all families, and real training steps of one simulated rank of a parallel layout."""

import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bionemo.config.check import check_config
from bionemo.config.compose import load
from bionemo.config.schema import EncoderDecoderConfig, RunConfig, SpanDataConfig, TextDataConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import attention
from bionemo.megatron.groups import simulate
from bionemo.megatron.train_step import ParallelModel
from bionemo.models.language_model import LanguageModel, load_model_class
from bionemo.planning.layouts import read_layout
from bionemo.planning.lengths import Tokens
from bionemo.planning.measure import Costs, Step, measure_step
from bionemo.planning.report import Memory
from bionemo.tokenizers import load_tokenizer
from bionemo.training.optimizers import build_optimizer
from tests.conftest import ROOT
from tests.planning.storage_meter import StorageMeter
from tests.support.bpe import write_bpe

FAMILIES = {  # directory of the examples, configuration, data
    "esm1nv": ("protein/esm1nv", "pretrain_small", "mock"),
    "esm1b": ("protein/esm1b", "pretrain_esm1b_small", "mock"),
    "esm2nv": ("protein/esm2nv", "pretrain_esm2_8M", "mock"),
    "gpt3": ("gpt3", "pretrain_gpt3_126m", "mock_text"),
    "prott5nv": ("protein/prott5nv", "pretrain_small", "mock"),
    "megamolbart": ("molecule/megamolbart", "pretrain_base", "zinc15"),
}
SMALL = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
    "micro_batch_size": 4,
}  # fmt: skip


Overrides = dict[str, Any]


def recompute(granularity: str, method: str | None = None, layers: int = 1) -> Overrides:
    keys = ("granularity", "method", "num_layers")
    return {
        f"activations_checkpoint_{key}": value for key, value in zip(keys, (granularity, method, layers), strict=True)
    }


TENSOR: Overrides = {"gpus": 2, "tensor_model_parallel_size": 2}
SEQUENCE: Overrides = TENSOR | {"sequence_parallel": True}
STAGES: Overrides = {"gpus": 2, "pipeline_model_parallel_size": 2, "accumulate": 2}
CHANGES: dict[str, Overrides] = {
    "none": {},
    "selective": recompute("selective"),
    "uniform": recompute("full", "uniform"),
    "uniform-3": recompute("full", "uniform", 3),
    "block": recompute("full", "block"),
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "sequence and uniform": SEQUENCE | recompute("full", "uniform", 2),
    "stages": STAGES,
    "stages and full vocabulary": STAGES | {"full_vocabulary": True},
}


@cache
def _base(name: str) -> RunConfig:
    directory, config_name, data = FAMILIES[name]
    return load(
        config_name, [f"data@model.data={data}", "trainer.num_nodes=1"], ROOT / "examples" / directory / "conf"
    )


def config(name: str | RunConfig, gpus: int = 1, **changes: Any) -> RunConfig:
    """Return the configuration of a small model of a family.

    Args:
        name: name of the family, or a configuration.
        gpus: number of GPUs.
        changes: keys of the model, its data or its tokenizer; also `accumulate` (accumulate_grad_batches),
            `optimizer`, and `full_vocabulary`: without it, GPT-3 has a few hundred tokens.
    """
    cfg = deepcopy(_base(name) if isinstance(name, str) else name)  # composing takes longer than a test
    cfg.trainer.devices, cfg.trainer.accumulate_grad_batches = gpus, changes.pop("accumulate", 1)
    cfg.model.optim.name, cfg.model.global_batch_size = changes.pop("optimizer", "fused_adam"), None
    if name == "gpt3" and not changes.pop("full_vocabulary", False):
        directory = Path(_small_vocabulary().name)
        cfg.model.tokenizer.vocab_file = f"{directory}/vocab.json"
        cfg.model.tokenizer.merge_file = f"{directory}/merges.txt"
    for key, value in {**SMALL, **changes}.items():
        [part] = [part for part in (cfg.model, cfg.model.data, cfg.model.tokenizer) if hasattr(part, key)][:1]
        setattr(part, key, value)
    data = cfg.model.data
    cfg.model.max_position_embeddings = cfg.model.encoder_seq_length = length = cfg.model.seq_length
    if isinstance(data, TextDataConfig):
        data.seq_length = length
    else:
        for part in (data, data.train, data.val, data.test):
            part.max_seq_length = length
    if isinstance(data, SpanDataConfig):
        data.seq_length_dec = length * 3 // 4
    assert not check_config(cfg)
    return cfg


@cache
def _small_vocabulary() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="bionemo-vocabulary-")  # deleted when the process ends
    write_bpe(Path(directory.name))
    return directory


def build(cfg: RunConfig) -> LanguageModel:
    """Build this rank's part of a model on torch's default device."""
    model_class = load_model_class(cfg.model._target_)
    return model_class(cfg.model, load_tokenizer(model_class.tokenizer, cfg.model.tokenizer))


def batch(cfg: RunConfig) -> PackedBatch:
    """Return a micro-batch of sequences of 32, 64 and 96 tokens, for which CPU attention needs no padding.

    Rows are full, except in decoders. Text has one sequence per row.
    """
    rows, row, data = rows_of(cfg), cfg.model.seq_length, cfg.model.data
    if isinstance(data, TextDataConfig):
        return _packed((row,) * rows, rows * row, 1.0)
    lengths = ([32, 96, 64, 64] * (row // 256) or [96, 32]) * rows
    if not isinstance(cfg.model, EncoderDecoderConfig):
        return _packed(lengths, rows * row, 0.15)
    decoder_lengths = [32] * len(lengths)
    total = rows * data.seq_length_dec if isinstance(data, SpanDataConfig) else sum(decoder_lengths) + 64
    return replace(_packed(decoder_lengths, total, 1.0), source=_packed(lengths, rows * row, 0.0))


def _packed(lengths: Sequence[int], total: int, target_fraction: float) -> PackedBatch:
    """Return sequences and padding, with a fraction of the tokens as target positions."""
    generator = torch.Generator().manual_seed(0)
    unpadded, sizes = sum(lengths), [*lengths, *([total - sum(lengths)] if total > sum(lengths) else [])]
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0)
    targets = torch.randperm(unpadded, generator=generator)[: round(target_fraction * unpadded)].sort().values
    return PackedBatch(
        tokens=torch.randint(5, 25, (total,), generator=generator).int(),
        position_ids=torch.cat([torch.arange(size) for size in sizes]).int(),
        segment_ids=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).int(),
        cu_seqlens=cu_seqlens.int(),
        target_positions=targets,
        target_ids=torch.randint(5, 25, targets.shape, generator=generator),
        dropout_keys=torch.randint(2**62, (len(lengths) + 1,), generator=generator),
        lengths=tuple(lengths),
        max_length=max(sizes),
    )


def step_of(cfg: RunConfig, batch: PackedBatch, half: bool, triton: bool = True) -> Step:
    """Return a step with the lengths of the batch instead of the assumed ones."""
    tokens = tuple(replace(each, row=each.row / rows_of(cfg)) for each in tokens_read(batch))
    return Step(cfg.model, tokens, half, triton=triton)


def rows_of(cfg: RunConfig) -> int:
    """Return the rows of a micro-batch; `config` sets a number."""
    assert cfg.model.micro_batch_size != "auto"
    return cfg.model.micro_batch_size


def tokens_read(batch: PackedBatch) -> list[Tokens]:
    """Return what each transformer block reads of a micro-batch, as if it were a row."""
    sides = [batch] if batch.source is None else [batch.source, batch]
    return [_tokens(side, sides[0]) for side in sides]


def _tokens(side: PackedBatch, source: PackedBatch) -> Tokens:
    unpadded, lengths = side.num_tokens, side.lengths
    cross_attended = 0 if side is source else sum(n * m for n, m in zip(lengths, source.lengths, strict=True))
    return Tokens(
        row=len(side.tokens),
        filled=unpadded / len(side.tokens),
        mean=unpadded / len(lengths),
        max_length=max(lengths),
        attended=sum(n * n for n in lengths) / unpadded,
        target_fraction=len(side.target_positions) / unpadded,
        source="a batch",
        cross_attended=cross_attended / unpadded,
    )


class _Flash(torch.autograd.Function):
    """Saves the same tensors as torch.nn.attention.varlen and our Triton kernels, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(x.shape, dtype=x.dtype) for x in ctx.saved_tensors[:3])


def gpu_attention(per_sequence: bool) -> Callable[..., Tensor]:
    """Return the attention that a GPU would use: the same code per sequence, or a substitute of fused kernels."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float, dropout: Any = None, causal: bool = False
    ) -> Tensor:
        if not per_sequence:
            out: Tensor = _Flash.apply(q, k, v)
            return out
        keys = sequences.context or sequences
        return attention.attend_per_sequence(q, k, v, sequences.lengths, scale, dropout, keys.lengths, causal)

    return attend


def cast(half: bool) -> Any:
    """Return the context of the forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=half)


def train(cfg: RunConfig, rank: int, half: bool, triton: bool = True) -> tuple[Costs, Memory]:
    """Run one update of a rank. Return planned costs and measured memory."""
    layout, micro_batch = read_layout(cfg), batch(cfg)
    step = step_of(cfg, micro_batch, half, triton)
    replaced = patch.object(attention, "attend", gpu_attention(per_sequence=not triton))
    with replaced, simulate(layout.tensor, layout.pipeline, rank, layout.data):
        model = build(cfg).train()
        model.initialize_weights(1)
        sharded = cfg.model.optim.name == "distributed_fused_adam"
        parallel = ParallelModel(model, partial(cast, half), sharded)
        optimizer = build_optimizer(cfg.model.optim, parallel.optimizer_shards, model.learning_rate_factor)
        with StorageMeter() as meter:
            parallel.forward_backward([micro_batch] * layout.micro_batches.count)
        optimizer.step()
        parallel.finish_update()
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        moments = [v for state in optimizer.state.values() for key, v in state.items() if key.startswith("exp")]
        measured = Memory(
            weights=sum(weights.values()),
            gradients=sum(buffer.grad_data.nbytes for buffer in parallel.ddp.buffers),
            moments=sum(moment.nbytes for moment in moments),
            activations=meter.peak,
        )
    number, tensor_rank = divmod(rank, layout.tensor * layout.data)
    costs = measure_step(step, layout, number * layout.tensor + tensor_rank % layout.tensor)
    return costs, measured
