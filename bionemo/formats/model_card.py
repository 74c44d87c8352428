# SPDX-License-Identifier: Apache-2.0
"""Model cards of exported models: Markdown below a YAML header, as on the Hugging Face hub.

Mitchell et al. 2019, "Model Cards for Model Reporting".
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from bionemo.checkpoint import WEIGHTS, TensorSource
from bionemo.common.redaction import redact_text
from bionemo.common.version import __version__
from bionemo.config.targets import import_target

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")


def render(
    name: str, config: Mapping[str, Any], vocab_size: int | None, weights: TensorSource, history: Mapping[str, str],
    usage: str = "",
) -> str:  # fmt: skip
    """Return the text of a model card, without secrets.

    The first sentence of the docstring of the model's class is the description of the model.

    `name` is that of the model's file or directory, `config` the `model` section of our configuration, `history` facts
    about the training, and `usage` Python code that opens the model with another library.
    """
    model_class = import_target(str(config["_target_"]))
    class_name, tag = model_class.__name__, model_class.card_tag
    description = re.split(r"\.(\s|$)", model_class.__doc__ or "", maxsplit=1)[0]
    parameters = sum(math.prod(shape) for shape in weights.shapes(WEIGHTS).values())
    header = yaml.safe_dump({"library_name": "bionemo", "tags": ["bionemo", class_name, *([tag] if tag else [])]})
    facts = {
        "class": f"{class_name}: {description}",
        "parameters": f"{parameters:,}, including rows that pad the vocabulary",
        "vocabulary": "unknown" if vocab_size is None else f"{vocab_size:,} tokens",
        **{key: f"{config[key]:,}" for key in _SIZES if isinstance(config.get(key), int)},
    }
    training = _table(history) if history else "No information about the training is available; please add it."
    other = f"\n```python\n{usage}\n```\n" if usage else ""
    return redact_text(f"""---
{header}---

# {name}

{_table(facts)}

## Training

{training}

## Use

```python
import bionemo

model = bionemo.load({name!r})
```
{other}
Predictions reflect the training sequences; they are not evidence of the function of a protein or molecule.
The model has not been evaluated for any use beyond research.

Written by bionemo {__version__}.
""")


def describe_training(state: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return facts about the training from the state and the manifest of a checkpoint."""
    data = _as_mapping(state.get("SequenceData"))
    position, stream = _as_mapping(data.get("position")), _as_mapping(data.get("stream"))
    counts = {"steps": manifest.get("step")}
    counts |= {key.replace("_", " "): position.get(key) for key in ("consumed_samples", "consumed_tokens")}
    counts |= {key: value for key, value in stream.items() if str(key).startswith("training ")}
    facts = {key: f"{value:,}" for key, value in counts.items() if type(value) is int and value}
    if re.fullmatch(r"[\w.-]+(/[\w.-]+@[0-9a-f]{40})?", base := str(state.get("base_model") or "")):
        facts["base model"] = base
    metrics = _as_mapping(manifest.get("metrics"))
    return facts | {name: f"{value:.4f}" for name, value in metrics.items() if type(value) is float}


def _as_mapping(value: object) -> Mapping[str, Any]:
    """Replace anything else by an empty mapping: checkpoints may come from untrusted sources."""
    return value if isinstance(value, Mapping) else {}


def _table(facts: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())])
