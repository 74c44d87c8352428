# SPDX-License-Identifier: Apache-2.0
"""A trained model and what it makes of texts: the methods that its users call.

Shapes: N sequences, n tokens of one without begin and end, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema import SamplingConfig
from bionemo.config.schema.infer import SamplingMethod
from bionemo.inference.batching import Ids, room, token_ids
from bionemo.inference.generation import way_to_reconstruct, way_to_sample, written
from bionemo.inference.outputs import Floats, Outputs, see_that_it_writes


class TrainedModel(Outputs):
    """A trained model, as `bionemo.load` gives it."""

    def embed(self, texts: Sequence[str], pooling: str = "mean") -> Floats:
        """One vector for each sequence, [N, D] fp32: the mean over its tokens, or that of its `begin` token.

        Raises:
            UserError: for a sequence that is empty, too long, or none; for `begin` where a model reads no such token.
        """
        name = {"mean": "embeddings", "begin": "begin"}.get(pooling)
        if name is None:
            raise UserError(f"pooling={pooling!r} is neither mean nor begin")
        return self._all(texts, name)

    def hiddens(self, texts: Sequence[str]) -> list[Floats]:
        """A vector for each token of each sequence, begin and end left out: N of [n, D] fp32.

        Raises:
            UserError: as `embed`.
        """
        return self._each(texts, "hiddens")

    def logits(self, texts: Sequence[str]) -> list[Floats]:
        """What the head says of each token: N of [n, V] fp32; of a causal model what comes after the token.

        Raises:
            UserError: as `embed`; for an encoder-decoder, whose head speaks of what it writes.
        """
        return self._each(texts, "logits")

    def pseudo_perplexity(self, texts: Sequence[str]) -> Floats:
        """How unlikely a sequence is, [N] fp32: exp(-1/n sum_i log p(x_i | the others)), n passes for each sequence.

        Salazar et al. 2020, "Masked Language Model Scoring", equation 3; of a causal model p(x_i | those before),
        the first token left out.

        Raises:
            UserError: as `logits`.
        """
        return self._all(texts, "pseudo_perplexity")

    def reconstruct(self, texts: Sequence[str], beam_size: int = 1) -> list[str]:
        """What the decoder writes of each molecule that was read: N SMILES, greedily or the best of a beam search.

        Raises:
            UserError: as `embed`; for a model that does not write what it has read.
        """
        see_that_it_writes(self.network, "reconstruction")
        return [each for (each,) in written(self, self.ids(texts), way_to_reconstruct(beam_size))]

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
        """Molecules near each that was read: SMILES written from its vectors and normal noise, by v1's methods.

        What is drawn is a function of the seed, the text's place in the list, and the sample's number.

        Args:
            texts: N SMILES.
            sampling_method: `greedy-perturbate`, `topkp-perturbate` (tokens are drawn), `beam-search-perturbate` (the
                best beam), each once for every perturbation; `beam-search-perturbate-sample` (all beams of each);
                `beam-search-single-sample` (num_samples beams of one perturbation).
            num_samples: perturbations, or beams of a single one.
            scaled_radius: standard deviation of the noise.
            top_k: so many of the likeliest tokens are drawn from; 0: all.
            top_p: or those that together have this probability; 0: all.
            temperature: below 1 likely tokens become likelier.
            beam_size: beams of each perturbation.
            beam_alpha: length penalty of a search.
            seed: of what is drawn.

        Returns:
            N of num_samples SMILES, of `beam-search-perturbate-sample` num_samples times beam_size.

        Raises:
            UserError: as `reconstruct`; for values that cannot be.
        """
        config = SamplingConfig(
            sampling_method=sampling_method, num_samples=num_samples, scaled_radius=scaled_radius, top_k=top_k,
            top_p=top_p, temperature=temperature, beam_size=beam_size, beam_alpha=beam_alpha, seed=seed,
        )  # fmt: skip
        see_that_it_writes(self.network, "samples")
        return written(self, self.ids(texts), way_to_sample(config))

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Tokens of sequences, without begin and end.

        Raises:
            UserError: for one that is empty, too long, or none.
        """
        found = [token_ids(self.network.vocabulary, text, f"sequence {n}") for n, text in enumerate(texts)]
        most = room(self.network)
        for number, each in enumerate(found):
            if len(each) > most:
                raise UserError(
                    f"sequence {number} has {len(each):,} tokens, the model reads {most:,} at most: cut it, or let "
                    "`python -m bionemo.predict` do so (model.data.long_sequences)"
                )
        return found

    def _all(self, texts: Sequence[str], name: str) -> Floats:
        found = [columns[name] for columns in self.compute(self.ids(texts), [name])]
        return np.concatenate(found) if found else np.zeros((0, self.hidden_size), np.float32)

    def _each(self, texts: Sequence[str], name: str) -> list[Floats]:
        ids = self.ids(texts)
        parts = [columns[name] for columns in self.compute(ids, [name])]
        lengths = [len(each) for each in ids]
        return np.split(np.concatenate(parts), np.cumsum(lengths)[:-1]) if parts else []
