# SPDX-License-Identifier: Apache-2.0
"""Rewritten SMILES denote the same molecule; a random SMILES depends only on its key."""

import re
import subprocess
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rdkit import Chem, rdBase
from rdkit.Chem import inchi
from scipy.stats import chisquare

from bionemo.common.random_stream import draw_runs
from bionemo.data.molecules.smiles import (
    SmilesRewriter,
    is_valid,
    pack,
    parse_smiles,
    remove_brackets,
    unpack,
    write_canonical,
    write_random,
)
from bionemo.preparation.molecules import unmapped_smiles
from tests.support.molecules import INVALID, INVALID_OR_EMPTY, MOLECULES, shared_molecules

rdBase.DisableLog("rdApp.*")
KEYS = [0, 1, 2**31 - 1, 2**64 - 1, 0x123456789ABCDEF0]


def check_molecule(text: str, keys: list[int]) -> None:
    """Compare the rewritten SMILES of one molecule with those of plain RDKit."""
    plain = Chem.MolFromSmiles(text)
    expected = Chem.MolToSmiles(plain)
    molecule = parse_smiles(text)
    assert write_canonical(molecule) == expected, text
    for key in keys:
        form = write_random(molecule, key)
        again = Chem.MolFromSmiles(form)
        assert Chem.MolToSmiles(again) == expected, (text, form)
        assert form.count(".") == expected.count("."), (text, form)
        assert write_random(parse_smiles(text), key) == form == write_random(unpack(pack(parse_smiles(text))), key), (
            text
        )
        if not set(text) & set("@/\\"):  # then even the text equals that of a fully parsed molecule
            assert form == write_random(plain, key), text
    assert write_canonical(molecule) == expected, text  # writing does not modify the molecule


@pytest.mark.parametrize("text", MOLECULES)
def test_random_smiles_denote_the_same_molecule(text: str) -> None:
    check_molecule(text, [*KEYS, *range(3, 30)])
    forms = {write_random(parse_smiles(text), key) for key in range(3)}
    assert {inchi.MolToInchi(Chem.MolFromSmiles(form)) for form in forms} == {
        inchi.MolToInchi(Chem.MolFromSmiles(text))
    }


def test_real_molecules() -> None:
    texts = shared_molecules()
    if not texts:
        pytest.skip("the shared folder is absent")
    for number, text in enumerate(texts):
        check_molecule(text, [number, number * 0x9E3779B97F4A7C15 % 2**64])
    forms = 0
    for text in texts:
        expected, molecule = Chem.CanonSmiles(text), parse_smiles(text)
        for key in range(9):
            assert Chem.CanonSmiles(write_random(molecule, key)) == expected, text
            forms += 1
    assert forms > 10_000


@settings(max_examples=60)
@given(st.sampled_from([text for text in MOLECULES if len(text) > 8]), st.integers(0, 2**64 - 1))
def test_random_smiles_of_random_smiles(text: str, key: int) -> None:
    form = write_random(parse_smiles(text), key)
    assert Chem.CanonSmiles(write_random(parse_smiles(form), key ^ 1)) == Chem.CanonSmiles(text)


@pytest.mark.parametrize("text", [*INVALID, "[", "C#C#C", "[Na", "c1ccccc1c", "C1=CC=C1c", "CC name", "C\n"])
def test_smiles_that_rdkit_rejects(text: str) -> None:
    plain = Chem.MolFromSmiles(text)
    assert (parse_smiles(text) is None) == (plain is None)
    if plain is not None:
        assert write_canonical(parse_smiles(text)) == Chem.MolToSmiles(plain)


ODD = ["[H]OC", "[2H]C", "C[0H]", "C[#1]", "C~C", "C$C", "[CH3:1]C", "*C", "CC |r|", "CC a name", "C1CC1->[Fe]",
       "[Pt@SP1](Cl)(Br)(F)I", "F[Co@OH5](Cl)(Br)(I)N", "[C@TH1](F)(Cl)(Br)I", "[CH4]", "[12CH4]",
       "[Hg]C"]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_unusual_smiles_are_parsed_like_rdkit(text: str) -> None:
    plain = Chem.MolFromSmiles(text)
    written = write_canonical(parse_smiles(text))
    assert written == write_canonical(unpack(pack(parse_smiles(text))))
    assert Chem.CanonSmiles(written) == Chem.MolToSmiles(plain)
    assert Chem.CanonSmiles(write_random(parse_smiles(text), 5)) == Chem.MolToSmiles(plain)


