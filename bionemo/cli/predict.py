# SPDX-License-Identifier: Apache-2.0
"""Compute outputs of a trained model for files: embeddings, hiddens, logits, pseudo-perplexities, molecules.

bionemo predict esm2.nemo model.data.dataset_path=x.fasta
"""

from pathlib import Path

from bionemo.cli.command import run
from bionemo.cli.help import CommandSpec
from bionemo.common.errors import HostError, RankError, UserError, reraise_as
from bionemo.common.launcher_environment import launched_process
from bionemo.common.limits import check_address_space
from bionemo.common.lock import run_lock
from bionemo.common.redaction import redact_text
from bionemo.config.schema import InferConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.inference.array_descriptions import ARRAY_DESCRIPTIONS
from bionemo.launch.spawn import LAUNCHER

_DESCRIPTION = """\
Computes outputs of a trained model for the sequences of FASTA, CSV or SMILES files. An interrupted prediction
continues when the same command is run again.

arrays in .npz and .h5 files; .parquet and .csv files have a row for each sequence
""" + "\n".join(f"  {name:18} {text}" for name, text in ARRAY_DESCRIPTIONS.items())
_SPEC = CommandSpec(
    schema=InferConfig,
    description=_DESCRIPTION,
    example="model.data.batch_size=64",
    has_groups=False,
    examples=(
        "esm2.nemo model.data.dataset_path=x.fasta model.data.output_fname=x.npz",
        "... model.downstream_task.outputs=[embeddings,hiddens] model.data.output_fname=x.h5 trainer.devices=8",
        "... model.data.dataset_path='x[000..049].csv' model.data.data_fields_map.sequence=protein",
        "... model.downstream_task.outputs=[pseudo_perplexity] model.data.output_fname=x.csv",
        "... model.downstream_task.outputs=[samples] model.downstream_task.sampling.num_samples=10 "
        "model.data.output_fname=x.csv",
    ),
    model_key="model.downstream_task.restore_from_path",
)


def main(config_name: str = "predict", config_dir: str | Path | None = None) -> None:
    """Run `bionemo predict`."""
    run(predict, config_name, config_dir, _SPEC)


def predict(cfg: InferConfig) -> None:
    """Compute the parts of the input in `trainer.devices` processes, and merge them into the output file.

    Raises:
        UserError: if the model, the input or the output cannot be used.
    """
    from bionemo.experiment.console_logging import log_to_console, silence_dependencies

    check_address_space()
    silence_dependencies()
    import torch

    from bionemo.inference import predict_files
    from bionemo.inference.fingerprint import prediction_fingerprint
    from bionemo.inference.generation import decodings
    from bionemo.inference.input_records import Records, find_files
    from bionemo.inference.load import load
    from bionemo.inference.processes import compute_first_rank, compute_other_rank
    from bionemo.tokenizers import Alphabet, SmilesTokenizer

    log_to_console()
    task, data, process = cfg.model.downstream_task, cfg.model.data, launched_process()
    # Process 0 loads the model before it starts workers, so it cannot report their errors: each worker prints its own.
    error_class = RankError if process is not None and process.launcher == LAUNCHER else HostError
    with reraise_as(error_class):
        timeout = duration_in_seconds("trainer.rank_timeout", cfg.trainer.rank_timeout)
        gpus = 0 if cfg.trainer.accelerator == "cpu" else torch.cuda.device_count()
        devices = _count_devices(cfg, gpus)
        rank, local_rank = _ranks(cfg, devices)
        processes = devices if process is None else 1  # that this process starts, including itself
        if processes > 1 and not gpus:
            torch.set_num_threads(max(torch.get_num_threads() // processes, 1))

        decodings(task)  # checks the settings before any file is read
        find_files(data)  # before the model is loaded, which takes longer
        precision = str(cfg.trainer.precision)
        model = load(task.restore_from_path, f"cuda:{local_rank}" if gpus else "cpu", precision, data.max_length)
        model.check_outputs(task.outputs)
        vocabulary = model.network.vocabulary
        is_known = isinstance(vocabulary, Alphabet | SmilesTokenizer)
        records = Records(data, isinstance(vocabulary, Alphabet) if is_known else None)
        identity = prediction_fingerprint(task, data, precision, records.paths, model)
        prediction = predict_files.Prediction(records, task, data, identity, model)
    ranks, output = cfg.trainer.num_nodes * devices, prediction.output
    if rank:
        compute_other_rank(prediction, rank, ranks, timeout, error_class)
        return
    with run_lock(output.parent, f".{output.name}.lock"):
        predict_files.prepare_directory(prediction)
        predict_files.note_letters(prediction)
        try:
            compute_first_rank(prediction, output.name, ranks, processes, timeout)
        except (Exception, SystemExit):
            predict_files.remove_empty_directory(prediction)
            raise
        print(redact_text("\n".join(predict_files.merge_parts(prediction))))


def _ranks(cfg: InferConfig, devices: int) -> tuple[int, int]:
    """Return the global and the local rank of this process."""
    process = launched_process()
    if process is not None:
        process.check(cfg.trainer.num_nodes, devices)
        return process.rank, process.local_rank
    if cfg.trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}, but no launcher started this process: start it on all "
            "nodes with torchrun, srun, mpirun or bcprun"
        )
    return 0, 0


def _count_devices(cfg: InferConfig, gpus: int) -> int:
    """Return the number of devices of this machine that are used."""
    configured = cfg.trainer.devices
    if cfg.trainer.accelerator in ("gpu", "cuda") and not gpus:
        raise UserError(
            f"trainer.accelerator={cfg.trainer.accelerator}, but no GPU is usable here: set it to auto or cpu"
        )
    if configured in ("auto", -1, "-1"):
        return max(gpus, 1)
    count = int(configured) if str(configured).isdecimal() else 0
    if count < 1 or (gpus and count > gpus):
        available = f"{gpus or 1} {'device is' if gpus < 2 else 'devices are'} available"
        raise UserError(f"trainer.devices={configured}, but {available}: set it to at most {gpus or 1}, or to auto")
    return count
