# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.preprocess`: what raw downloads become, one dataclass per kind of data set."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.ranges import (
    Column,
    NotNegative,
    NotNegativeFloat,
    Positive,
    Processes,
    Seed,
    Shards,
    Tokens,
)

Size = NotNegative | NotNegativeFloat  # a count of records, or a share of them below 1
Strictness = Literal["error", "skip"]


@dataclass(kw_only=True)
class PreparationConfig:
    """What every preparation is told."""

    _target_: str
    output: str  # directory of the result
    force: bool  # prepare again what is there already
    num_preprocess_workers: Processes  # processes, at most one per core


@dataclass(kw_only=True)
class SplitSizes:
    """How records are dealt to validation, test and training, as BioNeMo v1 dealt them."""

    val_size: Size
    test_size: Size
    seed: Seed
    num_csv_files: Shards  # shards of each split


@dataclass(kw_only=True)
class SequencePolicies:
    """What happens to a record that is not as it should be."""

    on_empty: Strictness  # no name, or no sequence
    on_duplicate: Literal["error", "skip", "keep"]  # a name that has been seen before
    on_letters: Literal["error", "skip", "strip", "keep"]  # letters beyond A to Z; strip removes `*`, `-`, `.`, spaces


@dataclass(kw_only=True)
class SequencesJob(PreparationConfig, SplitSizes, SequencePolicies):
    """FASTA or CSV files, plain or gzipped, to shards; UniRef50 is one of them."""

    source: str | list[str]  # files or URLs
    checksum: str | None  # of the only source: md5:... or sha256:...
    format: Literal["auto", "fasta", "csv"]  # auto: by the file's first letter
    id_column: str | Column  # of a CSV: its name in the header, or its number from 0
    sequence_column: str | Column
    separator: str


@dataclass(kw_only=True)
class ClustersJob(PreparationConfig, SequencePolicies):
    """UniRef50 clusters with their UniRef90 members."""

    source: str | None  # directory in which the files below are looked for
    uf50_datapath: str  # a sequence of each cluster
    val_datapath: str
    test_datapath: str
    uf90_datapath: str  # all members
    cluster_mapping_tsv: str
    on_duplicate: Strictness
    num_csv_files: Shards
    on_unknown: Strictness  # the mapping names a cluster or member that no FASTA holds
    on_shared: Strictness  # a member of two clusters; skip keeps it in the first
    custom_pretraining_fasta_path: dict[
        str, str | None
    ]  # own sequences for a split; if any is given, nothing else is made


@dataclass(kw_only=True)
class FlipJob(PreparationConfig):
    """The FLIP benchmark: sequences with a label each, or with one per residue."""

    source: str  # base URL or directory; each task is a directory below it
    task_name: str | list[str]  # "all", or names


@dataclass(kw_only=True)
class ZincJob(PreparationConfig):
    """ZINC15 tranches, or any directory of SMILES files, to shards of canonical SMILES."""

    source: str  # a file that lists URLs, a directory of SMILES files, or one such file
    max_smiles_length: Tokens
    train_size: Positive  # molecules of a shard
    val_size: NotNegative
    test_size: NotNegative
    seed: Seed
    on_invalid: Strictness  # SMILES that RDKit cannot read
    on_duplicate: Literal["skip", "keep", "error"]  # molecules with the same canonical SMILES


@dataclass(kw_only=True)
class MoleculeNetJob(PreparationConfig):
    """MoleculeNet's measured properties: ESOL, FreeSolv, Lipophilicity."""

    source: str  # base URL or directory
    task_name: str | list[str]
    val_size: Size
    test_size: Size
    seed: Seed
    on_invalid: Strictness


@dataclass(kw_only=True)
class UsptoJob(PreparationConfig):
    """USPTO-50k: reactions for retrosynthesis."""

    source: str
    checksum: str | None
    on_invalid: Strictness


@dataclass(kw_only=True)
class TextJob(PreparationConfig):
    """Documents of JSON Lines files, tokenised for GPT: `output` is the path of two files without .bin and .idx."""

    source: str | list[str]  # .jsonl files, plain or gzipped
    json_key: str  # where in a line's object its text is
    vocab_file: str | None  # GPT-2's vocab.json
    merge_file: str | None  # and its merges.txt
    append_eod: bool  # end every document with <|endoftext|>
    on_empty: Strictness  # a document without text
    on_invalid: Strictness  # a line that is no JSON object with a text
