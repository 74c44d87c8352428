# SPDX-License-Identifier: Apache-2.0
"""Rules about several values of a typed configuration. Each function yields one phrase per violation."""

import re
from collections.abc import Iterator
from math import isclose
from pathlib import PurePath

from bionemo.common.redaction import redact_text
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

_CHECKPOINTS = "exp_manager.checkpoint_callback_params"
_SENTINELS = 96  # of num_sentinel_tokens=null, as in bionemo/tokenizers
_MAX_SENTINELS = 226  # ids of proteins are bytes, and 30 are used by the alphabet
_MAX_NAME = 255 - len("-v99-last.unfinished")  # bytes of a checkpoint's name
METRIC_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")  # {val_loss:.2f} in the name of a checkpoint
INTEGER_METRICS = ("step", "global_step", "epoch", "consumed_samples")  # available without a validation


def check_config(cfg: object) -> list[str]:
    """Return the contradictions between values of a typed configuration, one phrase each."""
    if isinstance(cfg, RunConfig):
        return _check_run(cfg)
    if isinstance(cfg, DownstreamConfig):
        return [
            *_check_names(cfg.exp_manager),
            *_check_devices(cfg.trainer),
            *_check_optimizer(cfg.model.finetuning_optim, "model.finetuning_optim"),
            *_check_split_sizes(cfg.model.data.preprocessing, "model.data.preprocessing."),
        ]
    return list(_check_split_sizes(cfg, ""))


def _check_run(cfg: RunConfig) -> list[str]:
    model, trainer = cfg.model, cfg.trainer
    return [
        *_check_seed(cfg),
        *_check_masking(model),
        *_check_spans(model),
        *_check_divisibility(model),
        *_check_lengths(model),
        *_check_devices(trainer),
        *_check_parallel(model, trainer),
        *_check_recomputation(model),
        *_check_end(trainer),
        *_check_batch_limits(trainer),
        *_check_validation(trainer, cfg.exp_manager),
        *_check_names(cfg.exp_manager),
        *_check_optimizer(model.optim, "model.optim", trainer.max_steps),
        *_check_muon(model),
        *_check_schedule(model.optim.sched, trainer),
        *_check_mock(model),
        *_check_mixture(model),
        *_check_split_sizes(model.data.preprocessing, "model.data.preprocessing."),
    ]


def _check_seed(cfg: RunConfig) -> Iterator[str]:
    if cfg.seed not in (None, cfg.model.data.seed):
        yield f"seed={cfg.seed} would have no effect (did you mean model.seed?)"


def _check_masking(model: ModelConfig) -> Iterator[str]:
    if not isinstance(model.data, MaskedDataConfig):
        return
    shares = {name: getattr(model.data, name) for name in ("mask_percent", "perturb_percent", "identity_percent")}
    if not isclose(total := sum(shares.values()), 1, abs_tol=1e-6):
        yield f"{' + '.join(f'model.data.{name}' for name in shares)} is {total:g}, expected 1"


def _check_spans(model: ModelConfig) -> Iterator[str]:
    """Check that the longest sequence fits: the decoder writes a sentinel and a residue for each masked residue."""
    data = model.data
    if not isinstance(data, SpanDataConfig):
        return
    masked = max(round(model.seq_length * data.masked_lm_prob), 1)
    if data.seq_length_dec < (needed := 2 * masked + 1):
        yield (
            f"model.data.seq_length_dec is {data.seq_length_dec}, expected at least {needed}: two tokens for each "
            f"masked residue (model.seq_length x model.data.masked_lm_prob, rounded: {masked}), and one for the end"
        )
    if data.seq_length_dec > model.max_position_embeddings:
        yield (
            f"model.data.seq_length_dec={data.seq_length_dec} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )
    sentinels = model.tokenizer.num_sentinel_tokens
    sentinels = _SENTINELS if sentinels is None else sentinels
    if not masked <= sentinels <= _MAX_SENTINELS:
        yield (
            f"model.tokenizer.num_sentinel_tokens is {sentinels}, expected {masked} to {_MAX_SENTINELS}: one for "
            f"each masked residue in model.seq_length={model.seq_length}"
        )


def _check_divisibility(model: ModelConfig) -> Iterator[str]:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}"
        )
    for size, names in (
        ("tensor_model_parallel_size", ("num_attention_heads", "ffn_hidden_size", "make_vocab_size_divisible_by")),
        ("pipeline_model_parallel_size", ("num_layers",)),
    ):
        for name in names:
            if getattr(model, name) % getattr(model, size):
                yield f"model.{name}={getattr(model, name)} is not divisible by model.{size}={getattr(model, size)}"
    lengths = {"model.seq_length": model.seq_length}
    if isinstance(model.data, SpanDataConfig):
        lengths["model.data.seq_length_dec"] = model.data.seq_length_dec
    for name, length in lengths.items():
        tokens = length if model.micro_batch_size == "auto" else model.micro_batch_size * length
        if model.sequence_parallel and tokens % model.tensor_model_parallel_size:
            yield (
                f"model.micro_batch_size x {name}={tokens} is not divisible by model.tensor_model_parallel_size="
                f"{model.tensor_model_parallel_size}, as model.sequence_parallel=True needs"
            )


