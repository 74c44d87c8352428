# SPDX-License-Identifier: Apache-2.0
"""Suggest a learning rate for a wide model from short runs of a narrow one.

The narrow model has the depth, the head size, the data and the batches of the wide one. Its best learning rate is
multiplied by a power of the ratio of the hidden sizes. With it, an update changes the activations of both models by
about the same amount (Yang et al., "A spectral condition for feature learning", 2023, condition 1): in the spectral
norm, an update of a square matrix of n rows grows like n with AdamW, and like the square root of n with Muon.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.figures import new_figure, to_svg
from bionemo.common.files import create_owned, identity_of, write_atomic
from bionemo.config.schema import RunConfig
from bionemo.evaluation.html import html_page, html_table
from bionemo.evaluation.training_runs import pretrain
from bionemo.inference.fingerprint import digest
from bionemo.inference.progress import progress_bar
from bionemo.training.schedules import build_schedule

RESULT_NAME, PAGE_NAME = "tune.json", "tune.html"
_KIND = "learning rates of a narrow model"  # of the output directory, see `create_owned`
_EXPONENTS = {"muon": 0.5}  # of the ratio of the hidden sizes; 1 for Adam and AdamW
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the first learning rates
_MAX_RUNS = 9
_MIN_WIDTH = 64
_DIVERGED = "training has diverged"  # in the error of a run whose loss or weights are not finite


@dataclass(frozen=True)
class Suggestion:
    """Result of `tune`.

    Attributes:
        losses: validation loss in nats of the narrow model by peak learning rate; infinite if training diverged.
        narrow_width: hidden size of the narrow model.
        narrow_rate: its learning rate with the lowest loss.
        width: hidden size of the configured model.
        overrides: overrides that set the suggested learning rate of the configured model.
    """

    losses: dict[float, float]
    narrow_width: int
    narrow_rate: float
    width: int
    overrides: list[str]


def tune(cfg: RunConfig, arguments: Sequence[str], output: Path, width: int | None, steps: int) -> Suggestion:
    """Train a narrow model with several learning rates, and write `tune.json` and `tune.html`.

    The first rates are 1/4 to 4 times the one that corresponds to the configured rate. While the lowest or the highest
    is the best, a further one is tried, up to 9 in total. A run that is complete in `output` is not repeated.

    Args:
        cfg: configuration of the wide model.
        arguments: command line that `cfg` was composed from.
        output: directory of the runs.
        width: hidden size of the narrow model; None: an eighth of the wide one's, but at least 64.
        steps: training steps of each run: linear warm-up (10 %), then linear decay to 0.

    Raises:
        UserError: if the width is unsuitable, `output` has other runs, a run fails, or all diverge.
    """
    width = _default_width(cfg) if width is None else width
    common = [*arguments, *narrow_overrides(cfg, width), *_run_overrides(steps)]
    output, identity = output.absolute(), {"arguments": common, "configuration": digest([repr(cfg)])}
    if identity_of(output, _KIND) not in (None, identity):
        raise UserError(f"{output} has runs with other settings: choose another directory")
    create_owned(output, _KIND, identity)
    to_wide = (width / cfg.model.hidden_size) ** _EXPONENTS.get(cfg.model.optim.name, 1.0)
    first, losses = peak_rate(cfg) / to_wide, dict[float, float]()
    with progress_bar("tune, at most", _MAX_RUNS, "runs") as advance:
        while (rate := next_rate(losses, first)) is not None:
            losses[rate] = _final_loss(output / f"lr-{rate:.3g}", [*common, f"model.optim.lr={rate:.3g}"], steps)
            advance(1)
    best = _best_rate(losses)
    if losses[best] == math.inf:
        raise UserError(f"training diverged with all learning rates from {min(losses):.3g} to {max(losses):.3g}")
    found = Suggestion(losses, width, best, cfg.model.hidden_size, rate_overrides(cfg, best * to_wide))
    record = {
        "losses": {f"{rate:g}": None if loss == math.inf else loss for rate, loss in sorted(losses.items())},
        "overrides": found.overrides, **identity,
    }  # fmt: skip
    write_atomic(output / RESULT_NAME, json.dumps(record, indent=1) + "\n")
    write_atomic(output / PAGE_NAME, _render(found))
    return found


def _default_width(cfg: RunConfig) -> int:
    head = cfg.model.hidden_size // cfg.model.num_attention_heads
    return min(math.ceil(max(cfg.model.hidden_size / 8, _MIN_WIDTH) / head) * head, cfg.model.hidden_size)


def narrow_overrides(cfg: RunConfig, width: int) -> list[str]:
    """Return the overrides that change the hidden size, and with it the number of heads and the feed-forward size.

    Raises:
        UserError: if the hidden size is not a multiple of that of a head, or larger than the configured one.
    """
    model = cfg.model
    head = model.hidden_size // model.num_attention_heads
    if width % head or not head <= width <= model.hidden_size:
        raise UserError(f"--width={width}: expected a multiple of {head} (a head) up to {model.hidden_size}")
    return [
        f"model.hidden_size={width}", f"model.num_attention_heads={width // head}",
        f"model.ffn_hidden_size={model.ffn_hidden_size * width // model.hidden_size}",
    ]  # fmt: skip


def _run_overrides(steps: int) -> list[str]:
    return [
        "name=tune", f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}",
        f"trainer.limit_val_batches={max(steps // 4, 1)}", "model.optim.sched.name=WarmupAnnealing",
        f"model.optim.sched.warmup_steps={steps // 10}", "model.optim.sched.min_lr=0",
        "model.optim.sched.max_steps=null",
    ]  # fmt: skip


def peak_rate(cfg: RunConfig) -> float:
    """Return the highest learning rate of the configured schedule."""
    optim, steps = cfg.model.optim, cfg.trainer.max_steps
    if steps < 1:  # the run is limited by epochs or time
        steps = optim.sched.max_steps or 0
    if steps < 1:
        raise UserError("the number of steps is unknown: set trainer.max_steps")
    schedule = build_schedule(optim.sched, optim.lr, steps)
    return max(schedule(step) for step in range(steps))


def rate_overrides(cfg: RunConfig, rate: float) -> list[str]:
    """Return the overrides that change the highest learning rate of the configured schedule to `rate`."""
    # With NoamAnnealing, `lr` is a multiplier.
    optim, factor = cfg.model.optim, rate / peak_rate(cfg)
    overrides = [f"model.optim.lr={_round(optim.lr * factor):g}"]
    if optim.sched.max_lr is not None:
        overrides.append(f"model.optim.sched.max_lr={_round(optim.sched.max_lr * factor):g}")
    return overrides


def next_rate(losses: Mapping[float, float], first: float) -> float | None:
    """Return the learning rate to try after those in `losses`, or None at the end.

    Args:
        losses: validation losses by learning rate.
        first: learning rate around which the search begins.
    """
    if len(losses) < len(_FACTORS):
        return _round(first * _FACTORS[len(losses)])
    best = _best_rate(losses)
    if len(losses) == _MAX_RUNS or min(losses) < best < max(losses):
        return None
    return _round(best / 2 if best == min(losses) else best * 2)


def _best_rate(losses: Mapping[float, float]) -> float:
    return min(sorted(losses), key=lambda rate: losses[rate])  # the lowest of several


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")


def _final_loss(directory: Path, arguments: Sequence[str], steps: int) -> float:
    try:
        return pretrain(directory, arguments, steps)[steps]
    except UserError as error:
        if _DIVERGED in str(error):
            return math.inf
        raise


def _render(found: Suggestion) -> str:
    figure = new_figure(height=3)
    axes = figure.subplots()
    rates = sorted(found.losses)
    axes.semilogx(rates, [found.losses[rate] for rate in rates], ".-")
    axes.axvline(found.narrow_rate, color="C1", label=f"best: {found.narrow_rate:g}")
    axes.set_xlabel(f"learning rate of the model of hidden size {found.narrow_width}")
    axes.set_ylabel("validation loss (nats)")
    axes.legend()
    text = f"<p>Hidden size {found.width}: <code>{' '.join(found.overrides)}</code></p>"
    return html_page("Learning rate", [text, to_svg(figure), html_table(("learning rate", "loss"), _rows(found))])


def _rows(found: Suggestion) -> Iterator[tuple[str, str]]:
    for rate, loss in sorted(found.losses.items()):
        yield f"{rate:g}", "diverged" if loss == math.inf else f"{loss:.4f}"
