# SPDX-License-Identifier: Apache-2.0
"""What a step computes: a model as stacks of layers, what each of them reads, and with which numbers."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bionemo.planning.lengths import Tokens
from bionemo.planning.sizes import Kind, Shape

Kernel = Literal["flash", "sequences", "probabilities", "tiles"]


class Attention(NamedTuple):
    """An attention of a layer, over a micro-batch.

    Attributes:
        queries: tokens that attend.
        keys: tokens that are attended to.
        pairs: of a token and one of the sequence that it attends to.
        seen: those of them that no mask takes away.
        longest: pairs of the longest sequence.
        cross: whether the keys are the encoder's.
    """

    queries: int
    keys: int
    pairs: float
    seen: float
    longest: int
    cross: bool

    @property
    def causal(self) -> bool:
        """Whether later tokens are hidden."""
        return self.seen < self.pairs


@dataclass(frozen=True)
class Stack:
    """Layers of one kind.

    Attributes:
        kind: of its layers.
        tokens: that it reads.
        memory: what a decoder attends to beside: the tokens of its encoder.
    """

    kind: Kind
    tokens: Tokens
    memory: Tokens | None = None

    def attentions(self, rows: int) -> list[Attention]:
        """Those of a layer, in the order in which they compute, for a micro-batch of so many rows."""
        count, held = self.tokens.count(rows), self.tokens.held(rows)
        pairs = held * self.tokens.attended
        seen = pairs if self.kind == "encoder" else (pairs + held) / 2
        longest = self.tokens.longest
        found = [Attention(count, count, pairs, seen, longest**2, cross=False)]
        if self.memory:
            crossed = held * self.tokens.crossed
            most = longest * self.memory.longest
            found.append(Attention(count, self.memory.count(rows), crossed, crossed, most, cross=True))
        return found


@dataclass(frozen=True)
class Step:
    """What memory and FLOPs of a step depend on beside the layout.

    Attributes:
        shape: of the model.
        tokens: of a row, as each stack reads them.
        half: whether matrix products are in bf16 or fp16.
        deterministic: whether torch is told to be.
        tiles: bytes of the numbers in which cpu_attention.py computes; 0: on a GPU.
    """

    shape: Shape
    tokens: tuple[Tokens, ...]
    half: bool
    deterministic: bool = False
    tiles: int = 0

    @property
    def stacks(self) -> list[Stack]:
        """The stacks of the model, in the order in which they compute."""
        memories = (None, *self.tokens)  # a decoder comes behind its encoder
        return [Stack(*each) for each in zip(self.shape.stacks, self.tokens, memories, strict=False)]

    @property
    def read(self) -> float:
        """Tokens of the sequences of a row, by the stack that reads them first."""
        return self.tokens[0].held(1)

    def crowded(self, rows: int) -> "Step":
        """The same with a micro-batch as large as they get, where the tokens of its rows differ."""
        return replace(self, tokens=tuple(tokens.crowded(rows) for tokens in self.tokens))

    @property
    def element(self) -> int:
        """Bytes of an element between matrix products."""
        return 2 if self.half else 4

    @property
    def kernel(self) -> Kernel:
        """Which attention a run computes with: see `attend` in megatron/attention.py."""
        if self.tiles:
            return "tiles"
        if self.shape.attention_dropout:
            return "probabilities"
        return "flash" if self.half and not self.deterministic else "sequences"
