# SPDX-License-Identifier: Apache-2.0
"""The regression that tells contacts from attention, as a JSON file: {"weight": [of each head], "bias": number}."""

import json
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.inference.analysis.files import finished
from bionemo.interop.huggingface.contacts import ContactHead


def write_head(path: Path, head: ContactHead) -> None:
    """Write a head as JSON.

    Raises:
        UserError: when the file cannot be written.
    """
    with finished(path) as file:
        file.write_text(json.dumps({"weight": list(head["weight"]), "bias": head["bias"]}) + "\n")


def read_head(path: Path) -> ContactHead:
    """Read a head from JSON.

    Raises:
        UserError: when the file is missing, or no head.
    """
    try:
        head = json.loads(path.read_text())
        numbers = np.array([*head["weight"], head["bias"]], np.float64)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is no contact head, which is {{"weight": [numbers], "bias": number}}') from error
    if not np.isfinite(numbers).all():
        raise UserError(f"{path} holds a number that is not finite: fit the head again")
    return {"weight": numbers[:-1].tolist(), "bias": float(numbers[-1])}
