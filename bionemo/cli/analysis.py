# SPDX-License-Identifier: Apache-2.0
"""Analyze proteins with a trained model: scores of variants, contacts, maps of embeddings, labels of a trained head.

Imports that load torch are in functions: `--help` must be fast.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bionemo.common.console import notify, one_line_errors
from bionemo.common.errors import UserError, shorten
from bionemo.common.limits import check_address_space
from bionemo.config.model_argument import HELP, split_model

if TYPE_CHECKING:
    from bionemo.inference.model import TrainedModel

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
  bionemo analysis map esm2.nemo --input proteins.fasta --method pca --color Tax --output map.csv
"""
_NEEDS_NO_MODEL = ("map", "label")  # of embeddings; with the model of the head
_ABOUT = {  # texts in the help of a command
    "variants": """\
Input: a CSV file with a header and a column of substitutions; several of them are separated by colons:
  variant,score
  A24G,0.91
  A24G:K30R,0.35

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
        from bionemo.interop.console_logging import log_to_console, silence_dependencies

        check_address_space()
        log_to_console()
        silence_dependencies()
        from bionemo.inference.analysis import commands

        silence_dependencies()  # some libraries have installed their handlers during the import
        name, path = options.pop("command"), options.pop("model")
        load = partial(_load, **{key: options.pop(key) for key in ("device", "precision", "max_length")})
        load_model = partial(load, path) if path else None
        run: dict[str, Callable[..., None]] = {
            "contacts": commands.run_contacts, "contacts-fit": commands.run_contacts_fit, "map": commands.run_map,
        }  # fmt: skip
        if name == "label":
            _label(load, path, **options)
        elif name == "variants":
            _variants(load_model, **options)
        else:
            run[name](load_model, **options)


def _parse(parser: ArgumentParser) -> dict[str, Any]:
    """Return the options. argparse would not find an optional MODEL between other options, so it is read here."""
    found, words = parser.parse_known_args()
    options = vars(found)
    unknown = [word for word in words if word.startswith("-")]
    model, others = (None, []) if unknown else split_model(words)
    if unknown + others:
        parser.error(f"unrecognized arguments: {' '.join(unknown + others)}")
    if model and options["model"]:
        parser.error(f"MODEL and --model are given: omit --model {options['model']}")
    model = model or options["model"]
    if not model and options["command"] not in _NEEDS_NO_MODEL:
        parser.error("the following arguments are required: MODEL")
    return options | {"model": Path(model) if model else None}


def _load(path: Path, device: str | None, precision: str, max_length: int | None) -> "TrainedModel":
    from bionemo.inference.load import load

    return load(path, device, precision, max_length)


def _variants(load_model: Any, scan: bool, variants: Path | None, **options: Any) -> None:
    from bionemo.inference.analysis.commands import run_scan, run_variants

    if scan == (variants is not None):
        raise UserError("give either --variants FILE or --scan")
    if variants is not None:
        run_variants(load_model, variants=variants, **options)
    else:
        run_scan(load_model, **{key: value for key, value in options.items() if key not in ("column", "score_column")})


def _label(
    load: Callable[[Path], "TrainedModel"], path: Path | None, head: Path, input_path: Path, output: Path,
    overwrite: bool, on_invalid: str,
) -> None:  # fmt: skip
    """Apply the head of a fine-tuning run to new sequences. It is here because inference may not import finetuning."""
    from bionemo.data.molecules.content_checks import report_unusable
    from bionemo.finetuning.load_head import check_encoder, predict_labels, read_records, read_trained_head
    from bionemo.inference.analysis.commands import EMBEDDING_BATCH
    from bionemo.inference.analysis.files import refuse_existing, staged_file, write_table
    from bionemo.inference.invalid_molecules import find_invalid
    from bionemo.inference.progress import progress_bar
    from bionemo.tokenizers import SmilesTokenizer

    refuse_existing([output], overwrite, [input_path])
    trained, (ids, sequences) = read_trained_head(head), read_records(input_path)
    with staged_file(output) as file:
        try:
            model, rows = load(path or trained.encoder), []
        except UserError as error:
            remedy = "" if path else f"; {head} was trained with this model: give another MODEL"
            raise UserError(f"{error}{remedy}") from error
        check_encoder(trained, model.path, model.weights_checksum)
        unusable = find_invalid(model.network, sequences)
        for problem, numbers in unusable.items():
            name = f"record {numbers[0]:,}, {shorten(sequences[numbers[0]])}"
            notify(report_unusable(f"{input_path}", problem, len(numbers), len(ids), name, on_invalid, "--on-invalid"))
        if unusable and on_invalid == "skip":
            kept = sorted({*range(len(ids))}.difference(*unusable.values()))
            ids, sequences = [ids[number] for number in kept], [sequences[number] for number in kept]
            if not ids:
                raise UserError(f"{input_path}: no SMILES is left: correct them, or use --on-invalid=keep")
        # Errors before anything is computed. Molecules are truncated as in training; proteins have --max-length.
        is_molecules = isinstance(model.network.vocabulary, SmilesTokenizer)
        tokens = model.ids(sequences, [f"{input_path}: {name}" for name in ids], truncate=is_molecules)
        with progress_bar("predicting", len(ids), "sequences") as advance:
            for first in range(0, len(ids), EMBEDDING_BATCH):
                batch = slice(first, first + EMBEDDING_BATCH)
                labels = predict_labels(model, trained, tokens[batch])
                rows += [[name, *label] for name, label in zip(ids[batch], labels, strict=True)]
                advance(len(labels))
        columns = ["id", "prediction", "probability"]
        used = 3 if any(row[2] for row in rows) else 2
        write_table(file, columns[:used], [row[:used] for row in rows])
    print(f"{len(rows):,} sequences: {output}")


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

    table_help = "CSV file; a plot is written beside it as .png"
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
        help=".npz or .h5 with id and embeddings, .h5 with a data set for each id, or FASTA with MODEL")  # fmt: skip
    add("--pooling", default="mean", choices=["mean", "begin"], help="pooling of FASTA input (%(default)s)")
    add("--method", default="umap", choices=["umap", "pca"], help="%(default)s")
    add("--neighbors", type=int, default=15, help="number of neighbors of each sequence (umap, %(default)s)")
    add("--seed", type=int, default=0, help="random seed (umap, %(default)s)")
    add("--color", help="column of --table, array of the .npz, or key of the headers (Tax=...)")
    add("--table", type=Path, metavar="CSV", help="table with a column id")
    add("--output", type=Path, required=True, help=table_help)

    add = add_command(
        "label", "predict labels with a head from `bionemo finetune`", "(default: the model of the head's training)"
    )
    add("--head", type=Path, required=True, metavar="FILE", help="RUN/head.safetensors")
    add("--input", dest="input_path", type=Path, required=True, metavar="FILE", help="FASTA, CSV, or .smi")
    add(
        "--on-invalid", default="skip", choices=["skip", "keep", "error"],
        help="SMILES that RDKit cannot parse, or without a known token: omit them, label them, or stop (%(default)s)",
    )  # fmt: skip
    table = "table with the columns id, prediction and, for classes, probability"
    add("--output", type=Path, required=True, metavar="CSV", help=table)
    return parser
