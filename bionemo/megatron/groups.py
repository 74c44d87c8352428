# SPDX-License-Identifier: Apache-2.0
"""This process's place among the others: tensor-, pipeline- and data-parallel groups.

Before Megatron's groups are made, a model is whole: one tensor rank, one stage that is both the first and the last.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def make(tensor: int, pipeline: int) -> None:
    """Divide all processes: `tensor` neighbours share layers, `pipeline` stages share the depth, the rest is data."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(tensor, pipeline)
    # Nothing of ours draws from it, but some of Megatron's layers look for it.
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def unmake() -> None:
    """Leave no groups, so that one process can train twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def made() -> bool:
    """Whether this process has been given its place."""
    return bool(parallel_state.model_parallel_is_initialized())


def collection() -> ProcessGroupCollection:
    """Megatron's view of the groups; without any, one in which everything is whole."""
    if made():
        return ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.pp = None
    return groups


def tensor_rank() -> int:
    """Which part of every divided layer this process holds."""
    return int(parallel_state.get_tensor_model_parallel_rank()) if made() else 0


def tensor_size() -> int:
    """How many processes share every layer."""
    return int(parallel_state.get_tensor_model_parallel_world_size()) if made() else 1


def stage() -> int:
    """Which pipeline stage this process computes."""
    return int(parallel_state.get_pipeline_model_parallel_rank()) if made() else 0


def stages() -> int:
    """How many pipeline stages there are."""
    return int(parallel_state.get_pipeline_model_parallel_world_size()) if made() else 1


def first_stage() -> bool:
    """Whether this process embeds tokens."""
    return stage() == 0


def last_stage() -> bool:
    """Whether this process computes the loss."""
    return stage() == stages() - 1


def data_rank() -> int:
    """This process among those that hold the same part of the model and see different data."""
    return int(parallel_state.get_data_parallel_rank()) if made() else 0


def data_size() -> int:
    """How many processes see different data."""
    return int(parallel_state.get_data_parallel_world_size()) if made() else 1


def sum_over_data(values: Tensor) -> Tensor:
    """Sum over the processes that see different data, in place."""
    torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def sum_over_model(values: Tensor) -> Tensor:
    """Sum over the processes that together hold one model, in place."""
    if tensor_size() * stages() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_model_parallel_group())
    return values


def sum_over_stages(values: Tensor) -> Tensor:
    """Sum over the pipeline stages, in place."""
    if stages() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
    return values
