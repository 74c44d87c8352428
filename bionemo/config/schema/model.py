# SPDX-License-Identifier: Apache-2.0
"""`model`: architecture, parallel layout, and the groups that belong to a model."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.data import (
    DataConfig,
    Files,
    MaskedDataConfig,
    MoleculeDataConfig,
    SpanDataConfig,
    TextDataConfig,
)
from bionemo.config.schema.optim import OptimConfig
from bionemo.config.schema.ranges import (
    Layers,
    NotNegative,
    Positive,
    PositiveFloat,
    Seed,
    ShareBelowOne,
    Tokens,
    Width,
    Workers,
)


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which vocabulary; those of proteins and molecules are part of the package, GPT-2's is the user's to give."""

    library: Literal["sentencepiece", "huggingface", "megatron", "regex"]
    type: str | None = None
    model: str | None = None  # a file of v1; None: the alphabet of the package
    vocab_file: str | None = None
    merge_file: str | None = None
    model_name: str | None = None  # name on the Hugging Face hub
    mask_id: NotNegative | None = None
    num_sentinel_tokens: NotNegative | None = None  # ProtT5nv


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
    target_column: str | list[str]
    target_sizes: list[Positive] | None  # classes of each target; None: they are numbers
    mask_column: list[str] | None
    max_seq_length: Tokens
    emb_batch_size: Width
    batch_size: Width
    num_epochs: Positive
    shuffle: bool
    num_workers: Workers
    random_seed: Seed
    optim: OptimConfig


@dataclass(kw_only=True)
class DownstreamValidationConfig:
    """Validation on a downstream task while the model trains."""

    enabled: bool
    dataset: DownstreamDatasetConfig


@dataclass(kw_only=True)
class ModelConfig:
    """What every model has."""

    _target_: str  # import path of the model class
    # batch and layout
    micro_batch_size: Width  # sequences per device and forward pass; packed: x seq_length tokens
    global_batch_size: Positive | None  # None: micro batch x data-parallel size x accumulation
    tensor_model_parallel_size: Width
    pipeline_model_parallel_size: Width
    sequence_parallel: bool  # norms and dropout are split along the sequence too; needs tensor parallelism
    # architecture
    seq_length: Tokens  # longest sequence, begin and end token included
    encoder_seq_length: Tokens  # the same
    max_position_embeddings: Tokens
    num_layers: Layers  # of an encoder-decoder: of each
    hidden_size: Width
    ffn_hidden_size: Width
    num_attention_heads: Width
    kv_channels: Width | None  # size of a head; None: hidden_size / num_attention_heads
    activation: Literal["gelu", "gelu_tanh"]  # by the error function, or GPT-2's approximation
    hidden_dropout: ShareBelowOne
    attention_dropout: ShareBelowOne
    layernorm_epsilon: PositiveFloat
    init_method_std: PositiveFloat
    make_vocab_size_divisible_by: Width  # rows are added to the embedding table until it is
    # numerics and speed
    seed: Seed
    compile: bool  # torch.compile every layer
    native_amp_init_scale: PositiveFloat  # 16-mixed: first loss scale,
    native_amp_growth_interval: Positive  # doubled after this many good steps,
    hysteresis: Positive  # halved after this many bad ones
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_num_layers: Positive | None
    # start
    resume_from_checkpoint: str | None  # a checkpoint to go on from, instead of the newest of this run
    # groups
    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig
    validation: ValidationConfig
    dwnstr_task_validation: DownstreamValidationConfig


@dataclass(kw_only=True)
class EncoderConfig(ModelConfig):
    """What every encoder has."""

    data: MaskedDataConfig


@dataclass(kw_only=True)
class ESM1nvConfig(EncoderConfig):
    """ESM-1nv: learned positions."""

    position_embedding_type: Literal["learned_absolute"]


@dataclass(kw_only=True)
class ESM1bConfig(EncoderConfig):
    """ESM-1b and ESM-1v: learned positions, token dropout."""

    position_embedding_type: Literal["learned_absolute"]
    embedding_token_dropout: bool  # as ESM-2nv's
    embedding_layer_norm: bool  # before the first layer; ESM-1b has it, ESM-1v does not


@dataclass(kw_only=True)
class ESM2nvConfig(EncoderConfig):
    """ESM-2nv: rotary positions, token dropout."""

    position_embedding_type: Literal["rope"]
    embedding_token_dropout: bool  # scale embeddings by the share of tokens that is not masked
    mask_token_id: NotNegative
    drop_last: bool


@dataclass(kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """What every encoder-decoder has; the words that v1 had for its one architecture are taken, others are not."""

    position_embedding_type: Literal["learned_absolute"]
    share_decoder_tokens_head_embeddings: bool  # the word table is the last product's, too, with a bias for each word
    normalization: Literal["layernorm"]
    transformer_block_type: Literal["pre_ln"]
    encoder_arch: Literal["transformer"]
    decoder_arch: Literal["transformer"]


@dataclass(kw_only=True)
class ProtT5nvConfig(EncoderDecoderConfig):
    """ProtT5nv: proteins, spans behind sentinels."""

    data: SpanDataConfig


@dataclass(kw_only=True)
class MegaMolBARTConfig(EncoderDecoderConfig):
    """MegaMolBART: SMILES."""

    name: str  # of this size, for file names
    restore_encoder_path: str | None  # what restore_from_path follows
    data: MoleculeDataConfig


@dataclass(kw_only=True)
class GPT3Config(ModelConfig):
    """GPT-3: text."""

    position_embedding_type: Literal["learned_absolute"]
    data: TextDataConfig
    normalization: Literal["layernorm"] | None = None
    transformer_block_type: Literal["pre_ln"] | None = None
