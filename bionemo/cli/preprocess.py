# SPDX-License-Identifier: Apache-2.0
"""Convert raw data to shards for training.

bionemo preprocess --config-name=uniref50 source=uniref50.fasta.gz output=DIR
bionemo preprocess --verify DIR
"""

import sys
from pathlib import Path

from bionemo.cli.command import run
from bionemo.cli.help import CommandSpec
from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import PreparationConfig

_SPEC = CommandSpec(
    schema=PreparationConfig,
    description=(
        "Converts raw data to shards for training. The same command restarts a preparation that was interrupted."
    ),
    example="val_size=5000",
    has_groups=False,
    examples=(
        "source=proteins.fasta.gz output=data/mine",
        "source=proteins.csv id_column=name sequence_column=seq output=data/mine val_size=0.05 on_duplicate=skip",
        "--config-name=uniref50 output=data/uniref50",
        "--config-name=uniref50_90 source=uniref50_90_202104_esm2nv_v1.0 output=data/uniref50_90",
        "--config-name=flip task_name=scl output=data/FLIP",
        "--config-name=text source=books.jsonl.gz vocab_file=vocab.json merge_file=merges.txt output=data/books",
        "--verify data/mine        compare every file with the checksums and record counts of its manifest",
    ),
)


def main() -> None:
    """Run `bionemo preprocess`."""
    if sys.argv[1:2] == ["--verify"]:
        with one_line_errors():
            verify(sys.argv[2:])
        return
    from bionemo.preparation import prepare

    run(prepare, "sequences", CONF_DIR / "preparation", _SPEC)


def verify(directories: list[str]) -> None:
    """Compare prepared directories with their manifests.

    Raises:
        UserError: if files or record counts differ.
    """
    from bionemo.common.progress import progress
    from bionemo.preparation.manifest import Manifest, describe_other_versions
    from bionemo.preparation.manifest import verify as find_problems

    if not directories:
        raise UserError("--verify requires the directory of a prepared data set")
    for name in directories:
        directory = Path(name)
        manifest = Manifest.read(directory)
        size = sum(entry.size for entry in manifest.files.values()) if manifest else None
        with progress(f"verifying {name}", size) as advance:
            problems = find_problems(directory, advance)
        if problems or manifest is None:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UserError(f"{directory} differs from its manifest: {'; '.join(problems[:5])}{more}")
        records = sum(tally.written for tally in manifest.tallies.values())
        print(f"{directory}: {len(manifest.files)} files with {records:,} records agree with the manifest")
        if note := describe_other_versions(manifest):
            print(f"note: {directory} was {note}")
