# SPDX-License-Identifier: Apache-2.0
"""What a trained model makes of the sequences in a file: embeddings, hiddens, logits, pseudo-perplexities, molecules.

python -m bionemo.predict model.downstream_task.restore_from_path=esm2.nemo model.data.dataset_path=x.fasta
"""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bionemo.common.errors import HostError, RankError, UserError, raised_as
from bionemo.common.launcher_environment import this_process
from bionemo.common.lock import run_lock
from bionemo.common.redaction import redact_text
from bionemo.config import run
from bionemo.config.durations import seconds
from bionemo.config.help import Topic
from bionemo.config.schema import InferConfig
from bionemo.launch.spawn import started_again

if TYPE_CHECKING:  # imported when the command line is known to be right
    from bionemo.inference.model import TrainedModel
    from bionemo.inference.predict_files import Prediction

_TOPIC = Topic(
    InferConfig,
    "model.data.batch_size=64",
    False,
    (
        "model.downstream_task.restore_from_path=esm2.nemo model.data.dataset_path=x.fasta "
        "model.data.output_fname=x.npz",
        "... model.downstream_task.outputs=[embeddings,hiddens] model.data.output_fname=x.h5 trainer.devices=8",
        "... model.data.dataset_path='x[000..049].csv' model.data.data_fields_map.sequence=protein",
        "... model.downstream_task.outputs=[pseudo_perplexity] model.data.output_fname=x.csv",
        "... model.downstream_task.outputs=[samples] model.downstream_task.sampling.num_samples=10 "
        "model.data.output_fname=x.csv",
        "Stopped, the same command goes on from what is there.",
    ),
)


def main(config_name: str = "predict", config_dir: str | Path | None = None) -> None:
    """Compose the configuration that the command line describes, then do what it asks for."""
    run(predict, config_name, config_dir, _TOPIC)


def predict(cfg: InferConfig) -> None:
    """Compute parts of the input, in as many processes as asked for, and put them together.

    Raises:
        UserError: for a model, input or output that cannot be used.
    """
    from bionemo.interop.quiet import our_messages_to_console, quiet_dependencies

    quiet_dependencies()
    import torch

    from bionemo.inference.generation import ways
    from bionemo.inference.identity import of_prediction
    from bionemo.inference.load import load
    from bionemo.inference.predict_files import Prediction
    from bionemo.inference.records import Records

    our_messages_to_console()
    task, data = cfg.model.downstream_task, cfg.model.data
    with raised_as(HostError):
        patience = seconds("trainer.rank_timeout", cfg.trainer.rank_timeout)
        gpus = 0 if cfg.trainer.accelerator == "cpu" else torch.cuda.device_count()
        devices = _devices(cfg, gpus)
        rank, local = _place(cfg, devices)
        ours = devices if this_process() is None else 1  # processes that this one has to start, itself included
        if ours > 1 and not gpus:
            torch.set_num_threads(max(torch.get_num_threads() // ours, 1))

        ways(task)  # a mistake in them is told before anything is read
        records, precision = Records(data), str(cfg.trainer.precision)
        model = load(task.restore_from_path, f"cuda:{local}" if gpus else "cpu", precision)
        model.see_that_it_has(task.outputs)
        prediction = Prediction(records, task, data, of_prediction(task, data, precision, records.paths, model))
    ranks = cfg.trainer.num_nodes * devices
    output = Path(data.output_fname)
    alone = run_lock(output.absolute().parent, f".{output.name}.lock") if rank == 0 else nullcontext()
    with alone:
        _compute(prediction, model, rank, ranks, ours, patience)


def _compute(
    prediction: "Prediction", model: "TrainedModel", rank: int, ranks: int, ours: int, patience: float
) -> None:
    """Compute this process's parts; rank 0 also creates their directory and puts them together."""
    from bionemo.inference.predict_files import abandon, await_parts, begin, compute_parts, finish, follow
    from bionemo.inference.progress import progress

    if rank == 0:
        begin(prediction, model)
    else:
        with raised_as(HostError):
            follow(prediction, patience)
    try:
        with started_again(ours) as see_that_none_has_failed:
            with progress(prediction.output.name, len(prediction.records), "sequences", shown=rank == 0) as advance:

                def done(count: int) -> None:
                    see_that_none_has_failed()
                    advance(count * ranks)  # this process's share stands for all

                with raised_as(RankError) if rank else nullcontext():
                    compute_parts(prediction, model, rank, ranks, done)
            if rank:
                return
            await_parts(prediction, patience, see_that_none_has_failed)
    except Exception:
        if rank == 0:
            abandon(prediction)
        raise
    print(redact_text("\n".join(finish(prediction))))


def _place(cfg: InferConfig, devices: int) -> tuple[int, int]:
    """Numbers of this process: among all, and on its machine.

    Raises:
        UserError: when a launcher has started other numbers of them, or none has for several machines.
    """
    process = this_process()
    if process is not None:
        process.check(cfg.trainer.num_nodes, devices)
        return process.rank, process.local_rank
    if cfg.trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}, but no launcher has started this process: start it on all of "
            "them by torchrun, srun, mpirun or bcprun"
        )
    return 0, 0


def _devices(cfg: InferConfig, gpus: int) -> int:
    """Of this machine that are used.

    Raises:
        UserError: when there are fewer.
    """
    asked = cfg.trainer.devices
    if cfg.trainer.accelerator in ("gpu", "cuda") and not gpus:
        raise UserError(
            f"trainer.accelerator={cfg.trainer.accelerator}, but no GPU is usable here: set it to auto or cpu"
        )
    if asked in ("auto", -1, "-1"):
        return max(gpus, 1)
    count = int(asked) if str(asked).isdecimal() else 0
    if count < 1 or (gpus and count > gpus):
        raise UserError(f"trainer.devices={asked}, but there are {max(gpus, 1)}: give a number of these, or auto")
    return count
