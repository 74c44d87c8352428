# SPDX-License-Identifier: Apache-2.0
"""`model`: architecture, parallel layout, and the groups that belong to a model."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.data import DataConfig, Files
from bionemo.config.schema.optim import OptimConfig


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which alphabet; the protein alphabets are part of the package, so no file is needed."""

    library: Literal["sentencepiece", "huggingface", "megatron"]
    type: str | None = None
    model: str | None = None  # a file of v1; None: the alphabet of the package
    vocab_file: str | None = None
    merge_file: str | None = None
    model_name: str | None = None  # name on the Hugging Face hub
    mask_id: int | None = None


@dataclass(kw_only=True)
class ValidationConfig:
    """The name that early releases gave to dwnstr_task_validation."""

    validation_enabled: bool


@dataclass(kw_only=True)
class DownstreamFilesConfig:
    """Files of a downstream task."""

    train: Files
    test: Files


@dataclass(kw_only=True)
class DownstreamDatasetConfig:
    """A small supervised task that is trained on the frozen model at every validation."""

    task_type: Literal["token-level-classification", "classification", "regression"]
    task_name: str
    dataset_path: str
    dataset: DownstreamFilesConfig
    sequence_column: str
    target_column: list[str]
    target_sizes: list[int]
    mask_column: list[str] | None
    max_seq_length: int
    emb_batch_size: int
    batch_size: int
    num_epochs: int
    shuffle: bool
    num_workers: int
    random_seed: int
    optim: OptimConfig


@dataclass(kw_only=True)
class DownstreamValidationConfig:
    """Validation on a downstream task while the model trains."""

    enabled: bool
    dataset: DownstreamDatasetConfig


@dataclass(kw_only=True)
class EncoderConfig:
    """What every encoder has."""

    _target_: str  # import path of the model class
    # batch and layout
    micro_batch_size: int  # sequences per device and forward pass; packed: x seq_length tokens
    global_batch_size: int | None  # None: micro batch x data-parallel size x accumulation
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    sequence_parallel: bool  # norms and dropout are split along the sequence too; needs tensor parallelism
    # architecture
    seq_length: int  # longest sequence, begin and end token included
    encoder_seq_length: int
    max_position_embeddings: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int | None  # size of a head; None: hidden_size / num_attention_heads
    hidden_dropout: float
    attention_dropout: float
    layernorm_epsilon: float
    init_method_std: float
    make_vocab_size_divisible_by: int  # rows are added to the embedding table until it is
    # numerics and speed
    seed: int
    compile: bool  # torch.compile every layer
    native_amp_init_scale: float  # 16-mixed: first loss scale,
    native_amp_growth_interval: int  # doubled after this many good steps,
    hysteresis: int  # halved after this many bad ones
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_num_layers: int | None
    # start
    resume_from_checkpoint: str | None  # a checkpoint to go on from, instead of the newest of this run
    # groups
    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig
    validation: ValidationConfig
    dwnstr_task_validation: DownstreamValidationConfig


@dataclass(kw_only=True)
class ESM1nvConfig(EncoderConfig):
    """ESM-1nv: learned positions."""

    position_embedding_type: Literal["learned_absolute"]


@dataclass(kw_only=True)
class ESM2nvConfig(EncoderConfig):
    """ESM-2nv: rotary positions, token dropout."""

    position_embedding_type: Literal["rope"]
    embedding_token_dropout: bool  # scale embeddings by the share of tokens that is not masked
    mask_token_id: int
    drop_last: bool
