# SPDX-License-Identifier: Apache-2.0
"""Variants in HGVS notation equal those in one-letter code; examples of the HGVS Nomenclature and of MaveDB."""

import pytest

from bionemo.inference.variants import NoSubstitutionError, parse_mutations


@pytest.mark.parametrize(
    ("variant", "same"),
    [
        ("p.Lys2Ala", ["K2A"]),
        (" p.(Trp24Cys) ", ["W24C"]),
        ("p.K2A", ["K2A"]),
        ("p.[Lys2Ala;Val5Leu]", ["K2A", "V5L"]),
        ("p.[(Lys2Ala;Val5Leu;Glu7Asp)]", ["K2A", "V5L", "E7D"]),
        ("p.[Lys2=;Val5Leu]", ["K2K", "V5L"]),
        ("p.Lys2=", ["K2K"]),
        ("p.(Lys2=)", ["K2K"]),
        ("p.Xaa2Sec", ["X2U"]),
        ("p.Lys2_Val5=", []),  # valid for mavehgvs 0.8.1
        ("NP_000537.3:p.Arg175His", ["R175H"]),
        ("ENSP00000269305.4:p.[Lys2Ala;Val5Leu]", ["K2A", "V5L"]),
        ("p.=", []),
        ("p.(=)", []),
        ("_wt", []),
        ("_sy", []),
    ],
)
def test_hgvs_substitutions(variant: str, same: list[str]) -> None:
    assert [str(mutation) for mutation in parse_mutations(variant, "x:2")] == same


@pytest.mark.parametrize(
    "variant",
    [
        "p.Trp24Ter", "p.(Trp24*)", "W24*", "A2G:W24*", "p.[Lys2Ala;Trp24Ter]", "p.Ter110=", "p.Val7del",
        "p.(Lys23_Val25del)", "p.Cys28delinsTrpVal", "p.His4_Gln5insAla", "p.Lys23_Val25dup", "p.Arg97fs",
        "p.Arg97ProfsTer23", "p.(Tyr4*)", "p.Glu5ValfsTer5", "p.Met1ext-5", "p.Ter110GlnextTer17", "p.*110Glnext*17",
        "p.?", "p.Met1?", "p.0",
    ],
)  # fmt: skip
def test_other_variants_are_told_from_invalid_ones(variant: str) -> None:
    with pytest.raises(NoSubstitutionError, match=r"^x:2, .*: only substitutions can be scored: remove the variant$"):
        parse_mutations(variant, "x:2")
