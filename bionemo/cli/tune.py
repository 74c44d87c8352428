# SPDX-License-Identifier: Apache-2.0
"""Suggest a learning rate for a pretraining run from short runs of a narrow model.

bionemo tune --output=tune --config-name=pretrain_esm2_650M model.data.dataset_path=DIR
"""

import argparse
import sys
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config import FlagParser, run
from bionemo.config.help import CommandSpec
from bionemo.config.schema import RunConfig

_SPEC = CommandSpec(
    schema=RunConfig,
    description=(
        "Suggests a learning rate: trains narrow models with several rates, and scales the best one to the hidden\n"
        "size of the configuration."
    ),
    example="model.optim.name=muon",
    has_groups=True,
    examples=(
        "--output=DIR --config-name={name} model.data.dataset_path=/data/uniref",
        "--output=DIR --config-name=pretrain_esm2_650M model.optim.name=muon",
        "--width=128              hidden size of the narrow model (default: an eighth, but at least 64)",
        "--steps=400              training steps of each run (default: 400)",
    ),
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Run `bionemo tune`."""
    with one_line_errors():
        flags, sys.argv[1:] = _parse_flags(sys.argv[1:])
    run(lambda cfg: suggest(cfg, flags), config_name, spec=_SPEC)


def suggest(cfg: RunConfig, flags: argparse.Namespace) -> None:
    """Train narrow models, and print the suggested overrides."""
    if flags.output is None:
        raise UserError("--output is missing: set it to a directory for the runs")
    from bionemo.evaluation.tuning import PAGE_NAME, tune

    found = tune(cfg, sys.argv[1:], flags.output, flags.width, flags.steps)
    lowest = found.losses[found.narrow_rate]
    print(f"lowest loss of hidden size {found.narrow_width}: {lowest:.4f} at learning rate {found.narrow_rate:g}")
    print(f"suggestion for hidden size {found.width}: {' '.join(found.overrides)} ({flags.output / PAGE_NAME})")


def _parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the flags of this command and the overrides."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=400)
    flags, rest = parser.parse_known_args(words)
    if flags.steps < 10:
        parser.error(f"--steps={flags.steps}: expected 10 or more")
    return flags, rest