def _check_lengths(model: ModelConfig) -> Iterator[str]:
    data = model.data
    shortest = 3 if isinstance(data, MaskedDataConfig) else 2 if isinstance(model, EncoderDecoderConfig) else 1
    if model.seq_length < shortest:
        yield (
            f"model.seq_length is {model.seq_length}, expected at least {shortest}: one token of the sequence and "
            f"{shortest - 1} at its ends"
        )
    lengths = {"model.encoder_seq_length": model.encoder_seq_length}
    if isinstance(data, ShardDataConfig):
        lengths["model.data.max_seq_length"] = data.max_seq_length
        for split in ("train", "val", "test"):
            lengths[f"model.data.{split}.max_seq_length"] = getattr(data, split).max_seq_length
    if isinstance(data, TextDataConfig):
        lengths["model.data.seq_length"] = data.seq_length
    if other := [f"{key} is {length}" for key, length in lengths.items() if length != model.seq_length]:
        yield f"{other[0]}, but model.seq_length={model.seq_length} is the length of all sequences: set only that key"
    if model.max_position_embeddings < model.seq_length:
        yield (
            f"model.seq_length={model.seq_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )


def _check_devices(trainer: TrainerConfig) -> Iterator[str]:
    devices = trainer.devices
    if devices == 0 or (isinstance(devices, str) and not re.fullmatch(r"auto|-1|\d+(, ?\d+)*,?", devices)):
        yield f"trainer.devices is {devices!r}, expected a number, auto, or indices such as [0,1]"


def _check_parallel(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    if isinstance(trainer.devices, int) and trainer.devices > 0:  # "auto" is known only on the machine itself
        yield from check_layout(model, trainer, trainer.devices * trainer.num_nodes)


def check_layout(model: ModelConfig, trainer: TrainerConfig, world_size: int) -> Iterator[str]:
    """Check that `world_size` processes fit the parallel layout and the global batch size; yield one phrase each."""
    if model.pipeline_model_parallel_size > 1 and isinstance(model, EncoderDecoderConfig):
        yield (
            f"model.pipeline_model_parallel_size is {model.pipeline_model_parallel_size}, expected 1: pipeline "
            "parallelism is not supported for encoder-decoder models; use model.tensor_model_parallel_size"
        )
    if world_size % model.model_parallel_size:
        yield (
            f"trainer.devices x trainer.num_nodes={world_size} is not divisible by "
            f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} x "
            f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}"
        )
        return
    replicas = model.data_parallel_size(world_size)
    if model.micro_batch_size == "auto":
        if model.global_batch_size is not None and model.global_batch_size % replicas:
            yield f"model.global_batch_size is {model.global_batch_size}, not a multiple of {replicas} model replicas"
        if model.global_batch_size is not None and trainer.accumulate_grad_batches not in (None, 1):
            yield (
                f"model.global_batch_size={model.global_batch_size} determines the accumulation with "
                "model.micro_batch_size=auto: set trainer.accumulate_grad_batches=null, or set model.micro_batch_size"
            )
        return
    sequences = model.micro_batch_size * replicas
    if trainer.accumulate_grad_batches in (None, 1):  # 1: NeMo's only value
        if (model.global_batch_size or sequences) % sequences:
            yield (
                f"model.global_batch_size is {model.global_batch_size}, not a multiple of {sequences}: the "
                "micro-batch size times the number of model replicas; set a multiple or null"
            )
        return
    derived = sequences * trainer.accumulate_grad_batches
    if model.global_batch_size not in (None, derived):
        yield (
            f"model.global_batch_size is {model.global_batch_size}, but micro-batch size x model replicas x "
            f"accumulate_grad_batches = {derived}: set it to {derived} or to null"
        )


