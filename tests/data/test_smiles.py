# SPDX-License-Identifier: Apache-2.0
"""Whatever is written is the same molecule to RDKit; a key decides the form, and nothing else does."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rdkit import Chem, rdBase
from rdkit.Chem import inchi
from scipy.stats import chisquare

from bionemo.common.random_stream import draw_runs
from bionemo.data.molecules.smiles import Molecules, canonical, randomised, read, remembered, restored
from tests.molecules import MOLECULES, REFUSED, REFUSED_OR_EMPTY, shared_molecules

rdBase.DisableLog("rdApp.*")
KEYS = [0, 1, 2**31 - 1, 2**64 - 1, 0x123456789ABCDEF0]


def check_molecule(text: str, keys: list[int]) -> None:
    """Compare everything about one molecule with what plain RDKit says of it."""
    plain = Chem.MolFromSmiles(text)
    expected = Chem.MolToSmiles(plain)
    molecule = read(text)
    assert canonical(molecule) == expected, text
    for key in keys:
        form = randomised(molecule, key)
        again = Chem.MolFromSmiles(form)
        assert Chem.MolToSmiles(again) == expected, (text, form)
        assert form.count(".") == expected.count("."), (text, form)
        assert randomised(read(text), key) == form == randomised(restored(remembered(read(text))), key), text
        if not set(text) & set("@/\\"):  # then not even the form differs from the one of a molecule read in full
            assert form == randomised(plain, key), text
    assert canonical(molecule) == expected, text  # not changed by being written


@pytest.mark.parametrize("text", MOLECULES)
def test_every_form_is_the_same_molecule(text: str) -> None:
    check_molecule(text, [*KEYS, *range(3, 30)])
    forms = {randomised(read(text), key) for key in range(3)}
    assert {inchi.MolToInchi(Chem.MolFromSmiles(form)) for form in forms} == {
        inchi.MolToInchi(Chem.MolFromSmiles(text))
    }


def test_real_molecules_stay_the_same() -> None:
    texts = shared_molecules()
    if not texts:
        pytest.skip("the shared folder is absent")
    for number, text in enumerate(texts):
        check_molecule(text, [number, number * 0x9E3779B97F4A7C15 % 2**64])
    forms = 0
    for text in texts:
        expected, molecule = Chem.CanonSmiles(text), read(text)
        for key in range(9):
            assert Chem.CanonSmiles(randomised(molecule, key)) == expected, text
            forms += 1
    assert forms > 10_000


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([text for text in MOLECULES if len(text) > 8]), st.integers(0, 2**64 - 1))
def test_forms_of_forms_stay_the_same(text: str, key: int) -> None:
    form = randomised(read(text), key)
    assert Chem.CanonSmiles(randomised(read(form), key ^ 1)) == Chem.CanonSmiles(text)


@pytest.mark.parametrize("text", [*REFUSED, "[", "C#C#C", "[Na", "c1ccccc1c", "C1=CC=C1c", "CC name", "C\n"])
def test_what_rdkit_refuses_is_refused(text: str) -> None:
    plain = Chem.MolFromSmiles(text)
    assert (read(text) is None) == (plain is None)
    if plain is not None:
        assert canonical(read(text)) == Chem.MolToSmiles(plain)


ODD = ["[H]OC", "[2H]C", "C[0H]", "C[#1]", "C~C", "C$C", "[CH3:1]C", "*C", "CC |r|", "CC a name", "C1CC1->[Fe]",
       "[Pt@SP1](Cl)(Br)(F)I", "F[Co@OH5](Cl)(Br)(I)N", "[C@TH1](F)(Cl)(Br)I", "[CH4]", "[12CH4]",
       "[Hg]C"]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_are_read_as_rdkit_reads_them(text: str) -> None:
    plain = Chem.MolFromSmiles(text)
    assert canonical(read(text)) == canonical(restored(remembered(read(text)))) == Chem.MolToSmiles(plain)
    assert Chem.CanonSmiles(randomised(read(text), 5)) == Chem.MolToSmiles(plain)


def test_every_form_that_rdkit_knows_comes_and_about_as_often() -> None:
    for text in ("CCO", "CC(F)O", "c1ccoc1"):
        molecule = Chem.MolFromSmiles(text)
        possible = Counter(Chem.MolToRandomSmilesVect(molecule, 6000, randomSeed=7))
        keys = draw_runs(np.array([11], np.uint64), np.array([6000])).tolist()
        found = Counter(randomised(read(text), key) for key in keys)
        assert found.keys() == possible.keys()
        common = [form for form in possible if possible[form] > 20]
        mine, theirs = ([counts[form] for form in common] for counts in (found, possible))
        pooled = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
        assert chisquare(mine, np.array(pooled) * sum(mine) / sum(pooled)).pvalue > 1e-6


def test_fragments_come_in_any_order() -> None:
    firsts = Counter(randomised(read("Cl.CCN.O"), key).split(".")[0] for key in range(600))
    assert firsts.keys() == {"Cl", "O", "CCN", "NCC", "C(C)N", "C(N)C"}
    assert min(firsts["Cl"], firsts["O"]) > 140


def test_a_form_is_the_same_in_another_process_and_whatever_was_drawn_before() -> None:
    texts = MOLECULES[-12:]
    here = [randomised(read(text), 77) for text in texts]
    program = (
        "from bionemo.data.molecules.smiles import randomised, read\n"
        f"texts = {texts!r}\n"
        "print([randomised(read(text), 77) for text in reversed(texts)][::-1])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == repr(here)


@pytest.mark.parametrize("room", [0, 3_000, 1 << 20])
def test_what_is_remembered_changes_nothing(room: int) -> None:
    molecules = Molecules(room)
    for turn in range(3):
        for text in [*MOLECULES, *REFUSED_OR_EMPTY][:: 1 if turn % 2 else -1]:
            expected = read(text)
            first, second = molecules.randomised(text, turn), molecules.randomised(text, turn + 9)
            whole = molecules.canonical(text)
            if expected is None:
                assert first is second is whole is None
            else:
                assert (first, second) == (randomised(read(text), turn), randomised(read(text), turn + 9))
                assert whole == canonical(expected)
                assert molecules.randomised(text, turn) == first


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    bounded, free = Molecules(5_000), Molecules()
    for text in MOLECULES:
        assert bounded.randomised(text, 1) == free.randomised(text, 1)
    assert len(free._packed) == len(MOLECULES)
    assert 0 < len(bounded._packed) < len(MOLECULES)
    assert sum(sys.getsizeof(text) + sys.getsizeof(data) for text, data in bounded._packed.items()) < 5_000


def test_an_order_that_rdkit_cannot_write_becomes_the_canonical_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(molecule: object, key: int) -> str:
        raise RuntimeError("Pre-condition Violation")

    monkeypatch.setattr("bionemo.data.molecules.smiles.randomised", fail)
    assert Molecules().randomised("OCC", 1) == "CCO"


def test_rdkit_is_loaded_when_a_molecule_is_read_and_not_before() -> None:
    program = (
        "import sys\nimport bionemo.data.molecules.dataset, bionemo.tokenizers\n"
        "from bionemo.data.molecules.smiles import Molecules, read\nMolecules()\n"
        "assert 'rdkit' not in sys.modules\nread('C')\nassert 'rdkit' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
