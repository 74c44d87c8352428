# SPDX-License-Identifier: Apache-2.0
"""Estimate parameters, memory, FLOPs and time of a pretraining run.

bionemo plan --config-name=pretrain_esm2_650M trainer.devices=8 trainer.precision=bf16-mixed
"""

import argparse
import json
import math
import re
import shlex
import sys
from dataclasses import replace
from operator import attrgetter

from bionemo.cli.command import FlagParser, run
from bionemo.cli.help import CommandSpec
from bionemo.common.console import notify, one_line_errors
from bionemo.common.redaction import redact_arguments
from bionemo.config.schema import RunConfig

_LARGE, _BATCH = 1e8, 5e5  # parameters, and tokens of a step of GPT-3 with as many (Brown et al. 2020)
_MOST_GPUS = 16  # of a server
_SHOWN = 8  # layouts in the table
_SLOW = 0.9  # share of the time of the requested layout from which the fastest is pointed out
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
        "--tokens=100B            length of the run in tokens instead of trainer.max_steps; units K, M, B, T",
        "--json                   print JSON: bytes, seconds, FLOPs",
    ),
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Run `bionemo plan`."""
    with one_line_errors():
        flags, sys.argv[1:] = _parse_flags(sys.argv[1:])
    run(lambda cfg: print_plan(cfg, flags), config_name, spec=_SPEC)


def print_plan(cfg: RunConfig, flags: argparse.Namespace) -> dict[str, float]:
    """Print the plan, other layouts, and the command of the fastest one; return memory and time of the plan."""
    from bionemo.common.gpus import find_device
    from bionemo.planning.layouts import read_layout

    device, layout = find_device(flags.device, str(cfg.trainer.precision)), read_layout(cfg)
    # these import torch; errors above are reported at once
    from bionemo.planning.report import GIB, as_data, as_text, make_plan
    from bionemo.planning.search import as_table, search_layouts

    if layout.gpus_per_node > _MOST_GPUS:
        notify(
            f"trainer.devices={layout.gpus_per_node}: all GPUs of a node are taken to be connected by NVLink; for "
            f"several servers, set trainer.devices=8 trainer.num_nodes={layout.gpus_per_node // 8}"
        )
    plan = make_plan(cfg, layout, device)
    step_tokens = plan.tokens_per_second * plan.duration.total
    if flags.tokens:
        plan = replace(plan, steps=math.ceil(flags.tokens / step_tokens))
    if cfg.model.global_batch_size is None and step_tokens < _BATCH and sum(plan.parameters.values()) > _LARGE:
        notify(
            f"model.global_batch_size is not set: a step has {plan.layout.global_batch_size:,} rows, "
            f"{step_tokens:,.0f} tokens. Models of this size were trained with 0.5 million (GPT-3) to 2 million "
            "(ESM-2) tokens per step"
        )
    if not flags.json:
        print(as_text(plan), flush=True)  # the search takes longer
    found, limit = search_layouts(cfg, plan)
    command = _command(cfg, found[0][1], plan.steps) if found else ""
    if flags.json:
        others = [as_data(other) for other, _ in found]
        print(json.dumps(as_data(plan) | {"layouts": others, "limit": limit, "command": command}, indent=2))
    else:
        print(*(as_table(found[:_SHOWN]) if found else [f"no layout fits: {limit}"]), sep="\n")
        if found and (share := found[0][0].duration.total / plan.duration.total) < _SLOW:
            print(f"the first of these needs {share:.0%} of the time of the layout above")
        print(command)
    return {"memory in GiB": plan.memory.total / GIB, "seconds per step": plan.duration.total}


def _command(cfg: RunConfig, fastest: RunConfig, steps: int | None) -> str:
    """Return the command of `bionemo pretrain` with the arguments of this one, in the fastest layout."""
    from bionemo.planning.search import KEYS

    changed = {key: attrgetter(key)(fastest) for key in KEYS if attrgetter(key)(fastest) != attrgetter(key)(cfg)}
    changed |= {"trainer.max_steps": steps} if steps and steps != cfg.trainer.max_steps else {}
    given = [word for word in redact_arguments(sys.argv[1:]) if word.lstrip("+").partition("=")[0] not in changed]
    values = [f"{key}={'null' if value is None else value}" for key, value in changed.items()]
    return " \\\n    ".join(["bionemo pretrain", *map(shlex.quote, given), *values])


def _parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the flags of this command and the overrides."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=tokens)
    return parser.parse_known_args(words)


def tokens(text: str) -> float:
    """Return a number of tokens such as 100B; raise ValueError, with which argparse names this function, otherwise."""
    [(number, unit)] = re.findall(r"^([1-9]\d*(?:\.\d+)?)([KMBT]?)$", text)
    return float(number) * 1000 ** " KMBT".index(unit or " ")
