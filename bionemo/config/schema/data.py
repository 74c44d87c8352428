# SPDX-License-Identifier: Apache-2.0
"""`model.data`: where sequences come from and how they become batches."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bionemo.config.schema.preparation import PreparationConfig
from bionemo.config.schema.ranges import (
    Byte,
    Column,
    NotNegative,
    NotNegativeFloat,
    OpenShare,
    Positive,
    Range,
    Seed,
    Share,
    Tokens,
    Workers,
)

DataImpl = Literal["csv_mmap", "csv_fields_mmap", "fasta_fields_mmap", "mock"]
Files = str | list[str]  # a range such as x[000..049] or x_OP_000..049_CL_, or a list of them


@dataclass(kw_only=True)
class CsvConfig:
    """A text file of one record a line, of which one column is read."""

    header_lines: NotNegative
    newline_int: Byte  # byte that ends a record
    workers: Workers | None  # processes that index the files
    sort_dataset_paths: bool
    data_sep: str
    data_col: Column  # column of the sequence, from 0


@dataclass(kw_only=True)
class CsvFieldsConfig:
    """A text file of one record a line, of which several columns are read."""

    header_lines: NotNegative
    newline_int: Byte
    workers: Workers | None
    sort_dataset_paths: bool
    data_sep: str
    data_fields: dict[str, Column]  # column of each field, from 0


@dataclass(kw_only=True)
class FastaConfig:
    """A FASTA file; v1's line settings are accepted, the format itself decides."""

    data_fields: dict[str, Column] | None = None
    header_lines: NotNegative | None = None
    newline_int: Byte | None = None
    workers: Workers | None = None
    sort_dataset_paths: bool | None = None


@dataclass(kw_only=True)
class DataImplConfig:
    """Settings of each reader; `data_impl` says which one counts."""

    csv_mmap: CsvConfig
    csv_fields_mmap: CsvFieldsConfig
    fasta_fields_mmap: FastaConfig


@dataclass(kw_only=True)
class LoaderConfig:
    """How the samples of one of train, val and test come. In YAML each key follows `model.data` until it is set."""

    use_upsampling: bool  # repeat the samples as often as the run needs them
    num_workers: Workers
    seed: Seed


@dataclass(kw_only=True)
class SplitConfig(LoaderConfig):
    """One of train, val and test in files."""

    dataset_path: str | None  # directory that holds a folder with the name of the split
    range: Files
    data_impl: DataImpl
    data_impl_kwargs: DataImplConfig
    max_seq_length: Tokens
    index_mapping_dir: str | None


@dataclass(kw_only=True)
class UF90RangeConfig:
    """Files of the UniRef90 members."""

    uf90_csvs: Files


@dataclass(kw_only=True)
class UF90ReaderConfig:
    """Reader of the UniRef90 members."""

    csv_fields_mmap: CsvFieldsConfig


@dataclass(kw_only=True)
class UF90Config:
    """The UniRef90 members of every UniRef50 cluster."""

    uniref90_path: str
    dataset: UF90RangeConfig
    data_impl: DataImpl
    data_impl_kwargs: UF90ReaderConfig
    index_mapping_dir: str | None


@dataclass(kw_only=True)
class ProteinSplitConfig(SplitConfig):
    """One of train, val and test, of proteins."""

    custom_pretraining_fasta_path: str | None = None  # preparation: own sequences instead of UniRef
    uf50_datapath: str | None = None  # preparation: UniRef50 sequences


@dataclass(kw_only=True)
class TrainSplitConfig(ProteinSplitConfig):
    """The training set of proteins, which may be sampled from clusters."""

    sample_from_map: bool | None  # a random UniRef90 member for each UniRef50 cluster; None: if the data has clusters
    sort_fastas: bool | None = None  # members are always put beside their cluster
    uf90_datapath: str | None = None  # preparation: UniRef90 sequences
    cluster_mapping_tsv: str | None = None  # preparation: UniRef50 id -> UniRef90 ids
    uf90: UF90Config | None = None


@dataclass(kw_only=True)
class DatasetConfig:
    """The files of each split."""

    train: Files
    val: Files
    test: Files


@dataclass(kw_only=True)
class MockConfig:
    """An endless synthetic protein language whose best possible loss is known."""

    num_sequences: Positive  # in the training set
    num_validation_sequences: Positive  # in the validation set, and in the test set
    min_length: Tokens
    max_length: Tokens
    seed: Seed


