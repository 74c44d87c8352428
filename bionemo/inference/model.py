# SPDX-License-Identifier: Apache-2.0
"""A trained model with methods that take texts.

Shapes: N sequences, n tokens of one without begin and end, D hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.config.schema import SamplingConfig
from bionemo.config.schema.infer import SamplingMethod
from bionemo.data.letters import note_letters
from bionemo.inference.batching import Ids, max_tokens, tokenize, too_long_error
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.generation import generate, reconstruction, sampling
from bionemo.inference.long_sequences import note_long
from bionemo.inference.outputs import InferenceModel, check_generates
from bionemo.inference.protein import tokenize_protein
from bionemo.inference.variants import AMINO_ACIDS, scan, score_variants

if TYPE_CHECKING:
    from pandas import DataFrame

Sequences = str | Ids | Sequence[str | Ids]
"""One text or several, or token ids as `TrainedModel.ids` returns them, for example with some replaced by
`vocabulary.mask_id`."""


class TrainedModel(InferenceModel):
    """A trained model, as `bionemo.load` returns it.

    Methods take one sequence or a list of N; for one sequence, they return one result instead of N. Tensors are fp32,
    on the CPU.
    """

    @property
    def alphabet(self) -> list[str]:
        """The V tokens: names of the columns of logits."""
        return list(self.network.vocabulary.tokens)

    def embed(self, sequences: Sequences, pooling: str = "mean", layer: int | None = None) -> Tensor:
        """Return a vector for each sequence, [N, D]: the mean over its tokens, or that of its `begin` token.

        Args:
            sequences: one sequence, or N; tokens do not include begin and end tokens.
            pooling: `mean` or `begin`.
            layer: 0: the embeddings before the first layer; L, the number of layers, or None: the last hidden states,
                after the final layer norm. These are the numbers of transformers' `hidden_states` and of fair-esm.

        Raises:
            UserError: if a sequence is empty, too long or invalid, or the model has no begin token or no such layer.
        """
        name = {"mean": "embeddings", "begin": "begin"}.get(pooling)
        if name is None:
            raise UserError(f"pooling={pooling!r} is not one of mean, begin")
        return self._per_sequence(sequences, *_of_layers(name, layer))

    def hidden_states(
        self, sequences: Sequences, layers: int | Iterable[int] | None = None
    ) -> Tensor | list[Tensor]:  # fmt: skip
        """Return a vector for each token except begin and end: N tensors [n, D], or [layers, n, D] if several.

        `layers` is a number, several, or None for the last; numbers and errors as in `embed`.
        """
        return self._per_token(sequences, "hiddens", layers)

    def attentions(self, sequences: Sequences, layers: int | Iterable[int]) -> Tensor | list[Tensor]:
        """Return attention maps: N tensors [heads, n, n], or [layers, heads, n, n] if several; rows are queries.

        Layers are numbered from 1. Rows and columns of begin and end tokens are left out after the softmax. Errors as
        in `embed`.
        """
        return self._per_token(sequences, "attentions", layers)

    def logits(self, sequences: Sequences) -> Tensor | list[Tensor]:
        """Return the logits at each token: N tensors [n, V]. Those of a causal model predict the next token.

        Errors as in `embed`; also for encoder-decoder models.
        """
        return self._per_token(sequences, "logits", None)

    def pseudo_perplexity(self, sequences: Sequences) -> Tensor:
        """Return the pseudo-perplexity, [N]: exp(-1/n sum_i log p(x_i | all other tokens)), in n forward passes.

        Salazar et al. 2020, "Masked Language Model Scoring", equation 3. For a causal model it is the perplexity
        without the first token. Errors as in `logits`.
        """
        return self._per_sequence(sequences, "pseudo_perplexity")

    def score_variants(
        self, sequence: str, variants: str | Sequence[str], method: str = "masked-marginal", offset: int = 0
    ) -> Tensor:
        """Score variants of a protein, [variants], in nats; one above 0 is likelier than the wild type.

        Args:
            sequence: the wild type.
            variants: one or several, such as `A24G`, or `A24G:L30P` with two substitutions.
            method: `masked-marginal`, `wild-type-marginal` or `pseudo-perplexity`, see
                `bionemo.inference.variants.score_variants`.
            offset: the first residue has the number 1 + offset.

        Raises:
            UserError: if the model is not a masked language model, a variant does not match the sequence, or the
                sequence is empty, too long or invalid.
        """
        several = [variants] if isinstance(variants, str) else [*variants]
        scores = score_variants(self, sequence, several, method, offset)
        self.ids(sequence, ["the sequence"])  # notes letters that the model does not know
        return torch.tensor(_like(variants, scores))

    def scan(self, sequence: str, method: str = "masked-marginal", offset: int = 0) -> "DataFrame":
        """Score all substitutions of a protein: a row for each residue, such as `M1`, and a column for each of 20.

        Arguments and errors as in `score_variants`; the method is a marginal.
        """
        from pandas import DataFrame  # takes half a second

        letters = enumerate(tokenize_protein(self, sequence).letters, 1 + offset)
        self.ids(sequence, ["the sequence"])
        rows = [f"{letter}{number}" for number, letter in letters]
        return DataFrame(scan(self, sequence, method), rows, [*AMINO_ACIDS])

    def contacts(self, sequence: str) -> Tensor:
        """Return the probability that two residues are in contact (C-beta atoms less than 8 A apart), [n, n].

        The attribute `contact_head` can be set to one that `bionemo.analysis.contacts` fits or reads.

        Raises:
            UserError: if the model is not a masked language model or has no contact head, or the sequence is empty,
                too long or invalid.
        """
        found = predict_contacts(self, sequence)
        self.ids(sequence, ["the sequence"])
        return torch.from_numpy(found)

    def reconstruct(self, texts: str | Sequence[str], beam_size: int = 1) -> Any:
        """Decode each molecule again: N SMILES, by greedy decoding or the best of a beam search.

        Errors as in `embed`; also for models that do not decode molecules.
        """
        check_generates(self.network, "reconstruction")
        return _like(texts, [smiles for (smiles,) in generate(self, self.ids(texts), reconstruction(beam_size))])

    def sample(
        self,
        texts: str | Sequence[str],
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
    ) -> Any:
        """Sample molecules near each input: SMILES decoded from its vectors plus normal noise, with v1's methods.

        The samples are a function of the seed, the position of the input in the list, and the number of the sample.

        Args:
            texts: one SMILES, or N.
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
        return _like(texts, generate(self, self.ids(texts), sampling(config)))

    generate = sample  # the name in transformers

    def ids(self, texts: Sequences, names: Sequence[str] | None = None, truncate: bool = False) -> list[Ids]:
        """Tokenize N sequences, without begin and end tokens; `names` are for messages. Token ids remain unchanged.

        The result is a list for one sequence, too.

        Letters that the model does not know are logged, once for all sequences, and so are sequences that are too long
        if `truncate` is true.

        Raises:
            UserError: if one is empty, too long or invalid.
        """
        texts = [texts] if isinstance(texts, str | np.ndarray) else texts
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
            size = length + 2  # with begin and end tokens
            remedy = f"; a maximum length of {size} accepts all (--max-length={size})" if self.network.rotary else ""
            note_long(long[0], len(long), max_length, "truncate", remedy)
            return [ids[:max_length] for ids in found]
        if length > max_length:
            size = length + 2  # with begin and end tokens
            remedy = (
                f"shorten it, or load a model with rotary positions with max_length={size} (bionemo "
                f"analysis and evaluate: --max-length {size})"
            )
            raise too_long_error(name, length, max_length, remedy)
        return found

    def _per_sequence(self, sequences: Sequences, name: str) -> Tensor:
        found = [columns[name] for columns in self.compute(self.ids(sequences), [name])]
        empty = np.zeros(0 if name == "pseudo_perplexity" else (0, self.hidden_size), np.float32)
        return torch.tensor(_like(sequences, np.concatenate(found or [empty])))

    def _per_token(self, sequences: Sequences, kind: str, layers: int | Iterable[int] | None) -> Any:
        found = self.compute_per_token(self.ids(sequences), *_of_layers(kind, layers))
        rows = [np.stack(row) if isinstance(layers, Iterable) else row[0] for row in zip(*found, strict=True)]
        return _like(sequences, [*map(torch.from_numpy, rows)])


def _of_layers(kind: str, layers: int | Iterable[int] | None) -> list[str]:
    """Return the names of the outputs of one layer or several, see `InferenceModel.compute`."""
    numbers = [*layers] if isinstance(layers, Iterable) else [layers]
    if not numbers:
        raise UserError("layers is empty: name at least one")
    return [kind if number is None else f"{kind}_{number}" for number in numbers]


def _like(sequences: Sequences, found: Any) -> Any:
    """Return the only item of `found` for one sequence, all for a list."""
    return found[0] if isinstance(sequences, str | np.ndarray) else found
