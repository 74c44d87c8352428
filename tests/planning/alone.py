# SPDX-License-Identifier: Apache-2.0
"""One process that stands for one of many: its collectives do nothing, its tensors have the sizes they would have."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from bionemo.config.check import check
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig, SpanDataConfig, TextDataConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.models.build import model_class
from bionemo.models.language_model import LanguageModel
from bionemo.planning.layout import Layout
from bionemo.planning.lengths import Tokens
from bionemo.planning.sizes import shape_of
from bionemo.planning.step import Step
from bionemo.tokenizers import load_tokenizer
from tests.conftest import ROOT
from tests.tokenizers.bpe import write_bpe

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


@cache
def _base(name: str) -> RunConfig:
    directory, config_name, data = FAMILIES[name]
    return load(
        config_name, [f"data@model.data={data}", "trainer.num_nodes=1"], ROOT / "examples" / directory / "conf"
    )


def config(name: str, gpus: int = 1, **changes: Any) -> RunConfig:
    """A small model of a family on so many GPUs.

    Keys are the model's, its data's or its tokenizer's; `accumulate` is the trainer's. Unless it is given `all_words`,
    GPT-3 has a few hundred.
    """
    cfg = deepcopy(_base(name))  # composed once: that takes longer than a test
    cfg.trainer.devices, cfg.trainer.accumulate_grad_batches = gpus, changes.pop("accumulate", 1)
    cfg.model.optim.name, cfg.model.global_batch_size = changes.pop("optimizer", "fused_adam"), None
    if name == "gpt3" and not changes.pop("all_words", False):
        words = Path(_few_words().name)
        cfg.model.tokenizer.vocab_file, cfg.model.tokenizer.merge_file = f"{words}/vocab.json", f"{words}/merges.txt"
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
    assert not check(cfg)
    return cfg


@cache
def _few_words() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="bionemo-words-")  # goes with the process
    write_bpe(Path(directory.name))
    return directory


@contextmanager
def one_of(layout: Layout, rank: int = 0) -> Iterator[None]:
    """Be a rank of a layout."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.gpus)
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        groups.unmake()
        dist.destroy_process_group()


def build(cfg: RunConfig) -> LanguageModel:
    """This rank's part of a model, on torch's default device."""
    kind = model_class(cfg.model._target_)
    return kind(cfg.model, load_tokenizer(kind.tokenizer, cfg.model.tokenizer))


def batch(cfg: RunConfig) -> PackedBatch:
    """A micro-batch of sequences of 32, 64, 96 ... tokens, sizes for which attention needs no padding.

    Rows are full, but for a decoder's: behind each sequence that is read is filler. Text is one sequence a row.
    """
    rows, row, data = cfg.model.micro_batch_size, cfg.model.seq_length, cfg.model.data
    if isinstance(data, TextDataConfig) and not data.reset_attention_mask:
        return _packed((row,) * rows, rows * row, 1.0)
    lengths = ([32, 96, 64, 64] * (row // 256) or [96, 32]) * rows
    if len(shape_of(cfg.model).stacks) == 1:
        return _packed(lengths, rows * row, 1.0 if isinstance(data, TextDataConfig) else 0.15)
    said = [32] * len(lengths)
    total = rows * data.seq_length_dec if isinstance(data, SpanDataConfig) else sum(said) + 64
    return replace(_packed(said, total, 1.0), source=_packed(lengths, rows * row, 0.0))


def _packed(lengths: Sequence[int], total: int, share: float) -> PackedBatch:
    """Sequences and filler, and which share of the tokens is asked for."""
    generator = torch.Generator().manual_seed(0)
    held, sizes = sum(lengths), [*lengths, *([total - sum(lengths)] if total > sum(lengths) else [])]
    edges = torch.tensor([0, *sizes]).cumsum(0)
    asked = torch.randperm(held, generator=generator)[: round(share * held)].sort().values
    return PackedBatch(
        tokens=torch.randint(5, 25, (total,), generator=generator).int(),
        positions=torch.cat([torch.arange(size) for size in sizes]).int(),
        segment_ids=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).int(),
        boundaries=edges.int(),
        target_index=asked,
        target_ids=torch.randint(5, 25, asked.shape, generator=generator),
        segment_keys=torch.randint(2**62, (len(lengths) + 1,), generator=generator),
        lengths=tuple(lengths),
        longest=max(sizes),
    )


def step_of(cfg: RunConfig, given: PackedBatch, half: bool, tiles: int = 0) -> Step:
    """What the formulas are told: the batch's own lengths instead of those that a plan assumes."""
    rows = cfg.model.micro_batch_size
    tokens = tuple(replace(each, row=each.row / rows) for each in read_by(given))
    return Step(shape_of(cfg.model), tokens, half, tiles=tiles)


def read_by(given: PackedBatch) -> list[Tokens]:
    """What each stack reads of a micro-batch, as if that were a row."""
    sides = [given] if given.source is None else [given.source, given]
    return [_tokens(side, sides[0]) for side in sides]


def _tokens(side: PackedBatch, source: PackedBatch) -> Tokens:
    held, lengths = side.num_tokens, side.lengths
    crossed = 0 if side is source else sum(n * m for n, m in zip(lengths, source.lengths, strict=True))
    return Tokens(
        row=len(side.tokens),
        filled=held / len(side.tokens),
        mean=held / len(lengths),
        longest=max(lengths),
        attended=sum(n * n for n in lengths) / held,
        asked=len(side.target_index) / held,
        source="a batch",
        crossed=crossed / held,
    )
