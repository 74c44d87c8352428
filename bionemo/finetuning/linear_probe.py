# SPDX-License-Identifier: Apache-2.0
"""Linear probe: train a head on the features of a frozen encoder, in seconds instead of hours.

Shapes: R rows, C outputs, see `Head`.
"""

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bionemo.analysis.files import read_sequence
from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.config.schema import DownstreamConfig, OptimConfig
from bionemo.experiment.nemo import make_directories
from bionemo.finetuning import metrics
from bionemo.finetuning.features import Features, compute_features, iterate_batches
from bionemo.finetuning.heads import Head, head_factory
from bionemo.finetuning.labels import is_labelled
from bionemo.finetuning.results import (
    Results,
    check_results,
    describe_data,
    print_line,
    run_fingerprint,
    write_results,
)
from bionemo.finetuning.task_data import describe_truncation, read_splits
from bionemo.inference.batching import BatchLimits, max_tokens
from bionemo.inference.fingerprint import model_fingerprint
from bionemo.inference.load import build_network, load_network, open_saved_model
from bionemo.inference.progress import progress_bar
from bionemo.megatron.gpu import use_gpu
from bionemo.training.schedules import build_schedule

log = logging.getLogger(__name__)
_EVALUATION_BATCH = 256  # sequences


@dataclass(frozen=True)
class ProbeConfig:
    """Training settings of a head."""

    epochs: int
    batch_size: int  # sequences per step
    shuffle: bool  # shuffle the sequences in every epoch
    seed: int  # seed of weights, order and dropout
    optim: OptimConfig
    clip: float | None = None  # maximum norm of the gradient; None: no limit


@dataclass
class TrainedProbe:
    """A head with its weights after the best epoch."""

    head: Head
    best: int = 0  # the epoch, from 1
    # `epoch`, `train_loss` and validation metrics of each epoch.
    history: list[dict[str, float]] = field(default_factory=list)


def run_linear_probe(cfg: DownstreamConfig, directory: Path) -> None:
    """Train a head on the features of a frozen encoder, test it and write the results.

    Raises:
        UserError: if the model or the data cannot be used, or the directory holds the results of another run.
        OSError: if a file cannot be written.
    """
    config, data = cfg.model, cfg.model.data
    if not cfg.trainer.max_epochs or cfg.trainer.max_epochs < 1:
        raise UserError(f"trainer.max_epochs={cfg.trainer.max_epochs}: expected 1 or more to train a head")
    path, saved = open_saved_model(str(config.restore_encoder_path))
    network = build_network(saved, path, config.seq_length)
    names = ["train", "val", *(["test"] if cfg.do_testing else [])]
    task = read_splits(data, "model.data", names, network.vocabulary)
    splits, classes, notes, _ = task
    notify(*notes)
    device = "cuda" if use_gpu(cfg.trainer.accelerator) else "cpu"
    model = load_network(network, saved, path, device, str(cfg.trainer.precision))
    identity = model_fingerprint(model.weights_checksum, network.config.max_position_embeddings, network.vocabulary)
    wild_type = None if data.wild_type is None else read_sequence(data.wild_type)
    fingerprint = run_fingerprint(cfg, identity, splits, wild_type)
    if check_results(directory, fingerprint):
        print_line(f"{cfg.name}: {directory} already contains the results of this run")
        return
    make_directories(directory)  # after the data and the model were checked
    limits = BatchLimits(sequences=data.emb_batch_size)
    features: dict[str, Features] = {}
    for name, split in splits.items():
        with progress_bar(f"embedding {name}", len(split.texts), "sequences") as advance:
            file = directory / f".features-{name}.npy"
            features[name], cut = compute_features(model, split, data.task_type, limits, file, advance, wild_type)
        file.unlink()  # it stays mapped
        if cut:
            notes.append(describe_truncation(name, cut, len(split.texts), max_tokens(network)))
            log.warning("%s", notes[-1])
    counts = ", ".join(f"{len(each):,} {name} ({each.count_labels():,} labels)" for name, each in features.items())
    print_line(f"{cfg.name}: {counts}")
    width = features["train"].vectors.shape[1]
    make_head = head_factory(config.downstream_task, data.task_type, width, len(classes))
    trained = train_head(
        make_head, features["train"], features["val"], probe_config(cfg, config.seed), model.device, _print_epoch
    )
    test = predict(trained.head, features["test"]) if "test" in features else None
    results = Results(
        model.path, model.weights_checksum, trained.head, trained.best, trained.history, test, splits.get("test"),
        max_tokens(network), fingerprint, describe_data(cfg, task),
    )  # fmt: skip
    write_results(results, cfg, directory, classes, wild_type)


def probe_config(cfg: DownstreamConfig, seed: int) -> ProbeConfig:
    """Return the training settings of a configuration with at least one epoch."""
    config = cfg.model
    assert cfg.trainer.max_epochs
    return ProbeConfig(
        cfg.trainer.max_epochs, config.micro_batch_size, config.data.shuffle, seed, config.finetuning_optim,
        cfg.trainer.gradient_clip_val,
    )  # fmt: skip


