# SPDX-License-Identifier: Apache-2.0
"""The root of a pretraining configuration, and `model`: architecture, parallel layout and nested groups."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

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
)
from bionemo.config.schema.training import OptimConfig, TrainerConfig


@dataclass(kw_only=True)
class TokenizerConfig:
    """Vocabulary. Those of proteins and molecules are part of the package; GPT-2's files come from the user."""

    vocab_file: str | None = None  # GPT-3: file of the vocabulary
    merge_file: str | None = None  # GPT-3: file of the merges of byte-pair encoding
    num_sentinel_tokens: NonNegativeInt | None = None  # ProtT5nv


@dataclass(kw_only=True)
class DownstreamFilesConfig:
    """Files of a downstream task."""

    train: Files  # files of the training split
    test: Files  # files of the test split


@dataclass(kw_only=True)
class DownstreamDatasetConfig:
    """A small labelled task: at every validation a head is trained on the frozen model and tested."""

    task_type: TaskType  # a class per residue, a class per sequence, or a number per sequence
    task_name: str  # name of the task, for messages
    dataset_path: str  # directory of the splits
    dataset: DownstreamFilesConfig  # files of each split
    sequence_column: str  # column of the sequences
    target_column: str | list[str]  # column of the labels
    target_sizes: list[PositiveInt] | None  # number of classes of each target; None: regression
    mask_column: list[str] | None  # column with 1 for each residue with a valid label, else 0
    max_seq_length: TokenCount  # maximum number of tokens; longer sequences are truncated
    emb_batch_size: Dimension  # sequences embedded together
    batch_size: Dimension  # sequences of a step of the head
    num_epochs: PositiveInt  # epochs of the head
    shuffle: bool  # shuffle the sequences in every epoch
    random_seed: Seed  # of the weights of the head and of the order
    optim: OptimConfig  # optimizer of the head


@dataclass(kw_only=True)
class DownstreamValidationConfig:
    """Validation on a downstream task during pretraining."""

    enabled: bool  # train a head at every validation
    dataset: DownstreamDatasetConfig  # the labelled task


@dataclass(kw_only=True)
class ModelConfig:
    """Keys of every model."""

    _target_: str  # import path of the model class
    # batch and parallel layout
    #: rows of a micro-batch of a model replica; a row is a sequence or, packed, seq_length tokens;
    #: auto: on GPUs all rows of a step, halved until they fit; on CPUs or model-parallel at most replica_batch_size
    micro_batch_size: Dimension | Literal["auto"]
    #: only with auto, without global_batch_size: rows of a replica in a step, if nothing is accumulated
    replica_batch_size: Dimension
    global_batch_size: PositiveInt | None  # None: micro-batch size x data-parallel size x accumulation
    tensor_model_parallel_size: Dimension  # processes that share each layer
    pipeline_model_parallel_size: Dimension  # groups of consecutive layers on different processes
    sequence_parallel: bool  # divide norms and dropout along the sequence; needs tensor parallelism
    # architecture
    seq_length: TokenCount  # maximum length, including begin and end tokens
    encoder_seq_length: TokenCount  # equal to seq_length
    max_position_embeddings: TokenCount  # maximum number of positions
    num_layers: LayerCount  # of an encoder-decoder: of each
    hidden_size: Dimension  # width of the model
    ffn_hidden_size: Dimension  # width of the feed-forward layers
    num_attention_heads: Dimension  # attention heads of a layer
    kv_channels: Dimension | None  # size of a head; None: hidden_size / num_attention_heads
    activation: Literal["gelu", "gelu_tanh", "swiglu"]  # exact, GPT-2's approximation, or gated (Shazeer 2020)
    hidden_dropout: FractionBelowOne  # dropout probability after the embedding and before each residual addition
    attention_dropout: FractionBelowOne  # dropout probability of attention weights
    layernorm_epsilon: PositiveFloat  # added to the variance in layer norms
    init_method_std: PositiveFloat  # standard deviation of the initial weights
    make_vocab_size_divisible_by: Dimension  # the embedding table is padded to a multiple
    # numerics and speed
    seed: Seed  # of initial weights and dropout
    compile: bool | Literal["auto"]  # torch.compile every layer; auto: on GPUs with Triton and a C compiler
    native_amp_init_scale: PositiveFloat  # 16-mixed: first loss scale
    native_amp_growth_interval: PositiveInt  # 16-mixed: steps without overflow until the scale is doubled
    hysteresis: PositiveInt  # 16-mixed: overflows until the scale is halved
    #: recompute in the backward pass: selective, attention; full, whole layers; None: nothing
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    #: full: uniform, groups of layers; block, the first layers of each stage
    activations_checkpoint_method: Literal["uniform", "block"] | None
    #: full: layers of a group (uniform), or layers that are recomputed (block, 0: none)
    activations_checkpoint_num_layers: NonNegativeInt | None
    resume_from_checkpoint: str | None  # a checkpoint to resume from, instead of the newest one of this run
    # groups
    tokenizer: TokenizerConfig  # vocabulary
    data: DataConfig  # data files and batches
    optim: OptimConfig  # optimizer and learning rate
    dwnstr_task_validation: DownstreamValidationConfig  # validation on a labelled task

    linear_bias: ClassVar[bool] = True  # linear modules of the layers have a bias
    norm_of_queries_and_keys: ClassVar[bool] = False  # layer norm over the channels of all heads, without bias
    final_norm_bias: ClassVar[bool] = True  # the layer norm after the last layer has a bias

    @property
    def residual_divisor(self) -> float:
        """Divisor of what attention and feed-forward layers add to the residual stream."""
        return 1.0

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

    data: MaskedDataConfig  # proteins and masking


