# SPDX-License-Identifier: Apache-2.0
"""Where Lightning's trainer meets Megatron's process groups, and where checkpoints become directories."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from bionemo import checkpoint
from bionemo.checkpoint.state_schema import missing_to_resume
from bionemo.common.errors import UserError
from bionemo.megatron import groups
from bionemo.megatron.async_save import Saver
from bionemo.megatron.sharded_state_dict import (
    load_optimizer,
    load_weights,
    optimizer_pieces,
    optimizer_slots,
    weight_pieces,
)


class MegatronStrategy(DDPStrategy):
    """Lightning's DDP launching and process groups, with Megatron's gradient buffers in the place of torch's DDP.

    A subclass of DDPStrategy because exp_manager accepts no other on several devices.

    Args:
        tensor: processes that share every layer.
        pipeline: stages that the layers are dealt to.
        save_behind: write checkpoints while training goes on.
    """

    def __init__(self, tensor: int = 1, pipeline: int = 1, save_behind: bool = False) -> None:
        super().__init__()
        self._tensor, self._pipeline = tensor, pipeline
        self.saver = Saver(save_behind)
        self._saved: checkpoint.Checkpoint | None = None  # what this run goes on from

    def setup_environment(self) -> None:
        """Start the process group, then Megatron's groups inside it."""
        super().setup_environment()
        groups.make(self._tensor, self._pipeline)
        self.saver.connect()

    def setup(self, trainer: pl.Trainer) -> None:
        """Put the module on its device; the module wraps its model itself (training/module.py)."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def data_parallel_rank(self) -> int:
        """This process among those that see different data."""
        return groups.data_rank()

    @property
    def data_parallel_size(self) -> int:
        """How many processes see different data."""
        return groups.data_size()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What this process writes of the weights."""
        module: Any = self.lightning_module
        return {"pieces": weight_pieces(module.parallel)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this process writes of the optimizer."""
        module: Any = self.lightning_module
        return {"pieces": optimizer_pieces(module.parallel, optimizer)}

    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Callable[[], None] | None = None
    ) -> None:
        """Write a checkpoint directory, from all processes; `storage_options` is what rank 0 does when it is there.

        Raises:
            UserError: when the state or a metric is not finite; nothing is written or deleted then.
        """
        module: Any = self.lightning_module
        module.refuse_not_finite(checkpoint_.get("metrics"))
        groups_of_pieces = [checkpoint_.pop("state_dict"), *checkpoint_.get("optimizer_states", [])]
        checkpoint_["optimizer_states"] = []
        pieces = [piece for group in groups_of_pieces for piece in group["pieces"]]
        self.saver.save(Path(filepath), checkpoint_, pieces, storage_options)

    def load_checkpoint(self, checkpoint_path: Any) -> dict[str, Any]:
        """Read the state of a checkpoint that has been verified; its tensors are read when they are asked for.

        Raises:
            UserError: when a run cannot go on from it.
        """
        self._saved = checkpoint.Checkpoint(Path(checkpoint_path))
        optimizer_slots(self._saved)
        if missing := missing_to_resume(self._saved.state):
            raise UserError(
                f"checkpoint {checkpoint_path} has no {missing}: a run cannot resume from it; take another"
            )
        return dict(self._saved.state)

    def load_model_state_dict(self, checkpoint_: Mapping[str, Any], strict: bool = True) -> None:
        """Give the model its weights.

        Raises:
            UserError: when they belong to another model.
        """
        module: Any = self.lightning_module
        assert self._saved is not None
        load_weights(module.parallel.places, self._saved, to_train=module.trainer.training)

    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        """Give the optimizer its state.

        Raises:
            UserError: when the checkpoint holds none.
        """
        module: Any = self.lightning_module
        assert self._saved is not None
        load_optimizer(module.parallel, self.optimizers[0], self._saved, module.schedule_step)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory."""
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))

    def teardown(self) -> None:
        """Leave no groups, so that one process can train twice."""
        self.saver.wait()
        groups.unmake()
        super().teardown()
