# SPDX-License-Identifier: Apache-2.0
"""Plan a pretraining run before it is submitted: parameters, memory, FLOPs, time, and which layouts fit.

python -m bionemo.plan --config-name=pretrain_esm2_650M trainer.devices=8 trainer.precision=bf16-mixed
"""

import argparse
import json
import sys

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config import run
from bionemo.config.help import Topic
from bionemo.config.schema import RunConfig

_TOPIC = Topic(
    RunConfig,
    "model.tensor_model_parallel_size=2",
    True,
    (
        "--config-name=pretrain_esm2_650M trainer.devices=8 trainer.num_nodes=4 trainer.precision=bf16-mixed",
        "--config-name=pretrain_esm2_15B trainer.precision=bf16-mixed model.optim.name=distributed_fused_adam",
        "--config-name=pretrain_small --config-dir=examples/protein/prott5nv/conf",
        "--device=a100-40         for another GPU: v100, a100-40, a100-80, l40s, h100 (if none is given), h200, b200",
        "--mfu=0.35               take this share of the peak, known from a run, instead of estimating it",
        "--all                    list every layout, not only the fastest",
        "--json                   everything as JSON: bytes, seconds, FLOPs",
    ),
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Compose the configuration that the command line describes, and tell what it will need."""
    with one_line_errors():
        asked, sys.argv[1:] = _flags(sys.argv[1:])
    run(lambda cfg: tell(cfg, asked), config_name, topic=_TOPIC)


def tell(cfg: RunConfig, asked: argparse.Namespace) -> None:
    """Print the plan."""
    from bionemo.planning.devices import device
    from bionemo.planning.report import as_data, plan
    from bionemo.planning.text import as_text

    made = plan(cfg, device(asked.device, str(cfg.trainer.precision)), asked.mfu)
    print(json.dumps(as_data(made), indent=2) if asked.json else as_text(made, asked.all))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}: see --help")


def _flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take this command's own flags out of a command line; the rest is the configuration's.

    Raises:
        UserError: when one has no proper value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--mfu", type=float)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked, rest = parser.parse_known_args(words)
    if asked.mfu is not None and not 0 < asked.mfu <= 1:
        raise UserError(f"--mfu={asked.mfu:g} is not a share of the peak, from above 0 to 1")
    return asked, rest
