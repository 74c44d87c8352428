# SPDX-License-Identifier: Apache-2.0
"""Lightning strategy with Megatron's process groups and sharded checkpoint directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from bionemo import checkpoint
from bionemo.megatron import groups
from bionemo.megatron.async_save import CheckpointWriter
from bionemo.megatron.sharded_state_dict import (
    load_optimizer,
    load_weights,
    optimizer_pieces,
    weight_pieces,
)

_TENSORS = "tensors"  # key of the open checkpoint in the state that Lightning passes from one load method to the next


class MegatronStrategy(DDPStrategy):
    """DDP launching and process groups of Lightning, with Megatron's gradient buffers instead of torch's DDP wrapper.

    It is a subclass of DDPStrategy because exp_manager accepts no other strategy with several devices.

    Args:
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        async_save: write checkpoints in a thread while training continues.
    """

    def __init__(self, tensor: int = 1, pipeline: int = 1, async_save: bool = False) -> None:
        super().__init__()
        self._tensor, self._pipeline = tensor, pipeline
        self.checkpoint_writer = CheckpointWriter(async_save)

    def setup_environment(self) -> None:
        """Create the process groups."""
        super().setup_environment()
        groups.initialize(self._tensor, self._pipeline)
        self.checkpoint_writer.create_process_group()

    def setup(self, trainer: pl.Trainer) -> None:
        """Move the module to its device; the module itself creates the ParallelModel."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank of this process."""
        return groups.data_rank()

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks."""
        return groups.data_size()

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights that this process writes."""
        return {"pieces": weight_pieces(self._module.parallel)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer state that this process writes."""
        return {"pieces": optimizer_pieces(self._module.parallel, optimizer)}

    def save_checkpoint(self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint directory; all ranks take part.

        Raises:
            UserError: if the state or a metric is not finite; nothing is written in this case.
        """
        self._module.check_finite(checkpoint_.get("metrics"))
        state_dicts = [checkpoint_.pop("state_dict"), *checkpoint_.get("optimizer_states", [])]
        checkpoint_["optimizer_states"] = []
        pieces = [piece for each in state_dicts for piece in each["pieces"]]
        self.checkpoint_writer.save(Path(filepath), checkpoint_, pieces)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the state of a verified checkpoint; its tensors are read later, when the model exists.

        `weights_only` of Lightning is ignored: no file of a checkpoint is unpickled.
        """
        saved = checkpoint.Checkpoint(Path(checkpoint_path))
        return {**saved.state, _TENSORS: saved}

    def load_model_state_dict(self, checkpoint_: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights from the result of `load_checkpoint`.

        Raises:
            UserError: if they belong to another model.
        """
        load_weights(self._module.parallel.shards, checkpoint_[_TENSORS], to_train=self._module.trainer.training)

    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        """Load the optimizer state from the result of `load_checkpoint`."""
        module = self._module
        load_optimizer(module.parallel, self.optimizers[0], checkpoint_[_TENSORS], module.schedule_step)

    def teardown(self) -> None:
        """Finish writing and destroy Megatron's process groups."""
        try:
            self.checkpoint_writer.wait()
        finally:
            groups.destroy()
            super().teardown()
