# SPDX-License-Identifier: Apache-2.0
"""The types of every public key; the values live in `conf/`.

A field without a default must come from YAML. A field of `X | None = None` is a key that nobody has to give.
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
    TokenizerConfig,
)
from bionemo.config.schema.optim import OptimConfig, SchedConfig
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
from bionemo.config.schema.run import RunConfig
from bionemo.config.schema.trainer import TrainerConfig

# Which dataclass types a node is looked up by its `_target_`, so that checking a config imports no torch.
# A class that stands not here is imported and asked for the type of its `config` argument.
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

__all__ = [
    "SCHEMAS",
    "BcpConfig",
    "ClusterConfig",
    "ClustersJob",
    "CsvConfig",
    "CsvFieldsConfig",
    "DataConfig",
    "DataImplConfig",
    "DownstreamConfig",
    "ESM1bConfig",
    "ESM1nvConfig",
    "ESM2nvConfig",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "ExpManagerConfig",
    "FastaConfig",
    "FlipJob",
    "GPT3Config",
    "InferConfig",
    "InferDataConfig",
    "LoaderConfig",
    "LocalConfig",
    "MaskedDataConfig",
    "MegaMolBARTConfig",
    "MockConfig",
    "MockTextConfig",
    "ModelConfig",
    "MoleculeDataConfig",
    "MoleculeNetJob",
    "MpiConfig",
    "OptimConfig",
    "PreparationConfig",
    "ProtT5nvConfig",
    "ProteinDataConfig",
    "RayConfig",
    "RunConfig",
    "SamplingConfig",
    "SchedConfig",
    "SequencesJob",
    "ShardDataConfig",
    "SlurmConfig",
    "SpanDataConfig",
    "SplitConfig",
    "TaskConfig",
    "TextDataConfig",
    "TextJob",
    "TokenizerConfig",
    "TrainSplitConfig",
    "TrainerConfig",
    "UF90Config",
    "UsptoJob",
    "ZincJob",
]
