# SPDX-License-Identifier: Apache-2.0
"""Train a small model of each family on synthetic data, and compare the losses with recorded ones."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError


def main() -> None:
    """Run `bionemo certify`."""
    with one_line_errors():
        certify(_parser().parse_args())


def certify(options: Namespace) -> None:
    """Train all recipes with three seeds.

    Raises:
        UserError: if a loss is outside its band, or a run fails.
    """
    from bionemo.evaluation.certification import PAGE_NAME, RECIPES
    from bionemo.evaluation.certification import certify as train_and_compare

    differences = train_and_compare(options.output, options.recipes or list(RECIPES))
    page = options.output / PAGE_NAME
    if differences:
        raise UserError("; ".join(differences) + f" (see {page})")
    print(f"the losses of {', '.join(options.recipes or RECIPES)} are within their bands: {page}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo certify",
        description="Train a small model of each family on synthetic data with three seeds (about an hour on two "
        "cores), and fail if a validation loss is outside its recorded band.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for the runs")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="some of the families (default: all)")
    return parser
