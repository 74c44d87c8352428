# SPDX-License-Identifier: Apache-2.0
"""The root of a fine-tuning configuration: a pretrained model and a labelled task."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.data import DatasetConfig, TaskType
from bionemo.config.schema.exp_manager import ExpManagerConfig
from bionemo.config.schema.preparation import PreparationConfig
from bionemo.config.schema.ranges import (
    Dimension,
    Fraction,
    FractionAboveZero,
    FractionBelowOne,
    PositiveFloat,
    PositiveInt,
    Seed,
    SignedLayerCount,
    TokenCount,
)
from bionemo.config.schema.training import OptimConfig, TrainerConfig


@dataclass(kw_only=True)
class DownstreamDataConfig:
    """A labelled data set."""

    task_name: str | list[str]  # a list, or all, only to prepare data
    #: a class or a number per residue, a class, numbers or labels (multi-label) per sequence
    task_type: TaskType
    preprocessed_data_path: str  # directory with a directory per task
    #: directory of the task, or one CSV file, which is divided
    dataset_path: str
    dataset: DatasetConfig  # files of each split
    sequence_column: str  # column of the sequences
    #: column of the labels; several columns of numbers, or of 0 and 1 (multi-label): a head with several outputs
    target_column: str | list[str]
    target_sizes: list[PositiveInt] | None  # number of classes; None: counted in the training split
    mask_column: str | list[str] | None  # 1 for each residue with a valid label, else 0
    wild_type: str | None  # FASTA file of the protein whose variants the sequences are
    emb_batch_size: Dimension  # maximum number of sequences embedded together
    shuffle: bool  # shuffle the sequences in every epoch
    preprocessing: PreparationConfig | None  # settings of the preparation
    #: of one file, by groups of equal sequences: auto uses a column of train, val and test, otherwise random;
    #: scaffold: molecules by Bemis-Murcko scaffold; similarity: related proteins are in the same split
    split: Literal["auto", "random", "scaffold", "similarity"]
    min_seq_id: FractionAboveZero  # of related proteins: share of identical columns of their alignment
    coverage: Fraction  # of each of two related proteins by the alignment; 0: any significant alignment
    on_invalid: Literal["skip", "keep", "error"]  # SMILES that RDKit cannot parse, or without a known token


@dataclass(kw_only=True)
class HeadConfig:
    """The prediction head."""

    cnn_dim: Dimension  # token-level: channels between the two convolutions
    hidden_layer_size: Dimension | list[Dimension]  # sequence-level: width of the hidden layer or layers
    dropout: FractionBelowOne  # dropout probability before the last layer


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters, under NeMo's names."""

    adapter_dim: Dimension  # rank; a run that continues an adapter of peft has its ranks and modules instead
    target_modules: list[Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"]]  # in each layer


@dataclass(kw_only=True)
class PeftConfig:
    """Train adapters and keep the pretrained weights."""

    enabled: bool  # train adapters instead of the pretrained weights
    peft_scheme: Literal["lora"]  # lora is the only one
    lora_tuning: LoraConfig  # size and place of the adapters


@dataclass(kw_only=True)
class DownstreamModelConfig:
    """Pretrained model, trained parts, and data."""

    seq_length: TokenCount | None  # maximum length, if larger than in pretraining (rotary positions only)
    restore_encoder_path: str | None  # a MODEL: checkpoint, .nemo archive, Hugging Face directory, hf://ORG/NAME, ...
    restore_head_path: str | None  # head.safetensors of a run with encoder_frozen, to start from
    encoder_frozen: bool  # train only a head, on embeddings computed once; the keys for "unfrozen" have no effect
    freeze_layers: SignedLayerCount  # unfrozen: n > 0 freezes the embedding and n layers, n < 0 all but the last -n
    encoder_lr_scale: PositiveFloat  # unfrozen: learning rate of pretrained weights relative to the head's
    peft: PeftConfig  # low-rank adapters
    tensor_model_parallel_size: Dimension  # processes that share each layer
    pipeline_model_parallel_size: Dimension  # groups of consecutive layers on different processes
    sequence_parallel: bool  # divide norms and dropout along the sequence; needs tensor parallelism
    micro_batch_size: Dimension  # sequences per device and step
    global_batch_size: PositiveInt | None  # unfrozen: sequences per step on all devices; None: no accumulation
    seed: Seed  # of the head's weights, order and dropout
    downstream_task: HeadConfig  # the prediction head
    data: DownstreamDataConfig  # the labelled data set
    finetuning_optim: OptimConfig  # optimizer and learning rate


@dataclass(kw_only=True)
class DownstreamConfig:
    """Configuration of fine-tuning."""

    name: str  # of the experiment
    do_preprocessing: bool  # prepare the data set
    do_training: bool  # fine-tune; if False, prepare the data set, as in v1
    do_testing: bool  # evaluate on the test set at the end
    trainer: TrainerConfig  # hardware, length and frequency
    exp_manager: ExpManagerConfig  # directories, loggers and checkpoints
    model: DownstreamModelConfig  # pretrained model, head and data
