# SPDX-License-Identifier: Apache-2.0
"""What a trained model tells of proteins: effects of mutations, contacts, and a map of many."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from bionemo.common.console import one_line_errors

_EXAMPLES = """\
examples
  python -m bionemo.analysis variants --model esm2.nemo --sequence wild_type.fasta \\
      --variants measured.csv --column mutant --score-column DMS_score --output scores.csv
  python -m bionemo.analysis variants --model esm2.nemo --variants P62593_variants.fasta --output scores.csv
  python -m bionemo.analysis variants --model esm2.nemo --sequence MKTAYIAKQR --scan --output scan.csv
  python -m bionemo.analysis contacts --model esm2-hf --input proteins.fasta --output contacts
  python -m bionemo.analysis contacts-fit --model esm2.nemo --input known.fasta --maps maps --output head.json
  python -m bionemo.analysis contacts --model esm2.nemo --head head.json --input proteins.fasta --output contacts
  python -m bionemo.analysis map --input embeddings.npz --output map.csv
  python -m bionemo.analysis map --model esm2.nemo --input proteins.fasta --method pca --color Tax --output map.csv
"""


def main() -> None:
    """Do what is asked for."""
    with one_line_errors():
        arguments = _parser().parse_args()
        from bionemo.interop.quiet import quiet_dependencies

        quiet_dependencies()
        from bionemo.cli.analysis_commands import COMMANDS

        quiet_dependencies()  # some have put their handlers in place now
        COMMANDS[arguments.command](arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo analysis", description=__doc__, epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add_variants(commands.add_parser("variants", help="score variants of a protein without measurements"))
    _add_contacts(commands.add_parser("contacts", help="predict which residues touch"))
    _add_fit(commands.add_parser("contacts-fit", help="fit what tells contacts from attention"))
    _add_map(commands.add_parser("map", help="bring embeddings of many sequences to two dimensions"))
    _add_label(commands.add_parser("label", help="answer for new sequences what `bionemo finetune` has learned"))
    for command in commands.choices.values():
        command.add_argument("--overwrite", action="store_true", help="replace output files that exist")
    return parser


def _add_model(parser: ArgumentParser, required: bool = True, told: str = "") -> None:
    parser.add_argument(
        "--model", type=Path, required=required, metavar="PATH",
        help=f"a checkpoint, a .nemo archive, or a directory of Hugging Face's {told}".strip(),
    )  # fmt: skip
    parser.add_argument("--device", help="such as cpu or cuda:1 (the first GPU, where there is one)")
    parser.add_argument(
        "--precision", default="32", choices=["32", "bf16-mixed", "16-mixed"], help="of products (%(default)s)"
    )
    parser.add_argument(
        "--longest", type=int, metavar="TOKENS",
        help="that a sequence may have with begin and end, if more than the model was trained with (rotary models)",
    )  # fmt: skip


def _add_variants(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--sequence", help="of the wild type: a FASTA file, or its letters")
    parser.add_argument(
        "--variants", type=Path, metavar="FILE", help="a CSV file, or FASTA with headers such as >2810|name_R63P|0.873"
    )
    parser.add_argument("--scan", action="store_true", help="score every substitution at every position instead")
    parser.add_argument("--column", default="variant", help="of the variants, as A24G:K30R (%(default)s)")
    parser.add_argument("--score-column", help="of what was measured (score, where there is one)")
    parser.add_argument(
        "--method", default="masked-marginal", choices=["masked-marginal", "wild-type-marginal"],
        help="mask each mutated residue, or read the wild type once as it is (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--offset", type=int, default=0, help="the first residue is number 1 + OFFSET (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="CSV file; a picture goes beside it, as .png")


def _add_contacts(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--input", type=Path, required=True, metavar="FASTA")
    parser.add_argument("--head", type=Path, metavar="JSON", help="from contacts-fit (the model's own)")
    parser.add_argument("--maps", type=Path, metavar="DIR", help="known contacts, ID.npy, to tell the precision by")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="takes ID.csv and ID.png of each")


def _add_fit(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--input", type=Path, required=True, metavar="FASTA", help="some twenty proteins are enough")
    parser.add_argument(
        "--maps", type=Path, required=True, metavar="DIR",
        help="ID.npy of each: [n, n], 1 for C-beta atoms less than 8 A apart, 0 for others, nan for unknown",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")


def _add_map(parser: ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, help=".npz with id and embeddings, or FASTA with --model")
    _add_model(parser, required=False)
    parser.add_argument("--pooling", default="mean", choices=["mean", "begin"], help="of FASTA (%(default)s)")
    parser.add_argument("--method", default="umap", choices=["umap", "pca"], help="%(default)s")
    parser.add_argument("--neighbors", type=int, default=15, help="umap: how many count (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="umap: of what is drawn (%(default)s)")
    parser.add_argument("--color", help="column of --table, array of the .npz, or key of the headers (Tax=...)")
    parser.add_argument("--table", type=Path, metavar="CSV", help="with a column id")
    parser.add_argument("--output", type=Path, required=True, help="CSV file; a picture goes beside it, as .png")


def _add_label(parser: ArgumentParser) -> None:
    parser.add_argument("--head", type=Path, required=True, metavar="FILE", help="RUN/head.safetensors")
    _add_model(parser, required=False, told="(the one that the head was trained on)")
    parser.add_argument("--input", type=Path, required=True, metavar="FASTA")
    parser.add_argument("--output", type=Path, required=True, metavar="CSV", help="id, answer, of classes probability")
