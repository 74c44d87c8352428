# SPDX-License-Identifier: Apache-2.0
"""Types of the entries of state.json: checkpoints may be untrusted, and checksums do not prove who wrote them."""

from typing import Any

_COUNT, _NUMBER, _PLAIN = "a non-negative integer", "a number", "a plain value"
_POINTS = [[_NUMBER]]
# All entries are optional; "*" describes all other entries of a mapping.
_SCHEMA: dict[str, Any] = {
    "global_step": _COUNT,
    "schedule_step": _COUNT,
    "epoch": _COUNT,
    "model": {"model._target_": str, "*": _PLAIN},
    "config": {"_target_": str, "tokenizer": {"*": _PLAIN}, "*": _PLAIN},
    "SequenceData": {
        "position": {
            "window_start": _COUNT,
            "row": _COUNT,
            "window_end": _COUNT,
            "stream_samples": _COUNT,
            "consumed_samples": _COUNT,
            "consumed_tokens": _COUNT,
        },
        "stream": {"*": _PLAIN},
    },
    "loss_scaler": {"*": _NUMBER},
    "callbacks": {"LossCurve": {"train": _POINTS, "validation": _POINTS}, "*": object},
    "metrics": {"*": _NUMBER},
    "optimizer_states": [object],
    "lr_schedulers": [object],
    "*": object,
}
_REQUIRED_TO_RESUME = (
    "global_step", "schedule_step", "model", "loss_scaler", "callbacks", "optimizer_states", "lr_schedulers",
    "SequenceData.stream", "SequenceData.position.row",
    "SequenceData.position.consumed_samples", "SequenceData.position.consumed_tokens",
)  # fmt: skip


def check_state(state: Any) -> None:
    """Raise a ValueError that names an entry of a state with a wrong type."""
    _check(state, _SCHEMA, "state")


def find_missing_entry(state: Any, prefix: str = "") -> str | None:
    """Return the first entry that resuming needs and a checked state lacks, among those that start with `prefix`."""
    for entry in (entry for entry in _REQUIRED_TO_RESUME if entry.startswith(prefix)):
        value = state
        for name in entry.split("."):
            if name not in value:
                return entry
            value = value[name]
    return None


def _check(value: Any, schema: Any, key: str) -> None:
    if isinstance(schema, dict):
        _expect(isinstance(value, dict) and all(isinstance(name, str) for name in value), key, "a mapping")
        for name, item in value.items():
            if (expected := schema.get(name, schema.get("*"))) is not None:
                _check(item, expected, f"{key}.{name}")
    elif isinstance(schema, list):
        _expect(isinstance(value, list), key, "a list")
        for number, item in enumerate(value):
            _check(item, schema[0], f"{key}[{number}]")
    elif schema == _COUNT:
        _expect(type(value) is int and 0 <= value < 1 << 63, key, schema)
    elif schema == _NUMBER:
        _expect(type(value) in (int, float), key, schema)
    elif schema == _PLAIN:
        if isinstance(value, dict | list | tuple):
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                _expect(isinstance(name, str | int), key, "a mapping")
                _check(item, schema, f"{key}.{name}")
        else:
            _expect(value is None or isinstance(value, bool | int | float | str), key, schema)
    else:
        _expect(isinstance(value, schema), key, schema.__name__)


def _expect(condition: bool, key: str, expected: str) -> None:
    if not condition:
        raise ValueError(f"{key} is not {expected}")
