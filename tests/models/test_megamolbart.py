# SPDX-License-Identifier: Apache-2.0
"""SMILES in, SMILES out, and what a validation says of them."""

import numpy as np
import pytest
import torch

from bionemo.config.compose import load
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.molecules.smiles import same_molecule
from bionemo.models import megamolbart
from bionemo.models.decoding import Written, beam_search, greedy, sampled, write
from bionemo.models.megamolbart import MegaMolBART
from tests.conftest import ROOT
from tests.models.test_parity import ours
from tests.training.runs import FAMILIES, TINY


@pytest.fixture(scope="module")
def model() -> MegaMolBART:
    found = ours("megamolbart").eval()
    assert isinstance(found, MegaMolBART)
    return found


def test_what_the_encoder_reads(model: MegaMolBART) -> None:
    """A mask stands between tokens, wherever it is written; the text of no other special token is one."""
    token = model.vocabulary.tokens.index
    batch = model.source_of(["CCl", "<MASK>c1", "C<MASK><MASK>", "^&"])
    mask, unknown = model.vocabulary.mask_id, model.vocabulary.unk_id
    expected = [[token("C"), token("Cl")], [mask, token("c"), token("1")], [token("C"), mask, mask], [unknown] * 2]
    pieces = batch.tokens[: batch.num_tokens].split(batch.lengths)
    assert [piece.tolist() for piece in pieces] == expected
    with pytest.raises(ValueError, match="97 tokens, of at most 96"):
        model.source_of(["C" * 97])


def test_every_way_to_write_gives_smiles(model: MegaMolBART) -> None:
    """From a masked SMILES, and from its embedding changed a little."""
    with torch.no_grad():
        memory = model.encode(model.source_of(["CCO<MASK>", "c1ccccc1"]))
    generator = torch.Generator().manual_seed(0)
    moved = memory._replace(hidden=memory.hidden + 0.1 * torch.randn(memory.hidden.shape, generator=generator))
    keys = np.array([1, 2], np.uint64)
    for choose in (greedy, sampled(keys, top_k=5), sampled(keys, top_p=0.9)):
        written = write(model, moved, choose, longest=9)
        assert [len(each.tokens) <= 9 for each in written] == [True, True]
        assert model.smiles_of(written) == [
            "".join(model.vocabulary.tokens[i] for i in each.tokens) for each in written
        ]
    beams = beam_search(model, moved, 3, longest=9)
    assert [len(each) for each in beams] == [3, 3]


def batch_of(model: MegaMolBART, records: range) -> PackedBatch:
    """Molecules of a validation set."""
    family = FAMILIES["megamolbart"]
    cfg = load(family.name, [*TINY, *family.words, "model.seq_length=96"], family.directory / "conf")
    samples = MegaMolBART.samples.open(cfg.model, model.vocabulary, "val")
    collate = Collator(samples, 6, model.vocabulary.pad_id, compact=True)
    return collate([(np.zeros(1, np.int64), np.array([record])) for record in records])


def test_what_a_validation_counts(model: MegaMolBART, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(model, range(6))
    targets = np.split(batch.target_ids.numpy(), np.cumsum(batch.lengths)[:-1])
    texts = [model.vocabulary.text(target) for target in targets]
    # as they are wanted; in another form; another molecule; none at all; cut off in a ring
    said = [texts[0], "OCC", "CCN", "", "c1ccccc", texts[5]]
    assert texts[1] == "CCO"
    tokens = [[int(token) for token in model.vocabulary.encode(text)] for text in said]
    monkeypatch.setattr(megamolbart, "write", lambda *_: [Written(each, 0.0, True) for each in tokens])
    found = model.evaluate(batch)
    assert found["molecular_accuracy"].tolist() == [3, 6]
    assert found["percent_invalid"].tolist() == [2, 6]
    with torch.no_grad():
        right = int((model(batch).argmax(-1) == batch.target_ids).sum())
    assert found["character_accuracy"].tolist() == [right, len(batch.target_ids)]


def test_two_smiles_are_compared_as_molecules() -> None:
    assert same_molecule("OCC", "CCO") is True
    assert same_molecule("C[C@H](N)O", "C[C@@H](N)O") is False
    assert same_molecule("C(", "CCO") is None
    assert same_molecule("", "CCO") is None
    assert same_molecule("CCO", "C(") is False


def test_of_a_batch_without_molecules_nothing_is_told(model: MegaMolBART) -> None:
    nothing, something = (model.evaluate(batch_of(model, range(size))) for size in (0, 2))
    assert list(nothing) == list(something)
    assert [sums.tolist() for sums in nothing.values()] == [[0, 0]] * 3


REACTIONS = """reaction_type,set,reactants,products
<RX_1>,train,CCO.CC(=O)O,CCOC(C)=O
<RX_2>,train,NCC.CC(=O)Cl,CCNC(C)=O
<RX_1>,train,OC.CC(=O)O,COC(C)=O
"""


def test_reactions_are_read_from_the_product(tmp_path, model: MegaMolBART) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / "processed" / split).mkdir(parents=True)
        (tmp_path / "processed" / split / "data.csv").write_text(REACTIONS)
    words = [*TINY, f"model.data.dataset_path={tmp_path}", "trainer.devices=1", "trainer.precision=32"]
    cfg = load("downstream_retro_uspto50k", words, ROOT / "examples" / "molecule" / "megamolbart" / "conf")
    samples = MegaMolBART.samples.open(cfg.model, model.vocabulary, "train")
    batch = Collator(samples, 3, 0, compact=True)([(np.zeros(1, np.int64), np.array([i])) for i in range(3)])
    assert batch.source is not None
    read = batch.source.tokens[: batch.source.num_tokens].split(batch.source.lengths)
    said = np.split(batch.target_ids.numpy(), np.cumsum(batch.lengths)[:-1])
    assert [model.vocabulary.decode(piece.tolist()) for piece in read] == ["CCOC(C)=O", "CCNC(C)=O", "COC(C)=O"]
    assert [model.vocabulary.text(piece) for piece in said] == ["CCO.CC(=O)O", "NCC.CC(=O)Cl", "OC.CC(=O)O"]
