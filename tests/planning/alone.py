# SPDX-License-Identifier: Apache-2.0
"""One process that stands for one of many: its collectives do nothing, its tensors have the sizes they would have."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from bionemo.config.check import check
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.models.build import model_class
from bionemo.models.language_model import LanguageModel
from bionemo.planning.activations import Step
from bionemo.planning.layout import Layout
from bionemo.planning.lengths import tokens_of
from bionemo.planning.sizes import shape_of
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES

NAMES = {"esm2nv": "pretrain_esm2_8M", "esm1nv": "pretrain_small"}
SMALL = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
    "micro_batch_size": 4,
}  # fmt: skip


@cache
def _base(name: str) -> RunConfig:
    return load(NAMES[name], ["data@model.data=mock"], EXAMPLES / name / "conf")


def config(name: str, gpus: int = 1, **changes: Any) -> RunConfig:
    """A small model of a family on so many GPUs; keys are the model's, `accumulate` is the trainer's."""
    cfg = deepcopy(_base(name))  # composed once: that takes longer than a test
    cfg.trainer.devices, cfg.trainer.accumulate_grad_batches = gpus, changes.pop("accumulate", 1)
    cfg.model.optim.name = changes.pop("optimizer", "fused_adam")
    for key, value in {**SMALL, **changes}.items():
        assert hasattr(cfg.model, key)
        setattr(cfg.model, key, value)
    cfg.model.max_position_embeddings = cfg.model.encoder_seq_length = length = cfg.model.seq_length
    for part in (cfg.model.data, cfg.model.data.train, cfg.model.data.val, cfg.model.data.test):
        part.max_seq_length = length
    assert not check(cfg)
    return cfg


@contextmanager
def one_of(layout: Layout, rank: int = 0) -> Iterator[None]:
    """Be a rank of a layout."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.gpus)
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    yield
    groups.unmake()
    dist.destroy_process_group()


def build(cfg: RunConfig) -> LanguageModel:
    """This rank's part of a model, on torch's default device."""
    kind = model_class(cfg.model._target_)
    return kind(cfg.model, load_tokenizer(kind.tokenizer))


def batch(cfg: RunConfig, share: float = 0.15) -> PackedBatch:
    """A micro-batch of full rows: sequences of 32, 64 or 96 tokens, sizes for which attention needs no padding."""
    generator = torch.Generator().manual_seed(0)
    row = [32, 96, 64, 64] * (cfg.model.seq_length // 256) or [96, 32]
    lengths = tuple(row * cfg.model.micro_batch_size)
    count = sum(lengths)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    asked = torch.randperm(count, generator=generator)[: round(share * count)].sort().values
    return PackedBatch(
        tokens=torch.randint(5, 25, (count,), generator=generator).int(),
        positions=torch.cat([torch.arange(end - start) for start, end in pairwise(edges.tolist())]).int(),
        segment_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int(),
        boundaries=edges.int(),
        target_index=asked,
        target_ids=torch.randint(5, 25, asked.shape, generator=generator),
        segment_keys=torch.randint(2**62, (len(lengths) + 1,), generator=generator),
        lengths=lengths,
        longest=cfg.model.seq_length,
    )


def step_of(cfg: RunConfig, given: PackedBatch, half: bool, tiles: int = 0) -> Step:
    """What the formulas are told: the batch's own lengths instead of UniRef's."""
    attended = sum(n * n for n in given.lengths) / sum(given.lengths)
    asked = len(given.target_index) / len(given.tokens)
    tokens = replace(tokens_of(cfg.model), filled=1.0, attended=attended, asked=asked)
    return Step(shape_of(cfg.model), tokens, half, tiles=tiles)
