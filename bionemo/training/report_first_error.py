# SPDX-License-Identifier: Apache-2.0
"""One error, told once, when several ranks run: the first to fail speaks, the others follow it quietly."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl

from bionemo.common.errors import describe
from bionemo.common.redaction import redact_text
from bionemo.training.health.callback import Watch
from bionemo.training.health.errors import lost_another, one_line

log = logging.getLogger(__name__)


@contextmanager
def one_voice(watch: Watch, trainer: pl.Trainer) -> Iterator[None]:
    """Watch over the ranks; let the error of any reach the user, and no rank complain that another one has gone.

    Rank 0 tells what ends any of them. An error that only a defect explains also ends its own rank with a traceback.
    """
    watch.error = None
    if trainer.world_size > 1:
        watch.begin(trainer)
    try:
        yield
    except BaseException as error:
        cause = _cause(error, watch)
        last = cause if trainer.world_size == 1 else _last_word(cause, watch)
        if last is error:
            raise
        raise last from error
    if trainer.world_size == 1:
        return
    if watch.verdict is not None:
        sys.exit(1)
    watch.end()


def _cause(error: BaseException, watch: Watch) -> BaseException:
    """The error that ended the run, where Lightning's clean-up failed as well and would hide it behind a defect."""
    first = watch.error
    hidden = first is not None and isinstance(error, Exception) and describe(error) is None
    return first if first is not None and hidden and describe(first) is not None else error


def _last_word(error: BaseException, watch: Watch) -> BaseException:
    """The exception that this rank ends with: its own where it says more than the line of rank 0."""
    verdict = watch.wait() if lost_another(error) else None
    if verdict is None:
        watch.fail(error)
        verdict = watch.wait()
    if not isinstance(error, Exception):
        return error
    line = one_line(error, watch.rank, str(watch), watch.doing)
    log.info("leaving: %s", line)
    for_user = describe(error) is not None or lost_another(error)
    if verdict is None and for_user:  # rank 0 does not answer
        print(redact_text(f"error: {line}"), file=sys.stderr, flush=True)
    mine = verdict is None or (verdict.kind, verdict.rank) == ("failed", watch.rank)
    return error if mine and (not for_user or os.environ.get("HYDRA_FULL_ERROR") == "1") else SystemExit(1)
