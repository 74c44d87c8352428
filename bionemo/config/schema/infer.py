# SPDX-License-Identifier: Apache-2.0
"""The root of a prediction: a trained model, the sequences it reads, and the file that takes what it makes of them."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.data import CsvFieldsConfig, FastaConfig
from bionemo.config.schema.ranges import (
    Devices,
    Duration,
    Machines,
    NotNegative,
    NotNegativeFloat,
    PositiveFloat,
    Seed,
    Share,
    Tokens,
    Width,
)
from bionemo.config.schema.trainer import Precision

Output = Literal["embeddings", "begin", "hiddens", "logits", "pseudo_perplexity", "reconstruction", "samples"]
SamplingMethod = Literal[
    "greedy-perturbate",
    "topkp-perturbate",
    "beam-search-perturbate",
    "beam-search-single-sample",
    "beam-search-perturbate-sample",
]


@dataclass(kw_only=True)
class InferTrainerConfig:
    """Where it is computed."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]  # auto takes the GPU when there is one
    devices: Devices | str  # of each node, each of which takes a share of the sequences; auto: all GPUs
    num_nodes: Machines
    precision: Precision
    rank_timeout: Duration  # DD:HH:MM:SS that the first process waits for something new from the others


@dataclass(kw_only=True)
class SamplingConfig:
    """How molecules near one that was read are drawn, in v1's words: noise on its vectors, then what is written."""

    sampling_method: SamplingMethod
    num_samples: Width  # perturbations; of single-sample: beams of one perturbation, all of which are kept
    scaled_radius: NotNegativeFloat  # standard deviation of the noise; 0: none
    top_k: NotNegative  # topkp: tokens are drawn from so many likeliest ones; 0: from all
    top_p: Share  # topkp: and from the likeliest that together have this probability; 0: from all
    temperature: PositiveFloat  # topkp: below 1 likely tokens become likelier
    beam_size: Width  # of beam searches; perturbate-sample keeps all beams of every perturbation
    beam_alpha: NotNegativeFloat  # length penalty of beam searches; 0: none
    seed: Seed


@dataclass(kw_only=True)
class TaskConfig:
    """What is asked of which model."""

    restore_from_path: str  # a .nemo archive, a checkpoint, or a directory of Hugging Face's
    outputs: list[Output]
    reconstruction_beam_size: Width  # 1: greedy
    sampling: SamplingConfig


@dataclass(kw_only=True)
class InferDataImplConfig:
    """Settings of each reader; `data_impl` says which one counts."""

    csv_fields_mmap: CsvFieldsConfig
    fasta_fields_mmap: FastaConfig


@dataclass(kw_only=True)
class InferDataConfig:
    """Sequences, and where what is made of them goes."""

    dataset_path: str | list[str]  # a file, a range of them such as x[000..004].csv, or a list
    data_impl: Literal["", "csv_fields_mmap", "fasta_fields_mmap"]  # "": by the ending of the files
    data_impl_kwargs: InferDataImplConfig
    data_fields_map: dict[str, str]  # names of the columns, where a CSV file has a header: {sequence: seq, id: name}
    index_mapping_dir: str | None
    batch_size: Width  # sequences computed together, at most; results do not depend on it
    tokens_per_batch: Tokens  # and tokens
    long_sequences: Literal["truncate", "split", "drop", "error"]  # what has more tokens than the model reads
    output_fname: str  # "": the name of the first file, with another ending, in the current directory
    output_format: Literal["npz", "h5", "pt", "csv", "parquet", "pkl"] | None  # None: by the ending of output_fname
    overwrite: bool  # replace a file that is there


@dataclass(kw_only=True)
class InferModelConfig:
    """A model and its data."""

    downstream_task: TaskConfig
    data: InferDataConfig


@dataclass(kw_only=True)
class InferConfig:
    """Everything a prediction can be told."""

    name: str
    desc: str | None
    trainer: InferTrainerConfig
    model: InferModelConfig
