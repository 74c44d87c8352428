# SPDX-License-Identifier: Apache-2.0
"""The `bionemo` command: `bionemo COMMAND ...` runs the command's module, which is imported only then.

Other packages add commands with an entry point in the group `bionemo.commands`, such as `mine = "mylab:main"`.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from bionemo.common.version import __version__

COMMANDS = {
    "pretrain": "train a model on proteins, molecules or text",
    "finetune": "train a prediction head, and optionally the model, on labelled sequences",
    "preprocess": "download data sets and convert them to shards for training",
    "predict": "compute embeddings, logits, pseudo-perplexities or molecules for the sequences of a file",
    "evaluate": "measure the quality of a trained model, and write a report",
    "report": "write an HTML page about training runs: curves, restarts, settings, hardware",
    "analysis": "score variants, predict contacts, plot embeddings, apply a fine-tuned head",
    "plan": "estimate parameters, memory, FLOPs and time of a run before it starts",
    "launch": "submit a run to a cluster: Slurm, Kubernetes, Base Command Platform, mpirun, Ray",
    "checkpoint": "inspect, verify, convert or average checkpoints",
    "doctor": "print versions, devices, launchers, disk space, and what is missing",
    "cluster": "test the connections between the processes of a launcher, or run a command on Ray",
}
_USAGE = """\
usage: bionemo COMMAND [arguments]

Pretrain and apply biomolecular language models.

{commands}

`bionemo COMMAND --help` describes a command.

examples
  bionemo pretrain --config-name=pretrain_esm2_8M model.data.dataset_path=DIR
  bionemo predict esm2.nemo model.data.dataset_path=x.fasta
  bionemo checkpoint convert RUN esm2nv.nemo\
"""


def main() -> None:
    """Run the command named by the first argument."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_USAGE.format(commands="\n".join(f"  {command:12} {text}" for command, text in COMMANDS.items())))
        return
    if name == "--version":
        print(__version__)
        return
    # Imported here, because they take longer than all that --help does.
    from bionemo.common.console import one_line_errors
    from bionemo.common.errors import UserError

    with one_line_errors():
        plugin = None if name in COMMANDS else _load_plugin(name)
        if name not in COMMANDS and plugin is None:
            raise UserError(f"unknown command {name!r}: choose one of {', '.join(COMMANDS)}")
    del sys.argv[1]
    sys.argv[0] = f"bionemo {name}"
    if plugin:
        plugin()
        return
    if name in ("pretrain", "finetune", "predict", "evaluate"):
        _restart_as_module("bionemo.cli.evaluate" if name == "evaluate" else f"bionemo.{name}")
    import_module(f"bionemo.cli.{name}").main()


def _load_plugin(name: str) -> Callable[[], None] | None:
    """Return the function of a command that another package adds."""
    from importlib.metadata import entry_points  # 20 ms, not for commands of bionemo

    found = entry_points(group="bionemo.commands", name=name)
    return next((entry.load() for entry in found), None)


def _restart_as_module(name: str) -> None:
    """Make Lightning and launch/spawn.py start the processes of further devices with `python -m NAME`."""
    main_module = sys.modules["__main__"]
    if main_module.__spec__ is None:  # console script: do not import from the working directory, as here
        os.environ["PYTHONSAFEPATH"] = "1"
    main_module.__spec__ = find_spec(name)