@dataclass(kw_only=True)
class ESM1nvConfig(EncoderConfig):
    """Encoder with learned positions (ESM-1nv)."""

    position_embedding_type: Literal["learned_absolute"]  # kind of positions of this model class


@dataclass(kw_only=True)
class ESM1bConfig(EncoderConfig):
    """Encoder with learned positions and token dropout (ESM-1b, ESM-1v)."""

    position_embedding_type: Literal["learned_absolute"]  # kind of positions of this model class
    embedding_token_dropout: bool  # see ESM2nvConfig
    embedding_layer_norm: bool  # before the first layer: True for ESM-1b, False for ESM-1v


@dataclass(kw_only=True)
class ESM2nvConfig(EncoderConfig):
    """Encoder with rotary positions and token dropout (ESM-2nv)."""

    position_embedding_type: Literal["rope"]  # kind of positions of this model class
    embedding_token_dropout: bool  # scale embeddings by the fraction of tokens that are not masked
    #: angle per position of each pair of channels, if the weights were trained or saved with others than
    #: 1 / 10000^(2i / head size), such as frequencies rounded to bf16
    rotary_frequencies: list[PositiveFloat] | None = None


@dataclass(kw_only=True)
class ESMCConfig(EncoderConfig):
    """Encoder with rotary positions, normalized queries and keys, gated feed-forward layers and few biases (ESMC)."""

    position_embedding_type: Literal["rope"]  # kind of positions of this model class

    linear_bias = False
    norm_of_queries_and_keys = True
    final_norm_bias = False

    @property
    def residual_divisor(self) -> float:
        """See ModelConfig: 1 for 36 layers."""
        return math.sqrt(self.num_layers / 36)


@dataclass(kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Keys of every encoder-decoder."""

    position_embedding_type: Literal["learned_absolute"]  # kind of positions of this model class
    share_decoder_tokens_head_embeddings: bool  # the output layer uses the embedding table and a bias per token


@dataclass(kw_only=True)
class ProtT5nvConfig(EncoderDecoderConfig):
    """Proteins with masked spans (ProtT5nv)."""

    data: SpanDataConfig  # proteins and spans


@dataclass(kw_only=True)
class MegaMolBARTConfig(EncoderDecoderConfig):
    """SMILES (MegaMolBART)."""

    name: str  # of this model size, for file names
    restore_encoder_path: str | None  # the default of restore_from_path
    data: MoleculeDataConfig  # molecules


@dataclass(kw_only=True)
class GPT3Config(ModelConfig):
    """Text (GPT-3)."""

    position_embedding_type: Literal["learned_absolute"]  # kind of positions of this model class
    data: TextDataConfig  # text


@dataclass(kw_only=True)
class RunConfig:
    """Configuration of pretraining, of `launch` and of `plan`."""

    name: str  # of the experiment: part of directory and logger names
    desc: str | None = None  # description for the user's notes
    do_preprocessing: bool  # prepare the data set; stop unless do_training
    do_training: bool  # train; if False, only prepare the data set
    do_testing: bool  # evaluate on the test set at the end
    seed: Seed | None = None  # of the data, if model.data.seed refers to it (MegaMolBART); not model.seed
    restore_from_path: (
        str | None
    )  # initial weights: a .nemo archive, checkpoint, Hugging Face directory or hf://ORG/NAME
    trainer: TrainerConfig  # hardware, length and frequency
    exp_manager: ExpManagerConfig  # directories, loggers and checkpoints
    model: ModelConfig  # `model._target_` selects the subclass
    cluster: ClusterConfig  # used by `bionemo launch` only
