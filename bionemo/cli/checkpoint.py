# SPDX-License-Identifier: Apache-2.0
"""Inspect, verify, convert or average checkpoints."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config.model_argument import HELP, model_word

_EXAMPLES = """\
  bionemo checkpoint inspect RUN
  bionemo checkpoint verify RUN
  bionemo checkpoint convert RUN:best esm2nv.nemo
  bionemo checkpoint convert esm2nv_650M_converted.nemo weights
  bionemo checkpoint convert RUN gpt2-hf --to=hf
  bionemo checkpoint convert gpt2-hf weights
  bionemo checkpoint average mean RUN/checkpoints/NAME*step=*
"""


def main() -> None:
    """Run `bionemo checkpoint`."""
    with one_line_errors():
        arguments = _parser().parse_args()
        arguments.run(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo checkpoint", formatter_class=RawDescriptionHelpFormatter, description=__doc__,
        epilog=f"examples\n{_EXAMPLES}",
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="action")

    inspect = actions.add_parser("inspect", help="describe a checkpoint, a .nemo file or a Hugging Face directory")
    inspect.add_argument("model", type=model_word, metavar="MODEL", help=HELP)
    inspect.add_argument("--tensors", action="store_true", help="list all tensors")
    inspect.set_defaults(run=_inspect)

    verify = actions.add_parser("verify", help="compare every file with its checksum")
    verify.add_argument(
        "paths", type=model_word, nargs="+", metavar="MODEL", help="RUN for all checkpoints of a run, or checkpoints"
    )
    verify.set_defaults(run=_verify)

    convert = actions.add_parser(
        "convert", help="convert between checkpoints, .nemo files and Hugging Face directories"
    )
    convert.add_argument("source", type=model_word, metavar="MODEL", help=HELP)
    convert.add_argument(
        "target",
        type=Path,
        help="NAME.nemo, or a directory to create: a checkpoint of weights, or with --to=hf a Hugging Face directory",
    )
    convert.add_argument("--to", choices=["hf"], help="write config.json and model.safetensors for transformers")
    convert.set_defaults(run=_convert)

    average = actions.add_parser("average", help="average the weights of several checkpoints")
    average.add_argument("output", type=Path)
    average.add_argument("inputs", type=model_word, nargs="+", metavar="MODEL", help=HELP)
    average.set_defaults(run=_average)
    return parser


def _inspect(arguments: Namespace) -> None:
    from bionemo.formats.convert import describe

    print(describe(arguments.model, arguments.tensors))


def _verify(arguments: Namespace) -> None:
    from bionemo.checkpoint import find_damage, is_checkpoint

    bad = 0
    for path in map(Path, arguments.paths):
        directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = sorted(part for part in directory.glob("*") if part.is_dir())
        if not any(map(is_checkpoint, found)):
            found = [path if is_checkpoint(path) else _require_checkpoint(path)]
        for checkpoint in found:
            problem = find_damage(checkpoint)
            bad += bool(problem)
            print(f"{checkpoint}: {problem or 'valid'}")
    if bad:
        raise UserError(f"{bad} checkpoint{'s' * (bad > 1)} cannot be used")


def _convert(arguments: Namespace) -> None:
    from bionemo.formats.convert import convert

    convert(arguments.source, arguments.target, arguments.to)
    print(f"{arguments.target} written")


def _require_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a MODEL names."""
    from bionemo.formats.detect import CHECKPOINT, detect_format, locate_path

    path = locate_path(path)
    if detect_format(path) != CHECKPOINT:
        raise UserError(f"{path} is not a checkpoint: convert it first with bionemo checkpoint convert")
    return path


def _average(arguments: Namespace) -> None:
    from bionemo.checkpoint import Checkpoint
    from bionemo.checkpoint.tools import average
    from bionemo.config.model_differences import differences
    from bionemo.config.saved_model import affects_outputs

    inputs = [_require_checkpoint(Path(path)) for path in arguments.inputs]
    first, *others = inputs
    for path in others:
        for key, one, other in differences(Checkpoint(first).config, Checkpoint(path).config):
            if affects_outputs(key):
                raise UserError(
                    f"{path} has model.{key}={other}, {first} has {one}: their weights compute different functions "
                    "and cannot be averaged"
                )
    average(arguments.output, inputs)
    print(f"{arguments.output}: average of {len(inputs)} checkpoints; use it as MODEL")
