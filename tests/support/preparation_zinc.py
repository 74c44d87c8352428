# SPDX-License-Identifier: Apache-2.0
"""A ZINC15 preparation job."""

from pathlib import Path

from bionemo.config.schema.preparation import ZincJob


def job(source: Path, output: Path, **changed: object) -> ZincJob:
    settings: dict[str, object] = {
        **{
            "_target_": "",
            "output": str(output),
            "force": False,
            "num_preprocess_workers": 1,
            "engine": "local",
            "source": str(source),
        },
        **{"max_smiles_length": 512, "train_size": 1000, "val_size": 10, "test_size": 50, "seed": 0},
        **{"on_invalid": "error", "on_duplicate": "skip"},
    }
    return ZincJob(**(settings | changed))  # type: ignore[arg-type]
