# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 - the names are re-exported
"""Types of all configuration keys; their values are in `conf/`.

A field without a default must be set in YAML. A field `X | None = None` is optional. `_target_` names a class, whose
annotation of `config` is the dataclass of the group (see `targets.py`).
"""

from bionemo.config.schema.cluster import (
    BcpConfig,
    ClusterConfig,
    KubernetesConfig,
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
    LoaderConfig,
    MaskedDataConfig,
    MockConfig,
    MockTextConfig,
    MoleculeDataConfig,
    ProteinDataConfig,
    ShardDataConfig,
    SourceConfig,
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
    ESMCConfig,
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
