# SPDX-License-Identifier: Apache-2.0
"""Estimate parameters, memory, FLOPs and time of a pretraining run.

bionemo plan --config-name=pretrain_esm2_650M trainer.devices=8 trainer.precision=bf16-mixed
"""

import argparse
import json
import sys

from bionemo.cli.command import FlagParser, run
from bionemo.cli.help import CommandSpec
from bionemo.common.console import one_line_errors
from bionemo.config.schema import RunConfig

_SPEC = CommandSpec(
    schema=RunConfig,
    description="Estimates parameters, memory, FLOPs and time of a run.",
    example="model.tensor_model_parallel_size=2",
    has_groups=True,
    examples=(
        "--config-name=pretrain_esm2_650M trainer.devices=8 trainer.num_nodes=4 trainer.precision=bf16-mixed",
        "--config-name=pretrain_esm2_15B trainer.precision=bf16-mixed model.optim.name=distributed_fused_adam",
        "--config-name=pretrain_small --config-dir=examples/protein/prott5nv/conf",
        "--device=a100-40         GPU: v100, a100-40, a100-80, l40s, h100 (default), h200, b200",
        "--json                   print JSON: bytes, seconds, FLOPs",
    ),
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Run `bionemo plan`."""
    with one_line_errors():
        flags, sys.argv[1:] = _parse_flags(sys.argv[1:])
    run(lambda cfg: print_plan(cfg, flags), config_name, spec=_SPEC)


def print_plan(cfg: RunConfig, flags: argparse.Namespace) -> None:
    """Print the plan."""
    from bionemo.common.gpus import find_device
    from bionemo.planning.layouts import read_layout

    device, layout = find_device(flags.device, str(cfg.trainer.precision)), read_layout(cfg)
    from bionemo.planning.report import as_data, as_text, make_plan  # imports torch; errors above are reported at once

    plan = make_plan(cfg, layout, device)
    print(json.dumps(as_data(plan), indent=2) if flags.json else as_text(plan))


def _parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the flags of this command and the overrides."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(words)
