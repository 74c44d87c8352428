# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART: generation and validation metrics."""

import numpy as np
import pytest
import torch

from bionemo.config.compose import load
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.data.molecules.smiles import same_molecule
from bionemo.models import megamolbart
from bionemo.models.decoding import GeneratedSequence, beam_search, generate, make_sampler, select_greedy
from bionemo.models.megamolbart import MegaMolBART
from tests.conftest import ROOT
from tests.support.models import build_model
from tests.support.runs import FAMILIES, TINY


@pytest.fixture(scope="module")
def model() -> MegaMolBART:
    found = build_model("megamolbart").eval()
    assert isinstance(found, MegaMolBART)
    return found


def source_of(model: MegaMolBART, texts: list[str]) -> PackedBatch:
    """Return the tokens of SMILES as the encoder reads them; `<MASK>` stands for a span."""
    mask = np.array([model.vocabulary.mask_id], np.uint16)
    pieces = [[part for piece in text.split("<MASK>") for part in (mask, model.vocabulary.encode(piece))][1:]
              for text in texts]  # fmt: skip
    ids = [np.concatenate(parts) for parts in pieces]
    return TokenizedBatch(TokenSequences(np.concatenate(ids), np.array([len(each) for each in ids]), 96)).unpack()


def test_encoder_input(model: MegaMolBART) -> None:
    """The letters of BOS and EOS in a text are unknown tokens; masks may be anywhere."""
    token = model.vocabulary.tokens.index
    batch = source_of(model, ["CCl", "<MASK>c1", "C<MASK><MASK>", "^&"])
    mask, unknown = model.vocabulary.mask_id, model.vocabulary.unk_id
    assert not {token("^"), token("&")} & {mask, unknown}
    expected = [[token("C"), token("Cl")], [mask, token("c"), token("1")], [token("C"), mask, mask], [unknown] * 2]
    pieces = batch.tokens[: batch.num_tokens].split(batch.lengths)
    assert [piece.tolist() for piece in pieces] == expected


def test_every_generation_method_returns_smiles(model: MegaMolBART) -> None:
    """Start from the perturbed encoder output of a masked SMILES."""
    with torch.no_grad():
        memory = model.encode(source_of(model, ["CCO<MASK>", "c1ccccc1"]))
    generator = torch.Generator().manual_seed(0)
    moved = memory._replace(hidden=memory.hidden + 0.1 * torch.randn(memory.hidden.shape, generator=generator))
    keys = np.array([1, 2], np.uint64)
    for choose in (select_greedy, make_sampler(keys, top_k=5), make_sampler(keys, top_p=0.9)):
        written = generate(model, moved, choose, max_length=9)
        assert [len(each.tokens) <= 9 for each in written] == [True, True]
        assert model.decode_smiles(written) == [
            "".join(model.vocabulary.tokens[i] for i in each.tokens) for each in written
        ]
    beams = beam_search(model, moved, 3, max_length=9)
    assert [len(each) for each in beams] == [3, 3]


def batch_of(model: MegaMolBART, records: range) -> PackedBatch:
    """Return a batch of validation molecules."""
    family = FAMILIES["megamolbart"]
    cfg = load(family.name, [*TINY, *family.overrides, "model.seq_length=96"], family.directory / "conf")
    samples = MegaMolBART.dataset.open(cfg.model, model.vocabulary, "val")
    collate = Collator(samples, 6, model.vocabulary.pad_id, dynamic_padding=True)
    return collate([[(np.zeros(1, np.int64), np.array([record])) for record in records]])[0].unpack()


def test_metrics(model: MegaMolBART, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(model, range(6))
    targets = np.split(batch.target_ids.numpy(), np.cumsum(batch.lengths)[:-1])
    texts = [model.vocabulary.decode_output(target) for target in targets]
    # equal to the target; another SMILES of it; another molecule; empty; truncated in a ring
    texts_to_decode = [texts[0], "OCC", "CCN", "", "c1ccccc", texts[5]]
    assert texts[1] == "CCO"
    tokens = [[int(token) for token in model.vocabulary.encode(text)] for text in texts_to_decode]
    monkeypatch.setattr(megamolbart, "generate", lambda *_: [GeneratedSequence(each, 0.0, True) for each in tokens])
    found = model.compute_metrics(batch)
    assert found["molecular_accuracy"].tolist() == [3, 6]
    assert found["percent_invalid"].tolist() == [2, 6]
    with torch.no_grad():
        right = int((model(batch).argmax(-1) == batch.target_ids).sum())
    assert found["character_accuracy"].tolist() == [right, len(batch.target_ids)]


def test_same_molecule() -> None:
    assert same_molecule("OCC", "CCO") is True
    assert same_molecule("C[C@H](N)O", "C[C@@H](N)O") is False
    assert same_molecule("C(", "CCO") is None
    assert same_molecule("", "CCO") is None
    assert same_molecule("CCO", "C(") is False


def test_metrics_of_an_empty_batch(model: MegaMolBART) -> None:
    nothing, something = (model.compute_metrics(batch_of(model, range(size))) for size in (0, 2))
    assert list(nothing) == list(something)
    assert [sums.tolist() for sums in nothing.values()] == [[0, 0]] * 3


REACTIONS = """reaction_type,set,reactants,products
<RX_1>,train,CCO.CC(=O)O,CCOC(C)=O
<RX_2>,train,NCC.CC(=O)Cl,CCNC(C)=O
<RX_1>,train,OC.CC(=O)O,COC(C)=O
"""


def test_retrosynthesis_reads_products_and_predicts_reactants(tmp_path, model: MegaMolBART) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / "processed" / split).mkdir(parents=True)
        (tmp_path / "processed" / split / "data.csv").write_text(REACTIONS)
    overrides = [*TINY, f"model.data.dataset_path={tmp_path}", "trainer.devices=1", "trainer.precision=32"]
    cfg = load("downstream_retro_uspto50k", overrides, ROOT / "examples" / "molecule" / "megamolbart" / "conf")
    samples = MegaMolBART.dataset.open(cfg.model, model.vocabulary, "train")
    samples_of = [(np.zeros(1, np.int64), np.array([i])) for i in range(3)]
    (compact,) = Collator(samples, 3, 0, dynamic_padding=True)([samples_of])
    batch = compact.unpack()
    assert batch.source is not None
    read = batch.source.tokens[: batch.source.num_tokens].split(batch.source.lengths)
    targets = np.split(batch.target_ids.numpy(), np.cumsum(batch.lengths)[:-1])
    assert [model.vocabulary.decode(piece.tolist()) for piece in read] == ["CCOC(C)=O", "CCNC(C)=O", "COC(C)=O"]
    assert [model.vocabulary.decode_output(piece) for piece in targets] == [
        "CCO.CC(=O)O",
        "NCC.CC(=O)Cl",
        "OC.CC(=O)O",
    ]
