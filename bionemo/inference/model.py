# SPDX-License-Identifier: Apache-2.0
"""A trained model with methods that take texts.

Shapes: N sequences, n tokens of one without begin and end, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema import SamplingConfig
from bionemo.config.schema.infer import SamplingMethod
from bionemo.data.letters import note_letters
from bionemo.inference.batching import Ids, max_tokens, tokenize, too_long_error
from bionemo.inference.generation import generate, reconstruction, sampling
from bionemo.inference.long_sequences import note_long
from bionemo.inference.outputs import Floats, InferenceModel, check_generates

Sequences = Sequence[str | Ids]
"""Texts, or token ids as `TrainedModel.ids` returns them, for example with some replaced by `vocabulary.mask_id`."""


class TrainedModel(InferenceModel):
    """A trained model, as `bionemo.load` returns it."""

    def embed(self, texts: Sequences, pooling: str = "mean", layer: int | None = None) -> Floats:
        """Return one vector for each sequence, [N, D] fp32: the mean over its tokens, or that of its `begin` token.

        Args:
            texts: N sequences; tokens do not include begin and end tokens.
            pooling: `mean` or `begin`.
            layer: 0: the embeddings before the first layer; L, the number of layers, or None: the last hidden states,
                after the final layer norm. These are the numbers of transformers' `hidden_states` and of fair-esm.

        Raises:
            UserError: if a sequence is empty, too long or invalid, or the model has no begin token or no such layer.
        """
        name = {"mean": "embeddings", "begin": "begin"}.get(pooling)
        if name is None:
            raise UserError(f"pooling={pooling!r} is not one of mean, begin")
        return self._per_sequence(texts, _of_layer(name, layer))

    def hiddens(self, texts: Sequences, layer: int | None = None) -> list[Floats]:
        """Return a vector for each token except begin and end: N arrays [n, D] fp32. See `embed`."""
        return self.compute_per_token(self.ids(texts), _of_layer("hiddens", layer))

    def attentions(self, texts: Sequences, layer: int) -> list[Floats]:
        """Return the attention maps of a layer, from 1: N arrays [heads, n, n] fp32, whose rows are queries.

        Rows and columns of begin and end tokens are left out after the softmax. Errors as in `embed`.
        """
        return self.compute_per_token(self.ids(texts), _of_layer("attentions", layer))

    def logits(self, texts: Sequences) -> list[Floats]:
        """Return the logits at each token: N arrays [n, V] fp32. Those of a causal model predict the next token.

        Errors as in `embed`; also for encoder-decoder models.
        """
        return self.compute_per_token(self.ids(texts), "logits")

    def pseudo_perplexity(self, texts: Sequences) -> Floats:
        """Return the pseudo-perplexity, [N] fp32: exp(-1/n sum_i log p(x_i | all other tokens)), in n forward passes.

        Salazar et al. 2020, "Masked Language Model Scoring", equation 3. For a causal model it is the perplexity
        without the first token. Errors as in `logits`.
        """
        return self._per_sequence(texts, "pseudo_perplexity")

    def reconstruct(self, texts: Sequence[str], beam_size: int = 1) -> list[str]:
        """Decode each molecule again: N SMILES, by greedy decoding or the best of a beam search.

        Errors as in `embed`; also for models that do not decode molecules.
        """
        check_generates(self.network, "reconstruction")
        return [smiles for (smiles,) in generate(self, self.ids(texts), reconstruction(beam_size))]

    def sample(
        self,
        texts: Sequence[str],
        sampling_method: SamplingMethod = "greedy-perturbate",
        num_samples: int = 1,
        *,
        scaled_radius: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        temperature: float = 1.0,
        beam_size: int = 5,
        beam_alpha: float = 0.0,
        seed: int = 42,
    ) -> list[list[str]]:
        """Sample molecules near each input: SMILES decoded from its vectors plus normal noise, with v1's methods.

        The samples are a function of the seed, the position of the input in the list, and the number of the sample.

        Args:
            texts: N SMILES.
            sampling_method: `greedy-perturbate`, `topkp-perturbate` (samples tokens), `beam-search-perturbate` (the
                best beam): one molecule per perturbation; `beam-search-perturbate-sample`: all beams of each
                perturbation; `beam-search-single-sample`: num_samples beams of one perturbation.
            num_samples: number of perturbations, or of beams of a single one.
            scaled_radius: standard deviation of the noise.
            top_k: sample from this number of the most likely tokens; 0: all.
            top_p: sample from the most likely tokens with this total probability; 0: all.
            temperature: values below 1 make likely tokens likelier.
            beam_size: number of beams of each perturbation.
            beam_alpha: length penalty of the beam search.
            seed: seed of noise and sampled tokens.

        Returns:
            N lists of num_samples SMILES (`beam-search-perturbate-sample`: num_samples * beam_size).

        Raises:
            UserError: see `reconstruct`; for invalid arguments.
        """
        config = SamplingConfig(
            sampling_method=sampling_method, num_samples=num_samples, scaled_radius=scaled_radius, top_k=top_k,
            top_p=top_p, temperature=temperature, beam_size=beam_size, beam_alpha=beam_alpha, seed=seed,
        )  # fmt: skip
        check_generates(self.network, "samples")
        return generate(self, self.ids(texts), sampling(config))

    def ids(self, texts: Sequences, names: Sequence[str] | None = None, truncate: bool = False) -> list[Ids]:
        """Tokenize sequences, without begin and end tokens; `names` are for messages. Token ids remain unchanged.

        Letters that the model does not know are logged, once for all sequences, and so are sequences that are too long
        if `truncate` is true.

        Raises:
            UserError: if one is empty, too long or invalid.
        """
        names = [f"sequence {n}" for n in range(len(texts))] if names is None else names
        found: list[Ids] = []
        given: list[tuple[str, str]] = []
        for text, name in zip(texts, names, strict=True):
            if isinstance(text, str):
                given.append((text, name))
            found.append(tokenize(self.network.vocabulary, text, name) if isinstance(text, str) else text)
        note_letters(self.network.vocabulary, given)
        length, name = max(zip(map(len, found), names, strict=True), key=lambda pair: pair[0], default=(0, ""))
        max_length = max_tokens(self.network)
        if truncate and length > max_length:
            long = [name for name, ids in zip(names, found, strict=True) if len(ids) > max_length]
            note_long(long[0], len(long), max_length, "truncate")
            return [ids[:max_length] for ids in found]
        if length > max_length:
            size = length + 2  # with begin and end tokens
            remedy = (
                f"shorten it, or load a model with rotary positions with max_length={size} (bionemo "
                f"analysis and evaluate: --max-length {size})"
            )
            raise too_long_error(name, length, max_length, remedy)
        return found

    def _per_sequence(self, texts: Sequences, name: str) -> Floats:
        found = [columns[name] for columns in self.compute(self.ids(texts), [name])]
        if found:
            return np.concatenate(found)
        return np.zeros(0 if name == "pseudo_perplexity" else (0, self.hidden_size), np.float32)


def _of_layer(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name}_{layer}"
