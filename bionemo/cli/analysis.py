# SPDX-License-Identifier: Apache-2.0
"""Analyze proteins with a trained model: scores of variants, contacts, maps of embeddings, labels of a trained head.

Imports that load torch are in functions: `--help` must be fast.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.common.limits import check_address_space
from bionemo.config.model_argument import HELP, split_model

_DESCRIPTION = "Analyze proteins with a trained model: effects of mutations, contacts, maps of embeddings, labels."
_EXAMPLES = """\
examples
  bionemo analysis variants esm2.nemo --sequence wild_type.fasta \\
      --variants measured.csv --column mutant --score-column DMS_score --output scores.csv
  bionemo analysis variants esm2.nemo --variants P62593_variants.fasta --output scores.csv
  bionemo analysis variants esm2.nemo --sequence MKTAYIAKQR --scan --output scan.csv
  bionemo analysis contacts esm2-hf --input proteins.fasta --output contacts
  bionemo analysis contacts-fit esm2.nemo --input known.fasta --maps maps --output head.json
  bionemo analysis contacts esm2.nemo --head head.json --input proteins.fasta --output contacts
  bionemo analysis map --input embeddings.npz --output map.csv
  bionemo analysis map esm2.nemo --input proteins.fasta --color Tax --output map.svg
"""
_NEEDS_NO_MODEL = ("map", "label")  # of embeddings; with the model of the head
_ABOUT = {  # texts in the help of a command
    "variants": """\
Input: a CSV file with a header and a column of substitutions; several of them are separated by colons:
  variant,score
  A24G,0.91
  A24G:K30R,0.35
HGVS notation is read too: p.Ala24Gly, p.[Ala24Gly;Lys30Arg]. Variants that are no substitutions get no score.

Output: all columns, and zero_shot, the sum over substitutions of log p(new residue) - log p(residue of the wild type).
A positive zero_shot means that the model prefers the variant to the wild type. If there are measured scores, the rank
correlation is printed.
""",
    "contacts": """\
