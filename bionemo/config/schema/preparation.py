# SPDX-License-Identifier: Apache-2.0
"""Configurations of `bionemo preprocess`, one dataclass per kind of data set."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.ranges import (
    ColumnIndex,
    Fraction,
    FractionAboveZero,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ProcessCount,
    Seed,
    ShardCount,
    TokenCount,
)

Size = NonNegativeInt | NonNegativeFloat  # number of records; below 1: fraction of the records
Strictness = Literal["error", "skip"]


@dataclass(kw_only=True)
class PreparationConfig:
    """Keys of every preparation."""

    _target_: str  # function that prepares the data set
    output: str  # directory of the result
    force: bool  # prepare again even if the result exists
    num_preprocess_workers: ProcessCount  # at most one per core is used
    engine: Literal["local", "ray"]  # processes of this machine, or all cores of a Ray cluster


@dataclass(kw_only=True)
class SplitSizes:
    """Division of records into validation, test and training set, as in BioNeMo v1."""

    val_size: Size  # of the validation set
    test_size: Size  # of the test set
    seed: Seed  # of the division
    num_csv_files: ShardCount  # per split


@dataclass(kw_only=True)
class SequencePolicies:
    """Treatment of unusual records."""

    on_empty: Strictness  # without name or sequence
    on_duplicate: Literal["error", "skip", "keep"]  # with the name of an earlier record
    on_letters: Literal[
        "error", "skip", "strip", "keep"
    ]  # outside A to Z; strip removes `*` at the end, `-`, `.` and spaces


@dataclass(kw_only=True)
class SequencesJob(PreparationConfig, SplitSizes, SequencePolicies):
    """FASTA or CSV files, plain or gzipped, to shards; also used for UniRef50."""

    source: str | list[str]  # files or URLs
    checksum: str | None  # md5:... or sha256:... if there is one source
    format: Literal["auto", "fasta", "csv"]  # auto: by the first character of the file
    id_column: str | ColumnIndex  # of a CSV file: name in the header, or index
    sequence_column: str | ColumnIndex  # column of the sequences
    separator: str  # of the columns of a CSV file
    output_format: Literal["csv", "parquet"]  # of the shards, which have the same rows and columns
    duplicates: Literal["keep", "drop", "error"]  # records with the sequence of an earlier record
    split: Literal["random", "similarity"]  # similarity: related sequences are in the same split
    min_seq_id: FractionAboveZero  # of related sequences: share of identical columns of their alignment
    coverage: Fraction  # of each of two related sequences by the alignment; 0: any significant alignment
    cluster_tsv: str | None  # clusters, lines of representative TAB member; None: clusters of MMseqs2


@dataclass(kw_only=True)
class ClustersJob(PreparationConfig, SequencePolicies):
    """UniRef50 clusters with their UniRef90 members."""

    source: str | None  # directory of the files below
    uf50_datapath: str  # one sequence per cluster
    val_datapath: str  # sequences of the validation set
    test_datapath: str  # sequences of the test set
    uf90_datapath: str  # all members
    cluster_mapping_tsv: str  # UniRef50 id and UniRef90 ids of each cluster
    on_duplicate: Strictness  # a name that occurs twice
    num_csv_files: ShardCount  # files of each split
    on_unknown: Strictness  # a cluster or member in the mapping without a sequence
    on_shared: Strictness  # a member of two clusters; skip keeps it in the first one
    custom_pretraining_fasta_path: dict[str, str | None]  # own FASTA file per split; if any is given, only those


@dataclass(kw_only=True)
class FlipJob(PreparationConfig):
    """The FLIP benchmark: sequences with one label, or one label per residue."""

    source: str  # base URL or directory with a directory per task
    task_name: str | list[str]  # "all", or names


@dataclass(kw_only=True)
class ZincJob(PreparationConfig):
    """ZINC15 tranches or any SMILES files to shards of canonical SMILES."""

    source: str  # a file that lists URLs, a directory of SMILES files, or one such file
    sequence_column: str | ColumnIndex | None = None  # of the SMILES: title, or number from 0; None: it is found
    id_column: str | ColumnIndex | None = None  # of the ids
    max_smiles_length: TokenCount  # longer molecules are left out
    train_size: PositiveInt  # molecules per training shard
    val_size: NonNegativeInt  # molecules per validation shard
    test_size: NonNegativeInt  # molecules per test shard
    seed: Seed  # of the division
    on_invalid: Strictness  # SMILES that RDKit cannot parse
    on_duplicate: Literal["skip", "keep", "error"]  # molecules with the same canonical SMILES


@dataclass(kw_only=True)
class MoleculeNetJob(PreparationConfig):
    """Measured properties of molecules from MoleculeNet: ESOL, FreeSolv, Lipophilicity."""

    source: str  # base URL or directory
    task_name: str | list[str]  # all, or names
    val_size: Size  # of the validation set
    test_size: Size  # of the test set
    seed: Seed  # of the division
    on_invalid: Strictness  # SMILES that RDKit cannot parse
    split: Literal["random", "scaffold"]  # scaffold: by Bemis-Murcko scaffold, in the order of DeepChem


@dataclass(kw_only=True)
class UsptoJob(PreparationConfig):
    """Reactions of USPTO-50k for retrosynthesis."""

    source: str  # a file or URL
    checksum: str | None  # md5:... or sha256:... of the source
    on_invalid: Strictness  # reactions that RDKit cannot parse


@dataclass(kw_only=True)
class TextJob(PreparationConfig):
    """JSON Lines files to Megatron's indexed tokens: `output` is the path of two files without .bin and .idx."""

    source: str | list[str]  # .jsonl files, plain or gzipped
    json_key: str  # key of the text in each line's object
    vocab_file: str | None  # GPT-2's vocab.json
    merge_file: str | None  # GPT-2's merges.txt
    append_eod: bool  # append <|endoftext|> to every document
    on_empty: Strictness  # documents without text
    on_invalid: Strictness  # lines that are not a JSON object with a text