# SMILES of neighbours of metals, as RDKit before 2025.3 wrote them
NEIGHBOURS = [
    "[Mg+]c1ccccc1", "C[Zn]Br", "CC(=O)O[Na]", "N[Pt](N)(Cl)Cl", "C[Hg]C", "C/C=C/[Cu]", "CC[C@H](C)[Mg]Br",
    "CC#C[Li]", "Fc1ccc([Sn](C)(C)C)cn1", "[Cu]n1cccc1", "C1=CS[Ni]2(S1)SC=CS2", "O=C=[Fe]", "[K]OC(C)(C)C",
    "C1CCC([Mg]Br)CC1", "[Au]I", "OB(O)[Na]", "CP(C)(C)->[Pd]", "[Pd]<-n1ccccc1",
]  # fmt: skip
# their brackets state radicals, charges, isotopes, stereo, maps, hydrogen of aromatic nitrogen, or an unusual valence
NEEDED = ["[CH2][Mg]", "[N][Fe]", "CC[O].[Na]", "C[N-][Na]", "[13CH3][Mg]Br", "C[C@H](Cl)[Mg]Br", "[CH3:1][Zn]Cl",
          "[Li]c1ccc[nH]1", "[C-]#[N+][Ag]", "CC[C][Na]", "CO[PH](C)(OC)[Ca]"]  # fmt: skip


@pytest.mark.parametrize("text", [*NEIGHBOURS, *NEEDED])
def test_brackets_at_metals_are_those_that_are_needed(text: str) -> None:
    molecule = parse_smiles(text)
    brackets = Counter(re.findall(r"\[[^]]*\]", text))
    for written in (write_canonical(molecule), *(write_random(molecule, key) for key in range(9))):
        assert Counter(re.findall(r"\[[^]]*\]", written.replace("@@", "@"))) == brackets, written
        assert Chem.CanonSmiles(written) == Chem.CanonSmiles(text), written


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MOLECULES), st.sampled_from(["Li", "Na", "Mg", "Al", "Cu", "Zn", "Pd", "Sn", "Pt", "Hg"]),
    st.integers(0, 2), st.sampled_from(["SINGLE", "DOUBLE", "DATIVE"]), st.integers(0, 1), st.randoms(),
)  # fmt: skip
def test_brackets_at_random_metals(
    text: str, metal: str, charge: int, bond: str, radicals: int, random: Random
) -> None:
    """Without brackets, a molecule with a metal at a random atom is the same; one without metal does not change."""
    molecule = Chem.RWMol(Chem.MolFromSmiles(text))
    assert remove_brackets(Chem.MolToSmiles(molecule)) == Chem.MolToSmiles(molecule)
    atom = random.choice(list(molecule.GetAtoms()))
    number = molecule.AddAtom(Chem.Atom(metal))
    molecule.GetAtomWithIdx(number).SetFormalCharge(charge)
    molecule.AddBond(atom.GetIdx(), number, getattr(Chem.BondType, bond))
    atom.SetNumExplicitHs(max(atom.GetNumExplicitHs() - 1, 0))
    atom.SetNumRadicalElectrons(radicals)
    if Chem.SanitizeMol(molecule, catchErrors=True) or Chem.MolFromSmiles(Chem.MolToSmiles(molecule)) is None:
        return
    bracketed = Chem.MolToSmiles(molecule)
    before, after = (Chem.MolFromSmiles(each) for each in (bracketed, remove_brackets(bracketed)))
    assert Chem.MolToSmiles(after) == Chem.MolToSmiles(before)
    assert inchi.MolToInchi(after) == inchi.MolToInchi(before)


