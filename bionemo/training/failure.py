# SPDX-License-Identifier: Apache-2.0
"""One error, told once, when several ranks run: the first to fail speaks, the others follow it quietly."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bionemo.errors import UserError

log = logging.getLogger(__name__)


@contextmanager
def one_voice() -> Iterator[None]:
    """Let a UserError of any rank reach the user, and no rank complain that another one has gone."""
    try:
        yield
    except UserError as error:
        if _ranks() > 1 and _tellers() > 1:
            sys.exit(1)
        if _ranks() > 1 and dist.get_rank() > 0:  # the command line speaks for the first rank only
            print(f"error: rank {dist.get_rank()}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise
    except RuntimeError as error:
        if _ranks() == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        log.info("another rank has gone: %s", error)
        if _tellers() > 1:
            sys.exit(1)
        raise UserError("a rank ended without a word: see nemo_log_globalrank-*.txt, or the host's log") from error


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _tellers() -> int:
    """How many ranks have come here, this one included; many, when the first rank has left with the count."""
    try:
        return int(_get_default_store().add("bionemo/failures", 1))
    except RuntimeError:
        return sys.maxsize