@dataclass(kw_only=True)
class DataConfig:
    """What all data have: how samples are put together, in which order, by which processes."""

    train: LoaderConfig
    val: LoaderConfig
    test: LoaderConfig
    index_mapping_dir: str | None  # where indexes are kept; None: beside the data, else in the user's cache
    # batches
    packing: bool  # fill micro_batch_size x seq_length tokens with whole sequences; False: one sequence a row, padded
    packing_window: Positive  # sequences whose packing is planned together
    dynamic_padding: bool  # one sequence a row: as many tokens as there are, instead of seq_length for each
    # order
    shuffle: bool
    seed: Seed
    use_upsampling: bool
    dataloader_type: Literal["single", "cyclic"]
    drop_last: bool
    # processes
    num_workers: Workers
    pin_memory: bool
    # preparation
    preprocessing: PreparationConfig | None  # None: there is nothing to prepare
    ngc_registry_target: str | None = None
    ngc_registry_version: str | None = None


@dataclass(kw_only=True)
class ShardDataConfig(DataConfig):
    """Sequences in CSV or FASTA files, or made up."""

    dataset_path: str | None
    dataset: DatasetConfig
    data_impl: DataImpl
    data_impl_kwargs: DataImplConfig
    train: SplitConfig
    val: SplitConfig
    test: SplitConfig
    max_seq_length: Tokens


@dataclass(kw_only=True)
class ProteinDataConfig(ShardDataConfig):
    """Proteins."""

    kind: Literal["proteins"]
    train: TrainSplitConfig
    val: ProteinSplitConfig
    test: ProteinSplitConfig
    mock: MockConfig
    long_sequences: Literal["crop", "truncate", "drop", "error"]  # crop: a random window, truncate: the beginning
    force_regen_sample_mapping: bool


@dataclass(kw_only=True)
class MaskedDataConfig(ProteinDataConfig):
    """Residues to guess.

    modify_percent of them are asked for; of these, the other three say what stands there instead.
    """

    modify_percent: Share
    mask_percent: Share
    perturb_percent: Share
    identity_percent: Share
    mask_special_tokens: bool  # v1 also masked the tokens that begin and end a sequence


@dataclass(kw_only=True)
class SpanDataConfig(ProteinDataConfig):
    """Residues behind sentinels, for an encoder-decoder to fill in."""

    seq_length_dec: Tokens  # tokens of a row of the decoder
    masked_lm_prob: OpenShare  # share of the residues that are hidden
    max_ngram_size: Positive  # residues behind one sentinel


@dataclass(kw_only=True)
class MoleculeDataConfig(ShardDataConfig):
    """SMILES, each read in one form by the encoder and written in another by the decoder."""

    kind: Literal["molecules"]
    # forms: as it stands, canonical, or random
    encoder_augment: bool  # the encoder reads a random form, which the decoder writes unless the next ones say else
    canonicalize_encoder_input: bool
    decoder_independent_augment: bool  # the decoder writes a random form of its own
    canonicalize_decoder_output: bool
    canonicalize_target_smile: bool  # what a validation compares with is canonical
    # masking: walking along, with mask_prob one <MASK> takes the place of Poisson(span_lambda) tokens
    encoder_mask: bool
    decoder_mask: bool
    mask_prob: Share
    span_lambda: Annotated[float, Range(0, 100)]
    # reactions: the columns of what is read and what is written
    input_name: str | None
    target_name: str | None
    links_file: str | None = None  # preparation: where the molecules are, a list of URLs for one
    # what is not as it should be
    long_sequences: Literal["truncate", "drop", "error"]
    on_invalid: Literal["skip", "keep", "error"]  # SMILES that RDKit refuses
    on_unknown: Literal["keep", "skip", "error"]  # tokens outside the vocabulary


@dataclass(kw_only=True)
class MockTextConfig:
    """Made-up text whose best possible loss is known."""

    num_samples: Positive  # in the training set
    num_validation_samples: Positive  # in the validation set, and in the test set
    seed: Seed


@dataclass(kw_only=True)
class TextDataConfig(DataConfig):
    """Documents to go on with, in Megatron's indexed files."""

    kind: Literal["text"]
    data_impl: Literal["mmap", "mock"]
    data_prefix: str | list[str | NotNegativeFloat]  # paths less .bin and .idx, or weights and paths in turns
    splits_string: str  # shares of train, val and test in the documents
    mock: MockTextConfig
    seq_length: Tokens
    reset_position_ids: bool  # positions begin anew with every document
    reset_attention_mask: bool  # a document attends to itself alone
    eod_mask_loss: bool  # what follows the end of a document is not asked
