# SPDX-License-Identifier: Apache-2.0
"""A plan: everything worked out for a configuration."""

from dataclasses import asdict, dataclass
from typing import Any

from bionemo.config.schema import RunConfig
from bionemo.planning.choices import Choice, choice, choices, overrides
from bionemo.planning.devices import Device
from bionemo.planning.duration import Duration, duration
from bionemo.planning.flops import of_update, on_hardware
from bionemo.planning.layout import Layout, Stage, layout_of
from bionemo.planning.lengths import tokens_of
from bionemo.planning.memory import Memory, fullest
from bionemo.planning.sizes import model_parameters, shape_of, stage_parameters
from bionemo.planning.step import Step


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        name: of the experiment.
        step: model and tokens.
        layout: asked for.
        device: what it would run on.
        precision: of matrix products.
        parameters: of the whole model, by part.
        stage: the fullest.
        held: parameters that a process of that stage holds.
        memory: of that stage.
        flops: of an update that training calls for, and with what is computed beside.
        duration: of an update.
        steps: of the run; None where the configuration does not say.
        asked: the layout asked for, as the choices are estimated.
        choices: all layouts for as many GPUs.
    """

    name: str
    step: Step
    layout: Layout
    device: Device
    precision: str
    parameters: dict[str, int]
    stage: Stage
    held: int
    memory: Memory
    flops: tuple[float, float]
    duration: Duration
    steps: int | None
    asked: Choice
    choices: list[Choice]

    @property
    def best(self) -> Choice | None:
        """The fastest layout that fits."""
        return next((each for each in self.choices if each.fits), None)

    @property
    def advice(self) -> list[str]:
        """What to add to the command line for the best layout."""
        return overrides(self.best.layout, self.layout) if self.best else []

    @property
    def tokens_per_second(self) -> float:
        """Tokens of sequences, filler aside; of two stacks, those that the encoder reads."""
        return self.layout.global_rows * self.step.read / self.duration.total

    @property
    def mfu(self) -> float:
        """Share of the GPUs' peak that goes into useful FLOPs."""
        peak = 1e12 * (self.device.half if self.step.half else self.device.single) * self.layout.gpus
        return self.flops[0] / self.duration.total / peak


def plan(cfg: RunConfig, device: Device, mfu: float | None = None) -> Plan:
    """Work a plan out.

    Raises:
        UserError: when the configuration does not say enough, or its model is not known.
    """
    layout, precision = layout_of(cfg), str(cfg.trainer.precision)
    step = Step(
        shape_of(cfg.model),
        tokens_of(cfg.model),
        half=precision not in ("32", "32-true"),
        deterministic=cfg.trainer.deterministic is True,
    )
    stage, needed = fullest(step, layout)
    return Plan(
        name=cfg.name,
        step=step,
        layout=layout,
        device=device,
        precision=precision,
        parameters=model_parameters(step.shape),
        stage=stage,
        held=sum(stage_parameters(step.shape, layout, stage).values()),
        memory=needed,
        flops=(of_update(step, layout), on_hardware(step, layout)),
        duration=duration(step, layout, device, mfu),
        steps=cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None,
        asked=choice(step, layout, device),
        choices=choices(step, layout, device),
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """Everything as plain values, for JSON; bytes, seconds, FLOPs."""
    more = {
        "mfu": plan.mfu,
        "total_memory": plan.memory.total,
        "seconds": plan.duration.total,
        "tokens_per_second": plan.tokens_per_second,
        "advice": plan.advice,
    }
    return asdict(plan) | more
