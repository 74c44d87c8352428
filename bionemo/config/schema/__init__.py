# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 - the names are re-exported
"""Types of all configuration keys; their values are in `conf/`.

A field without a default must be set in YAML. A field `X | None = None` is optional.
"""

from bionemo.config.schema.cluster import (
    BcpConfig,
    ClusterConfig,
    LocalConfig,
    MpiConfig,
    RayConfig,
    SlurmConfig,
)
from bionemo.config.schema.data import (
    CsvConfig,
    CsvFieldsConfig,
    DataConfig,
    DataImplConfig,
    FastaConfig,
    LoaderConfig,
    MaskedDataConfig,
    MockConfig,
    MockTextConfig,
    MoleculeDataConfig,
    ProteinDataConfig,
    ShardDataConfig,
    SpanDataConfig,
    SplitConfig,
    TextDataConfig,
    TrainSplitConfig,
    UF90Config,
)
from bionemo.config.schema.downstream import DownstreamConfig
from bionemo.config.schema.exp_manager import ExpManagerConfig
from bionemo.config.schema.infer import InferConfig, InferDataConfig, SamplingConfig, TaskConfig
from bionemo.config.schema.model import (
    EncoderConfig,
    EncoderDecoderConfig,
    ESM1bConfig,
    ESM1nvConfig,
    ESM2nvConfig,
    GPT3Config,
    MegaMolBARTConfig,
    ModelConfig,
    ProtT5nvConfig,
    RunConfig,
    TokenizerConfig,
)
from bionemo.config.schema.preparation import (
    ClustersJob,
    FlipJob,
    MoleculeNetJob,
    PreparationConfig,
    SequencesJob,
    TextJob,
    UsptoJob,
    ZincJob,
)
from bionemo.config.schema.training import OptimConfig, SchedConfig, TrainerConfig

# `_target_` -> dataclass, so that checking a configuration does not import torch. Other classes are imported, and the
# annotation of their constructor's argument `config` is used.
SCHEMAS: dict[str, type] = {
    "bionemo.models.esm1nv.ESM1nv": ESM1nvConfig,
    "bionemo.models.esm1b.ESM1b": ESM1bConfig,
    "bionemo.models.esm2nv.ESM2nv": ESM2nvConfig,
    "bionemo.models.prott5nv.ProtT5nv": ProtT5nvConfig,
    "bionemo.models.megamolbart.MegaMolBART": MegaMolBARTConfig,
    "bionemo.models.gpt3.GPT3": GPT3Config,
    "bionemo.preparation.sequences.prepare": SequencesJob,
    "bionemo.preparation.uniref.prepare": ClustersJob,
    "bionemo.preparation.flip.prepare": FlipJob,
    "bionemo.preparation.zinc.prepare": ZincJob,
    "bionemo.preparation.moleculenet.prepare": MoleculeNetJob,
    "bionemo.preparation.uspto.prepare": UsptoJob,
    "bionemo.preparation.megatron_corpus.prepare": TextJob,
    "bionemo.launch.local.Local": LocalConfig,
    "bionemo.launch.mpi.Mpi": MpiConfig,
    "bionemo.launch.slurm.Slurm": SlurmConfig,
    "bionemo.launch.bcp.Bcp": BcpConfig,
    "bionemo.launch.ray.Ray": RayConfig,
}
