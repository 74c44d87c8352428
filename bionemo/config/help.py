# SPDX-License-Identifier: Apache-2.0
"""What `--help` says: from the directory listing alone, so that it comes at once."""

from pathlib import Path

from bionemo.config.paths import options

_TEXT = """\
usage: {command} [--config-name NAME] [key=value ...] [group=choice ...]

Composes a configuration from YAML files, checks it, and runs it. Every key can be set on the command line.

  key=value                 set a key, such as model.num_layers=12; a wrong key or value ends the run at once
  group=choice              take another file of a group, such as data=mock
  --config-name NAME        the file to start from (default: {name})
  --config-path DIR         a directory with your own files; they may name all groups below
  --config-dir DIR          a directory to search as well
  --cfg job [--resolve]     print the configuration and stop; --package model prints that part
  --info defaults-tree      show which files it is made of
  -m key=1,2                one run after the other, for each value
  -sc install=bash          print shell completion; use it as eval "$({command} -sc install=bash)"
  --hydra-help              more flags

configs ({directory})
  {configs}

groups
{groups}

examples
  {command}
  {command} --config-name={name} trainer.devices=8 trainer.num_nodes=2 model.micro_batch_size=32
  {command} data=fasta model.data.dataset_path=/data/proteins trainer.max_steps=1000
  {command} 'model.data.dataset.train=x[000..009]' trainer.precision=bf16-mixed exp_manager.exp_dir=/results
  {command} --cfg job --package model.optim
"""


def help_text(command: str, name: str, directory: Path, groups: Path) -> str:
    """Compose the text.

    Args:
        command: what the user typed to get here.
        name: the config that is run when none is named.
        directory: where runnable configs are.
        groups: the directory of the groups.
    """
    listed = [f"  {group.name:12} {', '.join(options(group))}" for group in sorted(groups.iterdir()) if group.is_dir()]
    return _TEXT.format(
        command=command,
        name=name,
        directory=directory,
        configs="\n  ".join(options(directory)),
        groups="\n".join(listed),
    )
