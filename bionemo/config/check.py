# SPDX-License-Identifier: Apache-2.0
"""Rules that tie several values together and need no data: each is a function that yields one phrase per breach."""

import re
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from bionemo.common.redaction import holds_secret
from bionemo.config.saving import check_saving
from bionemo.config.schema import (
    DownstreamConfig,
    EncoderDecoderConfig,
    ExpManagerConfig,
    MaskedDataConfig,
    ModelConfig,
    MoleculeNetJob,
    OptimConfig,
    ProteinDataConfig,
    RunConfig,
    SchedConfig,
    ShardDataConfig,
    SpanDataConfig,
    TextDataConfig,
    TrainerConfig,
)
from bionemo.config.schema.preparation import SplitSizes

_OF_FILES = (  # keys whose values are in the names of files and directories that are written
    "name",
    "output",
    *(f"exp_manager.{key}" for key in ("name", "version", "exp_dir", "explicit_log_dir")),
    *(f"exp_manager.checkpoint_callback_params.{key}" for key in ("dirpath", "filename")),
    "model.data.output_fname",
    "model.data.preprocessed_data_path",
)
_MOST_SENTINELS = 226  # beside 30 letters: ids of proteins are bytes


def check(cfg: object) -> list[str]:
    """Give everything in a typed config that contradicts something else in it."""
    if isinstance(cfg, RunConfig):
        return _check_run(cfg)
    if isinstance(cfg, DownstreamConfig):
        preparation = _split_sizes(cfg.model.data.preprocessing, "model.data.preprocessing.")
        return [
            *check_saving(cfg.exp_manager),
            *_devices(cfg.trainer),
            *_optimizer(cfg.model.finetuning_optim, "model.finetuning_optim"),
            *preparation,
        ]
    return list(_split_sizes(cfg, ""))


def _check_run(cfg: RunConfig) -> list[str]:
    model, trainer = cfg.model, cfg.trainer
    return [
        *_seed(cfg),
        *_masking(model),
        *_spans(model),
        *_shape(model),
        *_devices(trainer),
        *_parallel(model, trainer),
        *_checkpointing(model),
        *_length_of_run(trainer),
        *_validation(trainer, cfg.exp_manager),
        *check_saving(cfg.exp_manager),
        *_optimizer(model.optim, "model.optim"),
        *_schedule(model.optim.sched, trainer),
        *_mock(model),
        *_split_sizes(model.data.preprocessing, "model.data.preprocessing."),
    ]


def secret_names(config: Mapping[str, Any]) -> list[str]:
    """Give the keys of a configuration that would name files or directories after a secret."""
    problems = []
    for key in _OF_FILES:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and holds_secret(value):
            problems.append(f"{key} holds a secret, which would be in the names of files: choose another")
    return problems


def _seed(cfg: RunConfig) -> Iterator[str]:
    if cfg.seed not in (None, cfg.model.data.seed):
        yield f"seed={cfg.seed} would have no effect (did you mean model.seed?)"


def _masking(model: ModelConfig) -> Iterator[str]:
    if not isinstance(model.data, MaskedDataConfig):
        return
    shares = {name: getattr(model.data, name) for name in ("mask_percent", "perturb_percent", "identity_percent")}
    if not isclose(total := sum(shares.values()), 1, abs_tol=1e-6):
        yield f"{' + '.join(f'model.data.{name}' for name in shares)} is {total:g}, expected 1"


