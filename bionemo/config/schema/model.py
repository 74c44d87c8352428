# SPDX-License-Identifier: Apache-2.0
"""The root of a pretraining configuration, and `model`: architecture, parallel layout and nested groups."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.cluster import ClusterConfig
from bionemo.config.schema.data import (
    DataConfig,
    Files,
    MaskedDataConfig,
    MoleculeDataConfig,
    SpanDataConfig,
    TaskType,
    TextDataConfig,
)
from bionemo.config.schema.exp_manager import ExpManagerConfig
from bionemo.config.schema.ranges import (
    Dimension,
    FractionBelowOne,
    LayerCount,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    TokenCount,
    WorkerCount,
)
from bionemo.config.schema.training import OptimConfig, TrainerConfig


@dataclass(kw_only=True)
class TokenizerConfig:
    """Vocabulary. Those of proteins and molecules are part of the package; GPT-2's files come from the user."""

    library: Literal["sentencepiece", "huggingface", "megatron", "regex"]
    type: str | None = None
    model: str | None = None  # a file of v1; ignored
    vocab_file: str | None = None
    merge_file: str | None = None
    model_name: str | None = None  # name on the Hugging Face hub
    mask_id: NonNegativeInt | None = None
    num_sentinel_tokens: NonNegativeInt | None = None  # ProtT5nv


@dataclass(kw_only=True)
class ValidationConfig:
    """Former name of dwnstr_task_validation; must be off."""

    validation_enabled: bool


@dataclass(kw_only=True)
class DownstreamFilesConfig:
    """Files of a downstream task."""

    train: Files
    test: Files


@dataclass(kw_only=True)
class DownstreamDatasetConfig:
    """A small labelled task: at every validation a head is trained on the frozen model and tested."""

    task_type: TaskType
    task_name: str
    dataset_path: str
    dataset: DownstreamFilesConfig
    sequence_column: str
    target_column: str | list[str]
    target_sizes: list[PositiveInt] | None  # number of classes of each target; None: regression
    mask_column: list[str] | None
    max_seq_length: TokenCount
    emb_batch_size: Dimension
    batch_size: Dimension
    num_epochs: PositiveInt
    shuffle: bool
    num_workers: WorkerCount
    random_seed: Seed
    optim: OptimConfig


@dataclass(kw_only=True)
class DownstreamValidationConfig:
    """Validation on a downstream task during pretraining."""

    enabled: bool
    dataset: DownstreamDatasetConfig


@dataclass(kw_only=True)
class ModelConfig:
    """Keys of every model."""

    _target_: str  # import path of the model class
    # batch and parallel layout
    # rows of a micro-batch of a model replica; a row is a sequence or, packed, seq_length tokens;
    # auto: on GPUs as many as fit and divide the rows of a step, on CPUs at most replica_batch_size
    micro_batch_size: Dimension | Literal["auto"]
    replica_batch_size: Dimension  # only with auto, without global_batch_size: rows of a replica in a step, if nothing
    # is accumulated
    global_batch_size: PositiveInt | None  # None: micro-batch size x data-parallel size x accumulation
    tensor_model_parallel_size: Dimension
    pipeline_model_parallel_size: Dimension
    sequence_parallel: bool  # divide norms and dropout along the sequence; needs tensor parallelism
    # architecture
    seq_length: TokenCount  # maximum length, including begin and end tokens
    encoder_seq_length: TokenCount  # equal to seq_length
    max_position_embeddings: TokenCount
    num_layers: LayerCount  # of an encoder-decoder: of each
    hidden_size: Dimension
    ffn_hidden_size: Dimension
    num_attention_heads: Dimension
    kv_channels: Dimension | None  # size of a head; None: hidden_size / num_attention_heads
    activation: Literal["gelu", "gelu_tanh"]  # exact, or GPT-2's approximation
    hidden_dropout: FractionBelowOne
    attention_dropout: FractionBelowOne
    layernorm_epsilon: PositiveFloat
    init_method_std: PositiveFloat
    make_vocab_size_divisible_by: Dimension  # the embedding table is padded to a multiple
    # numerics and speed
    seed: Seed
    compile: bool | Literal["auto"]  # torch.compile every layer; auto: on GPUs with Triton and a C compiler
    gpu_attention: Literal["flash2", "flash4", "cudnn"]  # implementation of FlashAttention, where it is used
    float8: bool  # multiply in float8 in the linear layers of the transformer blocks
    native_amp_init_scale: PositiveFloat  # 16-mixed: first loss scale
    native_amp_growth_interval: PositiveInt  # 16-mixed: steps without overflow until the scale is doubled
    hysteresis: PositiveInt  # 16-mixed: overflows until the scale is halved
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_num_layers: PositiveInt | None
    resume_from_checkpoint: str | None  # a checkpoint to resume from, instead of the newest one of this run
    # groups
    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig
    validation: ValidationConfig
    dwnstr_task_validation: DownstreamValidationConfig

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that share one model replica."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas of `world_size` processes."""
        return world_size // self.model_parallel_size


