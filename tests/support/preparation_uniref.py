# SPDX-License-Identifier: Apache-2.0
"""Small UniRef50 and UniRef90 files and their preparation."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from bionemo.config.schema.preparation import ClustersJob
from bionemo.preparation import uniref
from bionemo.preparation.manifest import Manifest, verify
from tests.support.preparation import inline

UF50, UF90, VALID, TABLE = (
    *("uniref50_train_filt.fasta", "uniref90membersandreps_ur50trainfiltreps.fasta"),
    *("uniref50_valid.fasta", "mapping.tsv"),
)
FILES = 3


def make_job(source: Path, output: Path, **changes: Any) -> ClustersJob:
    values: dict[str, Any] = {
        **{
            "_target_": "",
            "output": str(output),
            "force": False,
            "num_preprocess_workers": 1,
            "engine": "local",
            "source": str(source),
        },
        **{"uf50_datapath": str(source / UF50), "uf90_datapath": str(source / UF90)},
        **{"val_datapath": str(source / VALID), "test_datapath": str(source / VALID)},
        **{"cluster_mapping_tsv": str(source / TABLE), "num_csv_files": FILES},
        **{f"on_{what}": "error" for what in ("empty", "duplicate", "letters", "unknown", "shared")},
        "custom_pretraining_fasta_path": {"train": None, "val": None, "test": None},
    }
    return ClustersJob(**(values | changes))


def prepare(source: Path, output: Path, **changes: Any) -> Manifest:
    with patch.object(uniref, "worker_pool", inline):
        uniref.prepare(make_job(source, output, **changes))
    assert verify(output) == []
    manifest = Manifest.read(output)
    assert manifest is not None
    return manifest
