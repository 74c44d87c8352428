# SPDX-License-Identifier: Apache-2.0
"""Evaluate a trained model on a suite of tasks, compare evaluations, and average published results.

Imports that load torch are in functions: `--help` must be fast.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import HostError, RankError, UserError, reraise_as
from bionemo.common.launcher_environment import launched_process
from bionemo.common.limits import check_address_space
from bionemo.config.model_argument import HELP, model_word
from bionemo.launch.spawn import LAUNCHER

_TIMEOUT = 600.0  # seconds until the first process must have created the output directory
_SETTINGS = ("method", "window", "fine_tuning")  # options that are settings of a suite
_EXAMPLES = """\
examples
  bionemo evaluate esm2.nemo --suite proteingym --data ProteinGym --output results/esm2
  bionemo evaluate esm2-hf --suite proteingym --data ProteinGym --output results/esm2-hf --devices 8
  bionemo evaluate esm2.nemo --suite flip --data FLIP --output results/flip --fine-tuning
  bionemo evaluate compare results/esm2 results/esm2-hf --output comparison.html
  bionemo evaluate average ProteinGym/DMS_substitutions_Spearman_DMS_level.csv --models "ESM2 (650M)" ESM-1b

An interrupted evaluation continues when the same command is run again.
"""


def main() -> None:
    """Run `bionemo evaluate`."""
    commands = {"average": _average, "compare": _compare}
    with one_line_errors():
        if (name := sys.argv[1:2]) and name[0] in commands:
            commands[name[0]]()
        else:
            evaluate(_parser().parse_args())


def evaluate(options: Namespace) -> None:
    """Run the tasks of a suite in `devices` processes, and write the report.

    Raises:
        UserError: if the model, the data or the output cannot be used.
    """
    from bionemo.experiment.console_logging import log_to_console, silence_dependencies

    check_address_space()
    log_to_console()
    silence_dependencies()
    import torch

    from bionemo.evaluation.evaluate import run_first_process
    from bionemo.evaluation.report import describe_report
    from bionemo.evaluation.runner import Results
    from bionemo.evaluation.suites import open_suite
    from bionemo.inference.load import load
    from bionemo.inference.processes import compute_other_rank
    from bionemo.megatron.gpu import use_gpu

    silence_dependencies()  # some libraries have installed their handlers during the import
    process = launched_process()
    # Process 0 loads the model before it starts workers, so it cannot report their errors: each worker prints its own.
    error_class = RankError if process is not None and process.launcher == LAUNCHER else HostError
    with reraise_as(error_class):
        gpus = torch.cuda.device_count() if options.device is None and use_gpu("auto") else 0
        rank, ranks, local_rank, processes = _place(options.devices, gpus)
        if processes > 1 and not gpus:
            torch.set_num_threads(max(torch.get_num_threads() // processes, 1))
        settings = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
        suite = open_suite(options.suite, options.data, settings)
        model = load(
            options.model, f"cuda:{local_rank}" if gpus else options.device, options.precision, options.max_length
        )
        results = Results(suite, model, options.output, options.keep_going)
    if rank:
        compute_other_rank(results, rank, ranks, _TIMEOUT, error_class)
    else:
        report = run_first_process(results, model, suite, processes, ranks)
        print("\n".join(describe_report(report, results.directory)))


def _place(devices: int | None, gpus: int) -> tuple[int, int, int, int]:
    """Return rank, number of ranks, local rank, and the number of processes that this one starts, including itself."""
    process = launched_process()
    if process is not None:
        if process.world_size is None:
            raise UserError(f"{process.launcher} does not set the number of processes: set WORLD_SIZE")
        if gpus:
            process.check_gpu(gpus)
        return process.rank, process.world_size, process.local_rank, 1
    processes = devices or max(gpus, 1)
    if processes < 1 or (gpus and processes > gpus):
        raise UserError(f"--devices={processes}: expected a number from 1 to {gpus or 'the number of cores'}")
    return 0, processes, 0, processes


def _compare() -> None:
    """Write a page that compares evaluations."""
    parser = ArgumentParser("bionemo evaluate compare", description="Compare evaluations on one HTML page.")
    parser.add_argument("results", type=Path, nargs="+", metavar="DIR", help="output of `bionemo evaluate`")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="page to write")
    options = parser.parse_args(sys.argv[2:])
    from bionemo.evaluation.html import write_page
    from bionemo.evaluation.report import read_report, render_reports

    names = [directory.resolve().name for directory in options.results]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in options.results]
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise UserError(f"--output={options.output}: name a file in an existing directory")
    reports = {name: read_report(path) for name, path in zip(names, options.results, strict=True)}
    write_page(options.output, render_reports(reports))


def _average() -> None:
    """Print the averages of published results."""
    parser = ArgumentParser(
        "bionemo evaluate average",
        description="Average published results over assays as ProteinGym does. The number after +- is the standard "
        "error of the average; ProteinGym publishes that of the difference to the best model.",
    )
    parser.add_argument("file", type=Path, help="table of ProteinGym with a row per assay and a column per model")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="columns (default: all)")
    options = parser.parse_args(sys.argv[2:])
    from bionemo.evaluation.proteingym_files import average_assays, read_published

    assays, published = read_published(options.file)
    for name in options.models or published:
        if name not in published:
            raise UserError(f"{options.file} has no model {name!r}: choose some of {', '.join(published)}")
    rows = {name: average_assays(published[name], assays) for name in options.models or published}
    width = max(map(len, rows))
    for name, averages in sorted(rows.items(), key=lambda row: -row[1].overall):
        parts = {**averages.selection, **averages.depth, **averages.taxon}
        more = "  ".join(f"{key} {value:.3f}" for key, value in parts.items())
        print(f"{name:{width}}  {averages.overall:.4f} +- {averages.error:.4f}  {more}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo evaluate", description="Evaluate a model; write report.json and report.html.", epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("model", type=model_word, metavar="MODEL", help=HELP)
    add(
        "--suite", required=True, choices=["proteingym", "flip", "contacts", "loss", "moleculenet"],
        help="proteingym: effects of mutations; flip: labelled proteins; contacts: contacts between residues of "
        "structures; loss: loss on held-out proteins; moleculenet: labelled molecules",
    )  # fmt: skip
    add("--data", type=Path, required=True, help="directory or file with the data of the suite")
    add("--output", type=Path, required=True, metavar="DIR", help="directory for the results")
    add(
        "--method", metavar="NAME",
        help="proteingym: masked-marginal (default), wild-type-marginal or pseudo-perplexity; loss: masked as in "
        "pretraining (default), or pseudo-perplexity",
    )  # fmt: skip
    add(
        "--window", choices=["optimal", "overlapping"],
        help="proteingym: windows of proteins that are longer than the model (optimal)",
    )  # fmt: skip
    add("--fine-tuning", action="store_true", default=None, help="flip, moleculenet: also fine-tune the whole model")
    add("--devices", type=int, metavar="N", help="number of processes (default: one for each GPU, or one)")
    add("--device", help="device such as cpu (default: GPUs if there are any)")
    add(
        "--precision", default="32", choices=["32", "bf16-mixed", "16-mixed"],
        help="precision of matrix products (%(default)s)",
    )  # fmt: skip
    add(
        "--max-length", type=int, metavar="TOKENS",
        help="maximum length of a sequence with begin and end tokens, if longer than in training (rotary models)",
    )  # fmt: skip
    add("--keep-going", action="store_true", help="leave out faulty rows and tasks, and count them")
    return parser


if __name__ == "__main__":  # a worker, started by launch/spawn.py
    main()
