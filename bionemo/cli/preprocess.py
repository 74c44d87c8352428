# SPDX-License-Identifier: Apache-2.0
"""Prepare a data set: from raw downloads to shards that train.

python -m bionemo.preprocess --config-name=uniref50 source=uniref50.fasta.gz output=DIR
python -m bionemo.preprocess --verify DIR
"""

import sys
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config import run
from bionemo.config.help import Topic
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import PreparationConfig

_TOPIC = Topic(
    PreparationConfig,
    "val_size=5000",
    False,
    (
        "source=proteins.fasta.gz output=data/mine",
        "source=proteins.csv id_column=name sequence_column=seq output=data/mine val_size=0.05 on_duplicate=skip",
        "--config-name=uniref50 output=data/uniref50",
        "--config-name=uniref50_90 source=uniref50_90_202104_esm2nv_v1.0 output=data/uniref50_90",
        "--config-name=flip task_name=scl output=data/FLIP",
        "--config-name=text source=books.jsonl.gz vocab_file=vocab.json merge_file=merges.txt output=data/books",
        "--verify data/mine        hold every shard against the checksums and counts of its preparation",
    ),
)


def main() -> None:
    """Compose the preparation that the command line describes, and do it."""
    if sys.argv[1:2] == ["--verify"]:
        with one_line_errors():
            verify(sys.argv[2:])
        return
    from bionemo.preparation import prepare

    run(prepare, "sequences", CONF_DIR / "preparation", _TOPIC)


def verify(directories: list[str]) -> None:
    """Hold prepared directories against their manifests.

    Raises:
        UserError: naming everything that is not as it should be.
    """
    from bionemo.preparation.manifest import Manifest
    from bionemo.preparation.manifest import verify as problems_of
    from bionemo.preparation.progress import progress

    if not directories:
        raise UserError("--verify needs the directory of a prepared data set")
    for name in directories:
        directory = Path(name)
        manifest = Manifest.read(directory)
        size = sum(entry.size for entry in manifest.files.values()) if manifest else None
        with progress(f"verifying {name}", size) as advance:
            problems = problems_of(directory, advance)
        if problems or manifest is None:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UserError(f"{directory} is not as it was prepared: {'; '.join(problems[:5])}{more}")
        records = sum(tally.written for tally in manifest.tallies.values())
        print(
            f"{directory}: {len(manifest.files)} files and {records:,} records are as they were written; books balance"
        )