The model needs a contact head: that of a Hugging Face directory of ESM-1b, ESM-1v or ESM-2, or one that
`bionemo analysis contacts-fit` has fitted to proteins of known structure (--head).
""",
}


def main() -> None:
    """Run `bionemo analysis`."""
    with one_line_errors():
        options = _parse(_parser())
        from bionemo.experiment.console_logging import log_to_console, silence_dependencies

        check_address_space()
        log_to_console()
        silence_dependencies()
        from bionemo.cli import analysis_commands

        silence_dependencies()  # some libraries have installed their handlers during the import
        run: dict[str, Callable[[Namespace], None]] = {
            "variants": analysis_commands.run_scan if options.scan else analysis_commands.run_variants,
            "contacts": analysis_commands.run_contacts,
            "contacts-fit": analysis_commands.run_contacts_fit,
            "map": analysis_commands.run_map,
            "label": analysis_commands.run_label,
        }
        run[options.command](options)


def _parse(parser: ArgumentParser) -> Namespace:
    """Return the options. argparse would not find an optional MODEL between other options, so it is read here."""
    options, words = parser.parse_known_args(namespace=Namespace(scan=False))
    unknown = [word for word in words if word.startswith("-")]
    model, others = (None, []) if unknown else split_model(words)
    if unknown + others:
        parser.error(f"unrecognized arguments: {' '.join(unknown + others)}")
    if model and options.model:
        parser.error(f"MODEL and --model are given: omit --model {options.model}")
    if not (model or options.model) and options.command not in _NEEDS_NO_MODEL:
        parser.error("the following arguments are required: MODEL")
    if options.command == "variants" and options.scan == (options.variants is not None):
        raise UserError("give either --variants FILE or --scan")
    options.model = model or options.model
    return options


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo analysis", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    def add_command(name: str, description: str, model: str = "") -> Callable[..., Any]:
        command = commands.add_parser(
            name, help=description, prog=f"bionemo analysis {name} {'[MODEL]' if model else 'MODEL'}",
            description=f"{description[0].upper()}{description[1:]}. MODEL: {HELP} {model}".strip(),
            epilog=_ABOUT.get(name), formatter_class=RawDescriptionHelpFormatter,
        )  # fmt: skip
        add = command.add_argument
        add("--model", metavar="MODEL", help="former spelling of MODEL")
        add("--device", help="device such as cpu or cuda:1 (default: the first GPU if there is one)")
        add(
            "--precision", default="32", choices=["32", "bf16-mixed", "16-mixed"],
            help="precision of matrix products (%(default)s)",
        )  # fmt: skip
        add(
            "--max-length", type=int, metavar="TOKENS",
            help="maximum length of a sequence with begin and end tokens, if longer than in training (rotary models)",
        )  # fmt: skip
        add("--overwrite", action="store_true", help="replace existing output files")
        return add

    table_help = (
        "CSV file, with a plot beside it as .png; or the plot, .png, .svg or .pdf, with the CSV file beside it"
    )
    add = add_command("variants", "score variants of a protein without measurements")
    add("--sequence", help="wild type: a FASTA file, or its letters")
    add("--variants", type=Path, metavar="FILE", help="CSV file, or FASTA with headers such as >2810|name_R63P|0.873")
    add("--scan", action="store_true", help="score every substitution at every position instead")
    add("--column", default="variant", help="column of the variants, such as A24G:K30R (%(default)s)")
    add("--score-column", help="column of measured scores (default: score, if it exists)")
    add(
        "--method", default="masked-marginal", choices=["masked-marginal", "wild-type-marginal"],
        help="mask each mutated residue, or compute the unmasked wild type once (%(default)s)",
    )  # fmt: skip
    add("--offset", type=int, default=0, help="the first residue has the number 1 + OFFSET (%(default)s)")
    add("--output", type=Path, required=True, help=table_help)

    add = add_command("contacts", "predict contacts between residues")
    add("--input", dest="input_path", type=Path, required=True, metavar="FASTA")
    add("--head", type=Path, metavar="JSON", help="head from contacts-fit (default: the head of the model)")
    add("--maps", type=Path, metavar="DIR", help="known contacts, ID.npy; prints the precision")
    add("--output", type=Path, required=True, metavar="DIR", help="directory for ID.csv and ID.png of each protein")

    add = add_command("contacts-fit", "fit a contact head to proteins of known structure")
    add("--input", dest="input_path", type=Path, required=True, metavar="FASTA", help="about twenty proteins suffice")
    add(
        "--maps", type=Path, required=True, metavar="DIR",
        help="ID.npy for each protein: [n, n], 1 for C-beta atoms less than 8 A apart, 0 for others, nan if unknown",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="JSON")

    add = add_command("map", "project embeddings of many sequences to two dimensions", "(for FASTA input)")
    add("--input", dest="input_path", type=Path, required=True, metavar="INPUT",
        help="file with id and embeddings (.npz, .h5, .parquet), or a data set per id (.h5), or FASTA with MODEL",
        )  # fmt: skip
    add("--pooling", default="mean", choices=["mean", "begin"], help="pooling of FASTA input (%(default)s)")
    add(
        "--method",
        default="pca",
        choices=["pca", "umap"],
        help="principal components, or UMAP, which is slower (%(default)s)",
    )
    add("--neighbors", type=int, default=15, help="number of neighbors of each sequence (umap, %(default)s)")
    add("--seed", type=int, default=0, help="random seed (umap, %(default)s)")
    add("--color", help="column of --table or .parquet, array of the .npz or .h5, or key of the headers (Tax=...)")
    add("--table", type=Path, metavar="CSV", help="table with a column id")
    add("--output", type=Path, required=True, help=f"{table_help}; or .h5ad for scanpy")

    add = add_command(
        "label", "predict labels with a head from `bionemo finetune`", "(default: the model of the head's training)"
    )
    add(
        "--head",
        type=Path,
        required=True,
        metavar="FILE",
        help="RUN/head.safetensors, or the directory of an EsmForTokenClassification",
    )
    add("--input", dest="input_path", type=Path, required=True, metavar="FILE", help="FASTA, CSV, or .smi")
    add(
        "--on-invalid", default="skip", choices=["skip", "keep", "error"],
        help="SMILES that RDKit cannot parse, or without a known token: omit them, label them, or stop (%(default)s)",
    )  # fmt: skip
    table = "table with the columns id, prediction and, for classes, probability"
    add("--output", type=Path, required=True, metavar="CSV", help=table)
    return parser