def _spans(model: ModelConfig) -> Iterator[str]:
    """Whether both ends of the longest sequence have room: a sentinel and a residue for each that is hidden."""
    data = model.data
    if not isinstance(data, SpanDataConfig):
        return
    if data.max_ngram_size != 1:
        yield f"model.data.max_ngram_size is {data.max_ngram_size}, expected 1: spans are of one residue"
    if data.seq_length_dec < (needed := round(model.seq_length * data.masked_lm_prob * 2 + 1)):
        yield (
            f"model.data.seq_length_dec is {data.seq_length_dec}, expected at least {needed}: "
            "model.seq_length x model.data.masked_lm_prob x 2 + 1"
        )
    if data.seq_length_dec > model.max_position_embeddings:
        yield (
            f"model.data.seq_length_dec={data.seq_length_dec} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )
    sentinels, hidden = model.tokenizer.num_sentinel_tokens, round(model.seq_length * data.masked_lm_prob)
    if sentinels is not None and not hidden <= sentinels <= _MOST_SENTINELS:
        yield (
            f"model.tokenizer.num_sentinel_tokens is {sentinels}, expected {hidden} to {_MOST_SENTINELS}: one for "
            f"each of the residues that are hidden in model.seq_length={model.seq_length}"
        )


def _shape(model: ModelConfig) -> Iterator[str]:
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield f"model.hidden_size={model.hidden_size} is not divisible by model.num_attention_heads={heads}"
    divided = {
        "tensor_model_parallel_size": ["num_attention_heads", "ffn_hidden_size", "make_vocab_size_divisible_by"],
        "pipeline_model_parallel_size": ["num_layers"],
    }
    for ways, names in divided.items():
        for name in names:
            if getattr(model, name) % getattr(model, ways):
                yield f"model.{name}={getattr(model, name)} is not divisible by model.{ways}={getattr(model, ways)}"
    data = model.data
    rows = {"model.seq_length": model.seq_length}
    if isinstance(data, SpanDataConfig):
        rows["model.data.seq_length_dec"] = data.seq_length_dec
    for name, row in rows.items():
        tokens = model.micro_batch_size * row
        if model.sequence_parallel and tokens % model.tensor_model_parallel_size:
            yield (
                f"model.micro_batch_size x {name}={tokens} is not divisible by model.tensor_model_parallel_size="
                f"{model.tensor_model_parallel_size}, as model.sequence_parallel=True needs"
            )
    lengths = {"model.encoder_seq_length": model.encoder_seq_length}
    if isinstance(data, ShardDataConfig):
        lengths["model.data.max_seq_length"] = data.max_seq_length
        for split in ("train", "val", "test"):
            lengths[f"model.data.{split}.max_seq_length"] = getattr(data, split).max_seq_length
    if isinstance(data, TextDataConfig):
        lengths["model.data.seq_length"] = data.seq_length
    if other := [f"{key} is {length}" for key, length in lengths.items() if length != model.seq_length]:
        yield f"{other[0]}, but rows and sequences are cut by model.seq_length={model.seq_length}: set that one alone"
    if model.max_position_embeddings < model.seq_length:
        yield (
            f"model.seq_length={model.seq_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )


def _devices(trainer: TrainerConfig) -> Iterator[str]:
    devices = trainer.devices
    if devices == 0 or (isinstance(devices, str) and not re.fullmatch(r"auto|-1|\d+(, ?\d+)*,?", devices)):
        yield f"trainer.devices is {devices!r}, expected a number, auto, or indices such as [0,1]"


def _parallel(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    if not isinstance(trainer.devices, int) or trainer.devices < 1:  # "auto" is known only on the machine itself
        return
    yield from layout(model, trainer, trainer.devices * trainer.num_nodes)


def layout(model: ModelConfig, trainer: TrainerConfig, world: int) -> Iterator[str]:
    """Whether `world` processes can be divided as asked, and whether the batch is as large as it says."""
    if model.pipeline_model_parallel_size > 1 and isinstance(model, EncoderDecoderConfig):
        yield (
            f"model.pipeline_model_parallel_size is {model.pipeline_model_parallel_size}, expected 1: an encoder and "
            "a decoder are not divided by depth; use model.tensor_model_parallel_size"
        )
    ways = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if world % ways:
        yield (
            f"trainer.devices x trainer.num_nodes={world} is not divisible by "
            f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} x "
            f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}"
        )
        return
    rows = model.micro_batch_size * (world // ways)
    if trainer.accumulate_grad_batches is None:
        if (model.global_batch_size or rows) % rows:
            yield (
                f"model.global_batch_size is {model.global_batch_size}, no multiple of micro batch and devices, which "
                f"make {rows}"
            )
        return
    derived = rows * trainer.accumulate_grad_batches
    if model.global_batch_size not in (None, derived):
        yield (
            f"model.global_batch_size is {model.global_batch_size}, but micro batch, devices and accumulation make "
            f"{derived}: set it to {derived} or to null"
        )


def micro_batches(model: ModelConfig, trainer: TrainerConfig, world: int) -> int:
    """How many micro-batches make a step: those asked for or, where that is left open, as the batch needs."""
    if trainer.accumulate_grad_batches is not None:
        return trainer.accumulate_grad_batches
    ways = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    rows = model.micro_batch_size * (world // ways)
    return (model.global_batch_size or rows) // rows


def _checkpointing(model: ModelConfig) -> Iterator[str]:
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    if (granularity == "full") != (method is not None):
        yield (
            f"model.activations_checkpoint_granularity is {granularity} and model.activations_checkpoint_method is "
            f"{method}: full needs a method, uniform or block; selective and null need none"
        )
    if model.pipeline_model_parallel_size > 1 and model.data.dynamic_padding and not model.data.packing:
        yield (
            "model.data.dynamic_padding=True: pipeline stages exchange tensors of one size; set it to False, or "
            "model.data.packing to True"
        )


def _length_of_run(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.max_steps < 1 and trainer.max_epochs is None and trainer.max_time is None:
        yield f"trainer.max_steps is {trainer.max_steps}, expected at least 1 unless trainer.max_epochs is given"


def _validation(trainer: TrainerConfig, manager: ExpManagerConfig) -> Iterator[str]:
    saving = manager.checkpoint_callback_params
    otherwise = saving.every_n_train_steps or saving.train_time_interval or not manager.create_checkpoint_callback
    if trainer.limit_val_batches == 0 and not otherwise:
        yield (
            "trainer.limit_val_batches is 0, but checkpoints are written after validations: set "
            "exp_manager.checkpoint_callback_params.every_n_train_steps too"
        )


def _optimizer(optim: OptimConfig, key: str) -> Iterator[str]:
    if len(optim.betas) != 2:
        yield f"{key}.betas is {optim.betas}, expected two numbers from 0 to below 1"


def _schedule(sched: SchedConfig, trainer: TrainerConfig) -> Iterator[str]:
    if sched.warmup_steps is not None and sched.warmup_ratio is not None:
        yield "model.optim.sched.warmup_steps and model.optim.sched.warmup_ratio exclude each other: set one to null"
    anneals = sched.name in ("CosineAnnealing", "WarmupAnnealDecayHold", "WarmupAnnealing")
    endless = trainer.max_epochs is not None or trainer.max_time is not None
    if endless and (anneals or sched.warmup_ratio is not None) and (sched.max_steps or trainer.max_steps) < 1:
        yield "missing value: without trainer.max_steps, give model.optim.sched.max_steps=..., the schedule's end"


def _mock(model: ModelConfig) -> Iterator[str]:
    if not isinstance(model.data, ProteinDataConfig):
        return
    mock = model.data.mock
    if not 1 <= mock.min_length <= mock.max_length:
        yield f"model.data.mock.min_length={mock.min_length} is not from 1 to max_length={mock.max_length}"


def _split_sizes(job: object, prefix: str) -> Iterator[str]:
    """Whether shares of validation and test leave records to train on."""
    if not isinstance(job, SplitSizes | MoleculeNetJob):
        return
    shares = [size for size in (job.val_size, job.test_size) if isinstance(size, float) and size < 1]
    if sum(shares) >= 1:
        yield f"{prefix}val_size + {prefix}test_size is {sum(shares):g}, expected below 1"
