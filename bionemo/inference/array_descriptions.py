# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the arrays in files of predictions, for `--help` and as attributes of .h5 files."""

from bionemo.config.schema.infer import split_output

ARRAY_DESCRIPTIONS = {  # N sequences; D: hidden size, V: size of the vocabulary
    "id": "[N], names of the sequences",
    "tokens": "[N], number of tokens of each sequence, without begin and end tokens",
    "offsets": "[N + 1]: rows offsets[i]:offsets[i + 1] of hiddens and logits belong to sequence i",
    "embeddings": "[N, D], mean of the hidden states of each sequence, without begin and end tokens",
    "begin": "[N, D], hidden state of the first token",
    "hiddens": "[all tokens, D], hidden states of the last layer",
    "logits": "[all tokens, V], logits",
    "pseudo_perplexity": "[N], exp of the mean of -log p(token); masked language models mask one token at a time",
    "reconstruction": "[N], SMILES decoded from the hidden states of the input",
    "attentions": "[heads, n, n] for each sequence: rows are queries; begin and end tokens are left out after softmax",
    "samples": "[N, num_samples], SMILES decoded from hidden states with noise, or sampled",
}


def describe(name: str) -> str:
    """Return the description of an array."""
    kind, layer = split_output(name)
    text = ARRAY_DESCRIPTIONS[kind]
    return text if layer is None else f"{text.replace(' of the last layer', '')}; of layer {layer}"
