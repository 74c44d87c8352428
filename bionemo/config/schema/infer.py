# SPDX-License-Identifier: Apache-2.0
"""The root of a prediction configuration: a trained model, input sequences and an output file."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from bionemo.config.schema.data import CsvFieldsConfig
from bionemo.config.schema.ranges import (
    DeviceCount,
    Dimension,
    Duration,
    Fraction,
    NodeCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Seed,
    TokenCount,
)
from bionemo.config.schema.training import Precision

OUTPUTS = ("embeddings", "begin", "hiddens", "logits", "pseudo_perplexity", "reconstruction", "samples")
_OF_LAYERS = ("embeddings", "begin", "hiddens", "attentions")
_OF_LAYER = re.compile(rf"({'|'.join(_OF_LAYERS)})_(\d+)")
SamplingMethod = Literal[
    "greedy-perturbate",
    "topkp-perturbate",
    "beam-search-perturbate",
    "beam-search-single-sample",
    "beam-search-perturbate-sample",
]


class OutputName:
    """Names of outputs."""

    def expected(self, value: str) -> str | None:
        """Describe the names if the value is none; None if it is one."""
        if value in OUTPUTS or _OF_LAYER.fullmatch(value):
            return None
        return f"one of {', '.join(OUTPUTS)}, or of layer N: {', '.join(f'{name}_N' for name in _OF_LAYERS)}"


def split_output(name: str) -> tuple[str, int | None]:
    """Return the kind of an output and the number of the layer in its name, if there is one."""
    match = _OF_LAYER.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


@dataclass(kw_only=True)
class InferTrainerConfig:
    """Hardware."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]  # auto: GPUs if there are any
    devices: DeviceCount | str  # per node; the sequences are divided over them; auto: all GPUs
    num_nodes: NodeCount  # machines
    precision: Precision  # of matrix products
    rank_timeout: Duration  # the run ends if the first process receives nothing from another one for longer


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling of molecules similar to an input: noise is added to its hidden states, which are then decoded."""

    sampling_method: SamplingMethod  # how hidden states become molecules
    num_samples: Dimension  # perturbations; beam-search-single-sample: beams of one perturbation
    scaled_radius: NonNegativeFloat  # standard deviation of the noise
    top_k: NonNegativeInt  # topkp: sample from the k most likely tokens; 0: no limit
    top_p: Fraction  # topkp: sample from the most likely tokens with this total probability; 0: no limit
    temperature: PositiveFloat  # topkp
    beam_size: Dimension  # beam searches; beam-search-perturbate-sample returns all beams
    beam_alpha: NonNegativeFloat  # beam searches: length penalty; 0: none
    seed: Seed  # of noise and sampling


@dataclass(kw_only=True)
class TaskConfig:
    """The model and its outputs."""

    restore_from_path: str  # a MODEL: a .nemo archive, checkpoint, Hugging Face directory, hf://ORG/NAME, ...
    outputs: list[Annotated[str, OutputName()]]  # what is computed for each sequence
    reconstruction_beam_size: Dimension  # 1: greedy
    sampling: SamplingConfig  # settings of samples


@dataclass(kw_only=True)
class InferDataImplConfig:
    """Settings of each reader; `data_impl` selects one."""

    csv_fields_mmap: CsvFieldsConfig  # CSV files of which several columns are read


@dataclass(kw_only=True)
class InferDataConfig:
    """Input sequences and the output file."""

    dataset_path: str | list[str]  # a file, a range such as x[000..004].csv, or a list
    data_impl: Literal["", "csv_fields_mmap", "fasta_fields_mmap"]  # "": by the extension of the files
    data_impl_kwargs: InferDataImplConfig  # settings of the readers
    data_fields_map: dict[str, str]  # titles of columns: {sequence: seq, id: name}; target: of reactions, see outputs
    index_mapping_dir: str | None  # directory of index files; None: in the user's cache
    batch_size: Dimension  # maximum number of sequences per batch; does not change the results
    tokens_per_batch: TokenCount  # maximum number of tokens per batch
    max_length: TokenCount | None  # tokens of a sequence; more than in training needs rotary positions
    long_sequences: Literal["truncate", "split", "drop", "error"]  # longer than the model's maximum length
    on_invalid: Literal["skip", "keep", "error"]  # SMILES that RDKit cannot parse, or without a known token
    output_fname: str  # "": name of the first input file with another extension, in the current directory
    output_format: Literal["npz", "h5", "csv", "parquet", "pkl", "h5_by_id"] | None  # h5_by_id: a set per id
    overwrite: bool  # replace an existing file


@dataclass(kw_only=True)
class InferModelConfig:
    """The model and its data."""

    downstream_task: TaskConfig  # the model and its outputs
    data: InferDataConfig  # input sequences and output file


@dataclass(kw_only=True)
class InferConfig:
    """Configuration of a prediction."""

    name: str  # of the prediction, for messages
    desc: str | None  # description for the user's notes
    trainer: InferTrainerConfig  # hardware
    model: InferModelConfig  # model, input and output
