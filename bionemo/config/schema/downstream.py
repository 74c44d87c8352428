# SPDX-License-Identifier: Apache-2.0
"""The root of a downstream run: a pretrained model and a labelled task."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.data import Files
from bionemo.config.schema.exp_manager import ExpManagerConfig
from bionemo.config.schema.optim import OptimConfig
from bionemo.config.schema.preparation import PreparationConfig
from bionemo.config.schema.ranges import LayerCount, Positive, PositiveFloat, Seed, ShareBelowOne, Tokens, Width
from bionemo.config.schema.trainer import TrainerConfig

TaskType = Literal["token-level-classification", "classification", "regression"]


@dataclass(kw_only=True)
class TaskFilesConfig:
    """Files of the splits, in directories of their names: a range such as x[000..004], or a list."""

    train: Files
    val: Files
    test: Files


@dataclass(kw_only=True)
class DownstreamDataConfig:
    """A labelled data set."""

    task_name: str | list[str]  # several, or all, when data is only prepared
    task_type: TaskType  # a class for each residue, or for each sequence, or a number
    preprocessed_data_path: str  # directory that holds, or gets, a directory for each task
    dataset_path: str  # directory of the task
    dataset: TaskFilesConfig
    sequence_column: str
    target_column: str | list[str]
    target_sizes: list[Positive] | None  # classes of the target; None: as many as the training split has
    mask_column: str | list[str] | None  # which residues are asked of: 1 or 0 for each
    emb_batch_size: Width  # sequences embedded together, at most
    shuffle: bool
    preprocessing: PreparationConfig


@dataclass(kw_only=True)
class HeadConfig:
    """What is trained on top."""

    cnn_dim: Width  # token-level: channels between the two convolutions
    hidden_layer_size: Width | list[Width]  # of sequences: width of the layer between, or of several
    dropout: ShareBelowOne


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters, under NeMo's names."""

    adapter_dim: Width  # rank of each
    target_modules: list[Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"]]  # of each layer


@dataclass(kw_only=True)
class PeftConfig:
    """Train few parameters beside the model's own, which stay."""

    enabled: bool
    peft_scheme: Literal["lora"]
    lora_tuning: LoraConfig


@dataclass(kw_only=True)
class DownstreamModelConfig:
    """What is trained, and on what."""

    seq_length: Tokens | None  # tokens to read, if more than it was trained with; learned positions have no more
    restore_encoder_path: str | None  # a .nemo archive, a checkpoint, or a directory of Hugging Face's
    restore_head_path: str | None  # unfrozen: begin with head.safetensors of a run whose encoder was frozen
    encoder_frozen: bool  # its vectors are computed once, and a head is trained on them
    freeze_layers: LayerCount  # unfrozen: the first n layers stay, and the embedding; below 0: all but the last n
    encoder_lr_scale: PositiveFloat  # unfrozen: learning rate of the pretrained weights, as a multiple of the head's
    peft: PeftConfig
    tensor_model_parallel_size: Width
    pipeline_model_parallel_size: Width
    sequence_parallel: bool
    micro_batch_size: Width  # sequences of an update on each device
    global_batch_size: Positive | None  # unfrozen: of an update on all devices; None: as many as there are at once
    seed: Seed
    downstream_task: HeadConfig
    data: DownstreamDataConfig
    finetuning_optim: OptimConfig


@dataclass(kw_only=True)
class DownstreamConfig:
    """Everything a downstream command can be told."""

    name: str  # of the experiment
    do_preprocessing: bool  # prepare the data set
    do_training: bool  # fine-tune; without it data is prepared, as in v1
    do_testing: bool  # run the test set at the end
    trainer: TrainerConfig
    exp_manager: ExpManagerConfig
    model: DownstreamModelConfig
