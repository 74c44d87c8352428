# SPDX-License-Identifier: Apache-2.0
"""`model.data`: data files, and how their records become batches."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bionemo.config.schema.preparation import PreparationConfig
from bionemo.config.schema.ranges import (
    Byte,
    ColumnIndex,
    Fraction,
    FractionBetween,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    TokenCount,
    WorkerCount,
)

DataImpl = Literal["csv_mmap", "csv_fields_mmap", "fasta_fields_mmap", "parquet", "mock"]
Files = str | list[str]  # a range such as x[000..049] or x_OP_000..049_CL_, or a list of them
# A label per residue (token-level) or per sequence; of a sequence also several classes, or several targets.
TaskType = Literal[
    "token-level-classification", "classification", "regression", "multi-label", "token-level-regression"
]


@dataclass(kw_only=True)
class LinesConfig:
    """Text files with one record per line."""

    header_lines: NonNegativeInt  # number of lines before the first record
    newline_int: Byte  # the byte that ends a record
    workers: WorkerCount | None  # processes that index the files
    sort_dataset_paths: bool  # read the files in the order of their names instead of the given order
    data_sep: str  # separator of columns


@dataclass(kw_only=True)
class CsvConfig(LinesConfig):
    """CSV files of which one column is read."""

    data_col: ColumnIndex  # index of the column, from 0


@dataclass(kw_only=True)
class CsvFieldsConfig(LinesConfig):
    """CSV files of which several columns are read."""

    data_fields: dict[str, ColumnIndex]  # index of the column of each field, from 0


@dataclass(kw_only=True)
class ParquetConfig:
    """Parquet files."""

    column: str  # name of the column of the sequences


@dataclass(kw_only=True)
class DataImplConfig:
    """Settings of each reader; `data_impl` selects one."""

    csv_mmap: CsvConfig  # CSV files of which one column is read
    csv_fields_mmap: CsvFieldsConfig  # CSV files of which several columns are read
    parquet: ParquetConfig  # parquet files


@dataclass(kw_only=True)
class LoaderConfig:
    """One split (train, val or test). Keys that are not set refer to the same keys of `model.data` in YAML."""

    use_upsampling: bool  # True: trainer.max_epochs epochs, or no limit if null; False: one epoch
    num_workers: WorkerCount  # processes that prepare the batches; 0: the training process
    seed: Seed  # of order, crops and masks


@dataclass(kw_only=True)
class SplitConfig(LoaderConfig):
    """A split that is read from files."""

    dataset_path: str | None  # parent of the directory train, val or test
    range: Files  # files of the split
    data_impl: DataImpl  # reader of the files; mock: synthetic data
    data_impl_kwargs: DataImplConfig  # settings of the readers
    max_seq_length: TokenCount  # maximum number of tokens of a sequence
    index_mapping_dir: str | None  # directory of indexes; None or a parent: beside the data, else in the user's cache


@dataclass(kw_only=True)
class UF90RangeConfig:
    """Files of the UniRef90 members."""

    uf90_csvs: Files  # files of the members


@dataclass(kw_only=True)
class UF90ReaderConfig:
    """Reader of the UniRef90 members."""

    csv_fields_mmap: CsvFieldsConfig  # CSV files of which several columns are read


@dataclass(kw_only=True)
class UF90Config:
    """UniRef90 members of the UniRef50 clusters."""

    uniref90_path: str  # parent of the directory uf90_csvs
    dataset: UF90RangeConfig  # files of the members
    data_impl: Literal["csv_fields_mmap"]  # reader of the files
    data_impl_kwargs: UF90ReaderConfig  # settings of the readers
    index_mapping_dir: str | None  # directory of indexes; None or a parent: beside the data, else in the user's cache


@dataclass(kw_only=True)
class ProteinSplitConfig(SplitConfig):
    """A split of proteins."""

    custom_pretraining_fasta_path: str | None = None  # preparation: own sequences instead of UniRef
    uf50_datapath: str | None = None  # preparation: UniRef50 sequences


@dataclass(kw_only=True)
class TrainSplitConfig(ProteinSplitConfig):
    """The training set of proteins, which may be sampled from clusters."""

    sample_from_map: bool | None  # random UniRef90 member of each UniRef50 cluster; None: if the data has clusters
    uf90_datapath: str | None = None  # preparation: UniRef90 sequences
    cluster_mapping_tsv: str | None = None  # preparation: UniRef50 id -> UniRef90 ids
    uf90: UF90Config | None = None  # members of the clusters


@dataclass(kw_only=True)
class DatasetConfig:
    """Files of each split in the directories train, val and test."""

    train: Files  # files in the directory train
    val: Files  # files in the directory val
    test: Files  # files in the directory test


@dataclass(kw_only=True)
class MockConfig:
    """A synthetic protein language with known optimal loss."""

    num_sequences: PositiveInt  # in the training set
    num_validation_sequences: PositiveInt  # in the validation set, and in the test set
    min_length: TokenCount  # minimum number of residues of a sequence
    max_length: TokenCount  # maximum number of residues of a sequence
    seed: Seed  # of the sequences


@dataclass(kw_only=True)
class DataConfig:
    """Keys of all data sources: batches, order and workers."""

    train: LoaderConfig  # training set
    val: LoaderConfig  # validation set
    test: LoaderConfig  # test set
    index_mapping_dir: str | None  # directory of indexes; None or a parent: beside the data, else in the user's cache
    # batches
    packing: bool  # concatenate sequences to micro_batch_size x seq_length tokens; False: one padded row per sequence
    packing_window: PositiveInt  # sequences whose packing is planned together
    dynamic_padding: bool  # without packing: pad a micro-batch to a multiple of 64 tokens instead of to its maximum
    # order
    shuffle: bool  # in a new order in every epoch
    seed: Seed  # of order, crops and masks
    use_upsampling: bool  # False: training ends after one epoch
    drop_last: bool  # leave out the samples that do not fill a step
    # workers
    num_workers: WorkerCount  # processes that prepare the batches; 0: the training process
    pin_memory: bool  # page-locked memory for the transfer to a GPU
    # preparation
    preprocessing: PreparationConfig | None  # settings of the preparation


@dataclass(kw_only=True)
class ShardDataConfig(DataConfig):
    """Sequences in CSV, FASTA or parquet files, or mock data."""

    dataset_path: str | None  # parent of the directories train, val and test
    dataset: DatasetConfig  # files of each split
    data_impl: DataImpl  # reader of the files; mock: synthetic data
    data_impl_kwargs: DataImplConfig  # settings of the readers
    train: SplitConfig  # training set
    val: SplitConfig  # validation set
    test: SplitConfig  # test set
    max_seq_length: TokenCount  # maximum number of tokens of a sequence


@dataclass(kw_only=True)
class ProteinDataConfig(ShardDataConfig):
    """Proteins."""

    kind: Literal["proteins"]  # type of the data set
    train: TrainSplitConfig  # training set
    val: ProteinSplitConfig  # validation set
    test: ProteinSplitConfig  # test set
    mock: MockConfig  # synthetic proteins
    long_sequences: Literal["crop", "truncate", "drop", "error"]  # crop: random window; truncate: first residues


@dataclass(kw_only=True)
class SourceConfig:
    """One data set of a mixture. Keys that are not set have the values of `model.data`."""

    weight: PositiveFloat  # share of the samples, relative to the other sources
    dataset_path: str  # parent of the directories train, val and test
    dataset: DatasetConfig  # files of each split
    data_impl: DataImpl  # reader of the files; mock: synthetic data
    data_impl_kwargs: DataImplConfig  # settings of the readers


@dataclass(kw_only=True)
class MaskedDataConfig(ProteinDataConfig):
    """Masked language modeling: the fractions of target positions, and of what replaces their tokens."""

    mixture: dict[str, SourceConfig] | None = None  # sources by name, instead of one data set; see data=mixture

    modify_percent: Fraction  # target positions
    mask_percent: Fraction  # of these, <mask>
    perturb_percent: Fraction  # of these, a random residue
    identity_percent: Fraction  # of these, unchanged
    mask_special_tokens: bool  # v1 also masked begin and end tokens


@dataclass(kw_only=True)
class SpanDataConfig(ProteinDataConfig):
    """Masked spans, which the decoder restores."""

    seq_length_dec: TokenCount  # maximum length of the decoder
    masked_lm_prob: FractionBetween  # fraction of masked residues


@dataclass(kw_only=True)
class MoleculeDataConfig(ShardDataConfig):
    """SMILES: the encoder reads one form of a molecule, the decoder writes the same or another form."""

    kind: Literal["molecules"]  # type of the data set
    # forms: as in the file, canonical, or random
    encoder_augment: bool  # random form for the encoder; also for the decoder unless the next keys change it
    canonicalize_encoder_input: bool  # canonical form for the encoder
    decoder_independent_augment: bool  # another random form for the decoder
    canonicalize_decoder_output: bool  # canonical form for the decoder
    # masking: from left to right, with mask_prob, <MASK> replaces Poisson(span_lambda) tokens
    encoder_mask: bool  # mask the input of the encoder
    decoder_mask: bool  # mask the input of the decoder
    mask_prob: Fraction  # probability that a span begins at a token
    span_lambda: Annotated[float, Range(0, 100)]  # mean number of tokens of a span
    # reactions: columns of input and target
    input_name: str | None  # column of the input
    target_name: str | None  # column of the target
    links_file: str | None = None  # preparation: a file that lists URLs
    # unusual records
    long_sequences: Literal["truncate", "drop", "error"]  # molecules with more than max_seq_length tokens
    on_invalid: Literal["skip", "keep", "error"]  # SMILES that RDKit cannot parse
    on_unknown: Literal["keep", "skip", "error"]  # tokens outside the vocabulary


@dataclass(kw_only=True)
class MockTextConfig:
    """Synthetic text with known optimal loss."""

    num_samples: PositiveInt  # in the training set
    num_validation_samples: PositiveInt  # in the validation set, and in the test set
    seed: Seed  # of the text


@dataclass(kw_only=True)
class TextDataConfig(DataConfig):
    """Documents in Megatron's indexed files."""

    kind: Literal["text"]  # type of the data set
    data_impl: Literal["mmap", "mock"]  # mmap: Megatron's indexed files; mock: synthetic text
    data_prefix: str | list[str | NonNegativeFloat]  # paths without .bin and .idx, or alternating weights and paths
    splits_string: str  # relative sizes of train, val and test
    mock: MockTextConfig  # synthetic text
    seq_length: TokenCount  # tokens of a row
    reset_position_ids: bool  # positions restart with every document
    reset_attention_mask: bool  # documents attend only to themselves
    eod_mask_loss: bool  # no loss for the token after the end of a document