def _print_epoch(epoch_metrics: dict[str, float]) -> None:
    values = ", ".join(f"{name} {value:.4g}" for name, value in epoch_metrics.items() if name != "epoch")
    print_line(f"epoch {epoch_metrics['epoch']:.0f}  {values}")


def train_head(
    make_head: Callable[[], Head], data: Features, val: Features | None, config: ProbeConfig, device: torch.device,
    on_epoch: Callable[[dict[str, float]], object] = lambda epoch_metrics: None,
) -> TrainedProbe:  # fmt: skip
    """Train a new head and return it with the weights of the lowest validation loss, or the last ones without `val`.

    `make_head` creates a head with random weights; `on_epoch` is called with the loss and the metrics of each epoch.
    The state of the global random number generators is restored.

    Raises:
        UserError: if a loss or a weight is not finite.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(config.seed)
        head = make_head().to(device)
        head.fit_statistics(data.vectors, data.targets)
        return _train(head, data, val, config, on_epoch)


def _train(
    head: Head, data: Features, val: Features | None, config: ProbeConfig,
    on_epoch: Callable[[dict[str, float]], object],
) -> TrainedProbe:  # fmt: skip
    steps = config.epochs * math.ceil(len(data) / config.batch_size)
    optim = config.optim
    schedule = build_schedule(optim.sched, optim.lr, steps)
    optimizer_class = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    betas = (optim.betas[0], optim.betas[1])
    optimizer = optimizer_class(head.parameters(), optim.lr, betas, optim.eps, optim.weight_decay)
    device = next(head.parameters()).device
    result, lowest, step = TrainedProbe(head), math.inf, 0
    best_state = copy.deepcopy(head.state_dict())
    for epoch in range(1, config.epochs + 1):
        order = np.arange(len(data))
        if config.shuffle:
            order = np.random.default_rng([config.seed, epoch]).permutation(order)
        head.train()
        totals = torch.zeros(2, device=device)
        for sequences, batch in iterate_batches(data, config.batch_size, order):
            epochs = np.full(len(sequences), epoch, np.int64)
            bits = sample_keys(purpose_key(config.seed, "dropout"), epochs, sequences)
            keys = torch.from_numpy(bits.view(np.int64)).to(device)
            predictions, targets = _predict_batch(head, batch, device, keys)
            loss = metrics.summed_loss(predictions, targets, head.loss_scale)
            count = int(is_labelled(targets).sum())
            optimizer.zero_grad()
            (loss / max(count, 1)).backward()
            if config.clip is not None:
                nn.utils.clip_grad_norm_(head.parameters(), config.clip)
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            optimizer.step()
            step += 1
            totals += torch.stack((loss.detach(), loss.new_full((), count)))
        epoch_metrics = {"epoch": float(epoch), "train_loss": float(totals[0] / totals[1].clamp_min(1))}
        if val is not None:
            found = metrics.compute_metrics(*predict(head, val), ranking=False, scale=head.loss_scale)
            epoch_metrics |= {f"val_{name}": value for name, value in found.items()}
        if not math.isfinite(epoch_metrics["train_loss"] + epoch_metrics.get("val_loss", 0.0)):
            raise UserError(f"epoch {epoch}: the loss is not finite: lower the learning rate (optim.lr)")
        result.history.append(epoch_metrics)
        on_epoch(epoch_metrics)
        if val is None or epoch_metrics["val_loss"] < lowest:
            lowest, result.best = epoch_metrics.get("val_loss", math.inf), epoch
            best_state = copy.deepcopy(head.state_dict())
    head.load_state_dict(best_state)
    return result


def evaluate(head: Head, data: Features) -> dict[str, float]:
    """Return the mean loss and the metrics."""
    return metrics.compute_metrics(*predict(head, data), scale=head.loss_scale)


@torch.no_grad()
def predict(head: Head, data: Features) -> tuple[Tensor, Tensor]:
    """Return the predictions [R, C] and the targets, [R] of all rows with a label, or [R, C]."""
    device = next(head.parameters()).device
    head.eval()
    batches = iterate_batches(data, _EVALUATION_BATCH, np.arange(len(data)))
    predictions, targets = zip(*(_predict_batch(head, batch, device) for _, batch in batches), strict=True)
    return torch.cat(predictions), torch.cat(targets)


def _predict_batch(
    head: Head, batch: Features, device: torch.device, keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    arrays = (np.ascontiguousarray(each) for each in (batch.vectors, batch.targets))
    vectors, targets = (torch.from_numpy(array).to(device) for array in arrays)
    predictions = head(vectors, batch.lengths.tolist(), keys)
    if targets.ndim > 1:
        return predictions, targets
    labelled = is_labelled(targets)
    return predictions[labelled], targets[labelled]
