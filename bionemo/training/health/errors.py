# SPDX-License-Identifier: Apache-2.0
"""What an error of one rank means for the others, and how rank 0 tells it."""

import torch.distributed as dist

from bionemo.common.errors import UserError, describe


def lost_another(error: BaseException) -> bool:
    """Whether it only says that another rank has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def one_line(error: BaseException, rank: int, name: str, doing: str) -> str:
    """Tell an error of a rank; `name` is its rank, host and process, `doing` its phase."""
    if isinstance(error, UserError):
        said = f"rank {rank}: {error}" if rank else str(error)
    elif lost_another(error):
        said = f"{name} could not reach another rank {doing}: {str(error).splitlines()[0]}"
    elif isinstance(error, Exception):
        said = f"{name} failed {doing}: {describe(error) or f'{type(error).__name__}: {error}'}"
    else:
        said = f"{name} was interrupted {doing}"
    return " ".join(said.split())