@dataclass(kw_only=True)
class EncoderConfig(ModelConfig):
    """Keys of every encoder."""

    data: MaskedDataConfig


@dataclass(kw_only=True)
class ESM1nvConfig(EncoderConfig):
    """Encoder with learned positions (ESM-1nv)."""

    position_embedding_type: Literal["learned_absolute"]


@dataclass(kw_only=True)
class ESM1bConfig(EncoderConfig):
    """Encoder with learned positions and token dropout (ESM-1b, ESM-1v)."""

    position_embedding_type: Literal["learned_absolute"]
    embedding_token_dropout: bool  # see ESM2nvConfig
    embedding_layer_norm: bool  # before the first layer: True for ESM-1b, False for ESM-1v


@dataclass(kw_only=True)
class ESM2nvConfig(EncoderConfig):
    """Encoder with rotary positions and token dropout (ESM-2nv)."""

    position_embedding_type: Literal["rope"]
    embedding_token_dropout: bool  # scale embeddings by the fraction of tokens that are not masked
    mask_token_id: NonNegativeInt


@dataclass(kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Keys of every encoder-decoder. The values of v1's only architecture are accepted, others are not."""

    position_embedding_type: Literal["learned_absolute"]
    share_decoder_tokens_head_embeddings: bool  # the output layer uses the embedding table and a bias per token
    normalization: Literal["layernorm"]
    transformer_block_type: Literal["pre_ln"]
    encoder_arch: Literal["transformer"]
    decoder_arch: Literal["transformer"]


@dataclass(kw_only=True)
class ProtT5nvConfig(EncoderDecoderConfig):
    """Proteins with masked spans (ProtT5nv)."""

    data: SpanDataConfig


@dataclass(kw_only=True)
class MegaMolBARTConfig(EncoderDecoderConfig):
    """SMILES (MegaMolBART)."""

    name: str  # of this model size, for file names
    restore_encoder_path: str | None  # the default of restore_from_path
    data: MoleculeDataConfig


@dataclass(kw_only=True)
class GPT3Config(ModelConfig):
    """Text (GPT-3)."""

    position_embedding_type: Literal["learned_absolute"]
    data: TextDataConfig
    normalization: Literal["layernorm"] | None = None
    transformer_block_type: Literal["pre_ln"] | None = None


@dataclass(kw_only=True)
class RunConfig:
    """Configuration of pretraining, of `launch` and of `plan`."""

    name: str  # of the experiment: part of directory and logger names
    desc: str | None = None
    do_preprocessing: bool  # prepare the data set; stop unless do_training
    do_training: bool
    do_testing: bool  # evaluate on the test set at the end
    seed: Seed | None = None  # of the data, if model.data.seed refers to it (MegaMolBART); not model.seed
    restore_from_path: str | None  # initial weights: a .nemo archive or a checkpoint
    trainer: TrainerConfig
    exp_manager: ExpManagerConfig
    model: ModelConfig  # `model._target_` selects the subclass
    cluster: ClusterConfig  # used by `bionemo launch` only
