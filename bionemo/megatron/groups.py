# SPDX-License-Identifier: Apache-2.0
"""Process groups for tensor, pipeline and data parallelism.

Before `initialize`, a model is not sharded: one tensor rank, and one pipeline stage that is both first and last.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from bionemo.megatron import patches


def initialize(tensor: int, pipeline: int) -> None:
    """Create Megatron's process groups. Unless they use NCCL, also patch Megatron-Core, see patches.py.

    Args:
        tensor: tensor-parallel size; these ranks are neighbours.
        pipeline: pipeline-parallel size. The remaining ranks are data parallel.
    """
    if is_initialized():
        return
    if dist.get_backend() != dist.Backend.NCCL:
        patches.apply()
    try:
        parallel_state.initialize_model_parallel(tensor, pipeline)
    except BaseException:
        patches.undo()
        raise


def destroy() -> None:
    """Delete Megatron's references to its process groups and undo the patches, so that a process can train again."""
    if is_initialized():
        parallel_state.destroy_model_parallel()
        patches.undo()


def destroy_all(keep_default: bool) -> None:
    """Destroy all process groups of torch, which `destroy` does not, or all but the default one."""
    if not keep_default:
        dist.destroy_process_group()
        return
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@contextmanager
def simulate(tensor: int, pipeline: int, rank: int, data: int = 1) -> Iterator[None]:
    """Act as one rank of a layout on the CPU of this process; communication returns at once and transfers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints on the speed of communication
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tensor * pipeline * data)
        try:
            patches.apply()
            parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
            yield
        finally:
            destroy()
            patches.undo()  # if the groups could not be created
            torch.distributed.destroy_process_group()


def is_initialized() -> bool:
    """Return whether the process groups exist."""
    return bool(parallel_state.model_parallel_is_initialized())


def collection() -> ProcessGroupCollection:
    """Return the process groups as Megatron's modules expect them."""
    if is_initialized():
        return ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.pp = None
    return groups


def tensor_rank() -> int:
    """Return the tensor-parallel rank of this process."""
    return int(parallel_state.get_tensor_model_parallel_rank()) if is_initialized() else 0


def tensor_size() -> int:
    """Return the tensor-parallel size."""
    return int(parallel_state.get_tensor_model_parallel_world_size()) if is_initialized() else 1


def pipeline_rank() -> int:
    """Return the pipeline stage of this process."""
    return int(parallel_state.get_pipeline_model_parallel_rank()) if is_initialized() else 0


def pipeline_size() -> int:
    """Return the number of pipeline stages."""
    return int(parallel_state.get_pipeline_model_parallel_world_size()) if is_initialized() else 1


def is_first_stage() -> bool:
    """Return whether this process computes the embedding."""
    return pipeline_rank() == 0


def is_last_stage() -> bool:
    """Return whether this process computes the loss."""
    return pipeline_rank() == pipeline_size() - 1


def data_rank() -> int:
    """Return the data-parallel rank of this process."""
    return int(parallel_state.get_data_parallel_rank()) if is_initialized() else 0


def data_size() -> int:
    """Return the data-parallel size."""
    return int(parallel_state.get_data_parallel_world_size()) if is_initialized() else 1


def sum_over_data_ranks(values: Tensor) -> Tensor:
    """Sum over the data-parallel ranks, in place."""
    torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def sum_over_model_ranks(values: Tensor) -> Tensor:
    """Sum over the tensor and pipeline ranks of one model replica, in place."""
    if tensor_size() * pipeline_size() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_model_parallel_group())
    return values


def sum_over_pipeline(values: Tensor) -> Tensor:
    """Sum over the pipeline stages, in place."""
    if pipeline_size() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
    return values
