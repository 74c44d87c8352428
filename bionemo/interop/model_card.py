# SPDX-License-Identifier: Apache-2.0
"""The model card that goes with every model that leaves: what it is, what it was trained on, how to open it.

Its form is that of Hugging Face's: Markdown below a few lines of YAML (Mitchell et al. 2019, "Model Cards for Model
Reporting").
"""

import math
from collections.abc import Mapping
from typing import Any

import yaml

from bionemo.checkpoint import TensorSource
from bionemo.common.redaction import redact_text
from bionemo.common.version import __version__

_ABOUT = {
    "ESM1nv": ("protein", "a masked language model of protein sequences with learned positions, after ESM-1b"),
    "ESM1b": ("protein", "a masked language model of protein sequences with learned positions, as ESM-1b and ESM-1v"),
    "ESM2nv": ("protein", "a masked language model of protein sequences with rotary positions, after ESM-2"),
    "ProtT5nv": ("protein", "an encoder-decoder that fills in hidden stretches of protein sequences, after ProtT5"),
    "MegaMolBART": ("chemistry", "an encoder-decoder that writes a molecule's SMILES anew, after Chemformer"),
    "GPT3": ("text-generation", "a language model that goes on with a text, after GPT-3"),
}
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")


def card(
    name: str, config: Mapping[str, Any], words: int | None, weights: TensorSource, history: Mapping[str, Any],
    howto: str,
) -> str:  # fmt: skip
    """Write it.

    Args:
        name: of the model.
        config: the model section of our configuration.
        words: size of the vocabulary.
        weights: of the whole model.
        history: what a checkpoint knows of its training; empty where nothing is known.
        howto: Python that opens it, besides ours.
    """
    kind = str(config["_target_"]).rpartition(".")[2]
    tag, about = _ABOUT.get(kind, ("", "a model"))
    parameters = sum(math.prod(shape) for shape in weights.shapes("weights").values())
    head = yaml.safe_dump({"library_name": "bionemo", "tags": ["bionemo", kind, *([tag] if tag else [])]})
    facts = {
        "class": f"{kind}: {about}",
        "parameters": f"{parameters:,}, rows that only pad the vocabulary among them",
        "vocabulary": "not known" if words is None else f"{words:,} tokens",
        **{key: f"{config[key]:,}" for key in _SIZES if isinstance(config.get(key), int)},
    }
    text = "\n".join(
        [
            f"---\n{head}---\n\n# {name}\n",
            *_table(facts),
            "\n## Training\n",
            *(_table(history) if history else ["Nothing is known of it here: add what you know."]),
            "\n## Use\n",
            f"```python\nimport bionemo\n\nmodel = bionemo.load({name!r})\n```\n",
            *([f"```python\n{howto}\n```\n"] if howto else []),
            "What it computes says how the sequences look that it was trained on: no evidence of what a protein or a",
            "molecule does. It has not been judged for any use beyond research.\n",
            f"Written by bionemo {__version__}.\n",
        ]
    )
    return redact_text(text)


def history_of(state: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint knows of its training.

    Args:
        state: of the checkpoint.
        manifest: of the checkpoint.
    """
    data = _mapping(state.get("SequenceData"))
    position, stream = _mapping(data.get("position")), _mapping(data.get("stream"))
    counts = {"steps": manifest.get("step")}
    counts |= {key.replace("_", " "): position.get(key) for key in ("consumed_samples", "consumed_tokens")}
    counts |= {key: value for key, value in stream.items() if str(key).startswith("training ")}
    facts = {key: f"{value:,}" for key, value in counts.items() if type(value) is int and value}
    metrics = _mapping(manifest.get("metrics"))
    return facts | {name: f"{value:.4f}" for name, value in metrics.items() if type(value) is float}


def _mapping(value: object) -> Mapping[str, Any]:
    """What should be one; whoever wrote a checkpoint may have put anything there."""
    return value if isinstance(value, Mapping) else {}


def _table(facts: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