def test_distribution_of_random_smiles_equals_rdkits() -> None:
    for text in ("CCO", "CC(F)O", "c1ccoc1"):
        molecule = Chem.MolFromSmiles(text)
        possible = Counter(Chem.MolToRandomSmilesVect(molecule, 6000, randomSeed=7))
        keys = draw_runs(np.array([11], np.uint64), np.array([6000])).tolist()
        found = Counter(write_random(parse_smiles(text), key) for key in keys)
        assert found.keys() == possible.keys()
        common = [form for form in possible if possible[form] > 20]
        mine, theirs = ([counts[form] for form in common] for counts in (found, possible))
        pooled = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
        assert chisquare(mine, np.array(pooled) * sum(mine) / sum(pooled)).pvalue > 1e-6


def test_fragments_are_shuffled() -> None:
    firsts = Counter(write_random(parse_smiles("Cl.CCN.O"), key).split(".")[0] for key in range(600))
    assert firsts.keys() == {"Cl", "O", "CCN", "NCC", "C(C)N", "C(N)C"}
    assert min(firsts["Cl"], firsts["O"]) > 140


def test_random_smiles_are_the_same_in_another_process() -> None:
    texts = MOLECULES[-12:]
    here = [write_random(parse_smiles(text), 77) for text in texts]
    program = (
        "from bionemo.data.molecules.smiles import parse_smiles, write_random\n"
        f"texts = {texts!r}\n"
        "print([write_random(parse_smiles(text), 77) for text in reversed(texts)][::-1])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == repr(here)


@pytest.mark.parametrize("room", [0, 3_000, 1 << 20])
def test_the_cache_does_not_change_results(room: int) -> None:
    molecules = SmilesRewriter(room)
    for turn in range(3):
        for text in [*MOLECULES, *INVALID_OR_EMPTY][:: 1 if turn % 2 else -1]:
            expected = parse_smiles(text)
            first, second = molecules.randomize(text, turn), molecules.randomize(text, turn + 9)
            whole = molecules.canonicalize(text)
            if expected is None:
                assert first is second is whole is None
            else:
                assert (first, second) == (
                    write_random(parse_smiles(text), turn),
                    write_random(parse_smiles(text), turn + 9),
                )
                assert whole == write_canonical(expected)
                assert molecules.randomize(text, turn) == first


def test_the_cache_is_bounded() -> None:
    bounded, free = SmilesRewriter(5_000), SmilesRewriter()
    for text in MOLECULES:
        assert bounded.randomize(text, 1) == free.randomize(text, 1)
    assert len(free._packed) == len(MOLECULES)
    assert 0 < len(bounded._packed) < len(MOLECULES)
    assert sum(sys.getsizeof(text) + sys.getsizeof(data) for text, data in bounded._packed.items()) < 5_000


def test_fallback_to_canonical_smiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(molecule: object, key: int) -> str:
        raise RuntimeError("Pre-condition Violation")

    monkeypatch.setattr("bionemo.data.molecules.smiles.write_random", fail)
    assert SmilesRewriter().randomize("OCC", 1) == "CCO"


def test_rdkit_is_imported_on_first_use() -> None:
    program = (
        "import sys\nimport bionemo.data.molecules.dataset, bionemo.tokenizers\n"
        "from bionemo.data.molecules.smiles import SmilesRewriter, parse_smiles\nSmilesRewriter()\n"
        "assert 'rdkit' not in sys.modules\nparse_smiles('C')\nassert 'rdkit' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_molecule_too_large_for_rdkit_is_not_parsed() -> None:
    """Its recursion would end the process."""
    text = "C" * 30_000
    assert not is_valid(text) and parse_smiles(text) is None and unmapped_smiles(text) is None


@pytest.mark.parametrize("text", ["CC(=O)\u041e", "\uff2fCC", "CC\u041eC", "CCO\u200b"])
def test_letters_outside_ascii_are_invalid(text: str) -> None:
    """RDKit drops them at both ends, which gives another molecule."""
    assert not is_valid(text)
    assert parse_smiles(text) is None