def _check_recomputation(model: ModelConfig) -> Iterator[str]:
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    if granularity != "selective" and (granularity == "full") != (method is not None):  # as in NeMo
        yield (
            f"model.activations_checkpoint_granularity is {granularity} and model.activations_checkpoint_method is "
            f"{method}: full needs a method, uniform or block; null needs null"
        )
    if model.pipeline_model_parallel_size > 1 and model.data.dynamic_padding and not model.data.packing:
        yield (
            "model.data.dynamic_padding=True: pipeline stages exchange tensors of one size; set it to False, or "
            "model.data.packing to True"
        )


def _check_end(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.max_epochs == 0:
        yield "trainer.max_epochs is 0, expected at least 1, or -1 or null for no limit"
    if trainer.max_steps < 1 and trainer.epochs is None and trainer.max_time is None:
        yield f"trainer.max_steps is {trainer.max_steps}, expected at least 1 unless trainer.max_epochs is given"


def _check_batch_limits(trainer: TrainerConfig) -> Iterator[str]:
    limit = trainer.limit_train_batches
    if isinstance(limit, float) and limit != 1:
        yield (
            f"trainer.limit_train_batches is {limit}, expected a number of batches, as all epochs are one stream: set "
            "trainer.max_steps, or fewer files in model.data.dataset.train"
        )


def _check_validation(trainer: TrainerConfig, manager: ExpManagerConfig) -> Iterator[str]:
    params = manager.checkpoint_callback_params
    saves_otherwise = params.every_n_train_steps or params.train_time_interval
    if trainer.limit_val_batches == 0 and manager.create_checkpoint_callback and not saves_otherwise:
        yield (
            "trainer.limit_val_batches is 0, but checkpoints are written after validations: set "
            f"{_CHECKPOINTS}.every_n_train_steps too"
        )


def _check_optimizer(optim: OptimConfig, key: str, max_steps: int = -1) -> Iterator[str]:
    """Check an optimizer; `max_steps` is trainer.max_steps, if it ends the schedule."""
    if len(optim.betas) != 2:
        yield f"{key}.betas is {optim.betas}, expected two numbers from 0 to below 1"
    sched = optim.sched
    if sched is None or sched.min_lr is None or sched.name == "NoamAnnealing":  # its `lr` is a multiplier
        return
    end, highest = sched.end(max_steps), optim.lr
    if sched.name == "WarmupAnnealDecayHold":
        highest = sched.max_lr or sched.min_lr
    last = highest
    if sched.name == "InverseSquareRootAnnealing" and end > 0:
        last /= max(1, (end + 1) / (sched.warm_up(end) + 1)) ** 0.5
    if sched.min_lr > last:
        where = "highest rate" if last == highest else f"rate that {sched.name} reaches at its end, step {end}"
        yield f"{key}.sched.min_lr={sched.min_lr:g} is above {last:g}, the {where}: lower it, or raise {key}.lr"


def _check_muon(model: ModelConfig) -> Iterator[str]:
    if model.optim.name == "muon" and model.tensor_model_parallel_size > 1:
        yield (
            f"model.optim.name=muon needs whole matrices, but model.tensor_model_parallel_size="
            f"{model.tensor_model_parallel_size} divides them: set it to 1, or model.optim.name to fused_adam"
        )


def _check_schedule(sched: SchedConfig, trainer: TrainerConfig) -> Iterator[str]:
    if sched.warmup_steps is not None and sched.warmup_ratio is not None:
        yield "model.optim.sched.warmup_steps and model.optim.sched.warmup_ratio exclude each other: set one to null"
    needs_end = sched.warmup_ratio is not None or sched.name in (
        "CosineAnnealing",
        "WarmupAnnealDecayHold",
        "WarmupAnnealing",
    )
    open_end = trainer.epochs is not None or trainer.max_time is not None
    if open_end and needs_end and sched.end(trainer.max_steps) < 1:
        yield "missing value: without trainer.max_steps, give model.optim.sched.max_steps=..., the end of the schedule"


def _check_mock(model: ModelConfig) -> Iterator[str]:
    if isinstance(model.data, ProteinDataConfig) and not 1 <= model.data.mock.min_length <= model.data.mock.max_length:
        mock = model.data.mock
        yield f"model.data.mock.min_length={mock.min_length} is not from 1 to max_length={mock.max_length}"


def _check_mixture(model: ModelConfig) -> Iterator[str]:
    data = model.data
    if isinstance(data, MaskedDataConfig) and data.mixture == {}:
        yield "model.data.mixture has no sources: give model.data.mixture.NAME.weight and .dataset_path of each"
    if isinstance(data, MaskedDataConfig) and data.mixture and data.train.uf90 is not None:
        yield "model.data.mixture cannot draw from clusters: choose data@model.data=mixture"


def _check_split_sizes(job: object, prefix: str) -> Iterator[str]:
    """Check that the fractions for validation and test leave records for training."""
    if not isinstance(job, SplitSizes | MoleculeNetJob):
        return
    fractions = [size for size in (job.val_size, job.test_size) if isinstance(size, float) and size < 1]
    for key in ("val_size", "test_size"):
        size = getattr(job, key)
        if isinstance(size, float) and size >= 1 and not (size > 1 and size.is_integer()):
            yield f"{prefix}{key} is {size}, expected a number of records, or a fraction below 1"
    if sum(fractions) >= 1:
        yield f"{prefix}val_size + {prefix}test_size is {sum(fractions):g}, expected below 1"


def _check_names(manager: ExpManagerConfig) -> Iterator[str]:
    """Check names of directories, checkpoints and archives, before the first checkpoint fails to be saved."""
    if manager.name and (manager.name in (".", "..") or "/" in manager.name):
        yield (
            f"exp_manager.name is {manager.name}, expected a name without /, because files are named after it: the "
            "directory is set by exp_manager.exp_dir"
        )
    if manager.name and redact_text(manager.name) != manager.name:
        yield "exp_manager.name contains a secret of the environment or a password in a URL, expected a name without"
    version = manager.version
    if version is not None and (PurePath(version).is_absolute() or ".." in PurePath(version).parts):
        yield f"exp_manager.version is {version}, expected a name: the directory is set by exp_manager.exp_dir"
    params = manager.checkpoint_callback_params
    for key in ("prefix", "postfix"):
        value = getattr(params, key)
        if value is not None and ("/" in value or value == ".."):
            yield f"{_CHECKPOINTS}.{key} is {value}, expected part of a file name, without /"
    if params.filename:
        yield from _check_filename(params.filename)


def _check_filename(pattern: str) -> Iterator[str]:
    key = f"{_CHECKPOINTS}.filename is {pattern}"
    try:
        if any(
            int(number) > _MAX_NAME for _, spec in METRIC_FIELD.findall(pattern) for number in re.findall(r"\d+", spec)
        ):
            raise ValueError("it is too long")
        filled = METRIC_FIELD.sub(lambda match: f"{match[1]}={_format_example(match[1], match[2] or '')}", pattern)
    except ValueError as error:
        yield f"{key}, but a format in it is invalid ({error}): write {{step}}-{{val_loss:.2f}}"
        return
    if "/" in filled or filled in (".", "..") or not filled.strip():
        yield f"{key}, expected a name without /, such as {{step}}-{{val_loss:.2f}}"
    elif filled.endswith(("-last", ".unfinished", ".replaced")):
        yield f"{key}, expected a name that does not end in the reserved -last, .unfinished or .replaced"
    elif len(filled.encode()) > _MAX_NAME:
        yield f"{key}, which gives {len(filled.encode())} bytes, expected at most {_MAX_NAME}"


def _format_example(name: str, spec: str) -> str:
    return format(1_000_000 if name in INTEGER_METRICS else 1.5, spec)
