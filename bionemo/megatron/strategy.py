# SPDX-License-Identifier: Apache-2.0
"""Where Lightning's trainer meets Megatron's process groups, and where checkpoints become directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from torch import Tensor, nn

from bionemo.errors import UserError
from bionemo.megatron import checkpoint


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module all its weights.

    Raises:
        UserError: when they belong to another model; the first difference is named.
    """
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(
            f"the checkpoint's weights are those of another model ({reason}): give model.* as they were, "
            "or another exp_manager.exp_dir to begin anew"
        ) from error


class MegatronStrategy(DDPStrategy):
    """Lightning's DDP launching and process groups, with Megatron's gradient buffers in the place of torch's DDP.

    A subclass of DDPStrategy because exp_manager accepts no other on several devices.
    """

    def setup_environment(self) -> None:
        """Start the process group, then Megatron's groups inside it."""
        super().setup_environment()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()

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
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_parallel_size(self) -> int:
        """How many processes see different data."""
        return int(parallel_state.get_data_parallel_world_size())

    def save_checkpoint(self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint directory, from rank 0: without model parallelism all ranks hold the same."""
        if self.is_global_zero:
            checkpoint.save(Path(filepath), checkpoint_)
        self.barrier("checkpoint")

    def load_checkpoint(self, checkpoint_path: Any) -> dict[str, Any]:
        """Read a checkpoint directory and verify it."""
        return checkpoint.load(Path(checkpoint_path))

    def load_model_state_dict(self, checkpoint_: Mapping[str, Any], strict: bool = True) -> None:
        """Give the model its weights.

        Raises:
            UserError: when they belong to another model.
        """
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint_["state_dict"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory."""
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))

    def teardown(self) -> None:
        """Leave Megatron's groups as they were found, so that one process can train twice."""
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        super().teardown()
