# SPDX-License-Identifier: Apache-2.0
"""Overrides of a command line keep their meaning."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from bionemo.config.compose import load
from bionemo.config.overrides import quote_if_needed, rewrite_override
from bionemo.config.text_values import text_kept
from tests.conftest import EXAMPLES

FILES = "model.data.dataset.train"


def parse(key, value):
    """Return the value that Hydra parses after our rewriting."""
    with text_kept():
        return OverridesParser.create().parse_override(f"{key}={quote_if_needed(key, value, sweep=False)}").value()


@pytest.mark.parametrize(
    "value",
    [
        "x000",
        "x[000..099]",
        "x(000..099)",
        "x<000..099>",
        "x{000..099}",
        "x_OP_000..009_CL_",
        "x[000,003]",
        "007",
        "000",
        "1_0",
        "1e5",
        "true",
        "12",
        "1.50",
        "/data/exp(1)/x[0..1]",
        "a,b",
        "it's",
        'a"b',
        "a\\",
        "x000 x001",
        "a=b",
        "${name}",
        "choice(1,2)",
        "x[0..2",
        "é",
        "{x",
        "#1",
        "~a",
        "a:b",
    ],
)
def test_text_stays_as_typed(value):
    assert parse(FILES, value) == value
    assert parse("desc", value) == value


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_text_is_readable(value):
    parsed = parse("desc", value)
    assert parsed is None or isinstance(parsed, str)


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("model.optim.betas", "[0.9,0.98]", [0.9, 0.98]),
        ("desc", "null", None),
        ("desc", "'a b'", "a b"),
        ("desc", "", ""),
        ("model.compile", "True", True),
        ("exp_manager.summary_writer_kwargs", "{a:1}", {"a": 1}),
        ("model.num_layers", "12", 12),
        ("model.optim.lr", "1e-3", "1e-3"),  # the schema converts it
        ("model.optim.lr", "0.5", 0.5),
        ("trainer.devices", "auto", "auto"),
        ("trainer.devices", "[0,1]", [0, 1]),
        ("trainer.devices", "2", 2),
        ("trainer.val_check_interval", "1.0", 1.0),
        (FILES, "[x000,007]", ["x000", "007"]),
        (FILES, "[x[000..003],y(1,2),z]", ["x[000..003]", "y(1,2)", "z"]),
        ("no.such.key", "x[0..1]", "x[0..1]"),
    ],
)
def test_other_values_keep_their_meaning(key, value, meaning):
    assert parse(key, value) == meaning
    assert type(parse(key, value)) is type(meaning)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.seed=1", "++model.seed=1"),
        ("+model.seed=1", "++model.seed=1"),
        ("++model.seed=1", "++model.seed=1"),
        ("~model.seed", "~model.seed"),
        ("model=a", "model=a"),
        ("++model=a", "model=a"),
        ("data=a", "data@model.data=a"),
        ("model.data=a", "data@model.data=a"),
        ("data@model.data=a", "data@model.data=a"),
        ("model={seed: 1}", "++model={seed: 1}"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("name='a b'", "++name='a b'"),
    ],
)
def test_rewriting(override, expected):
    groups = {"model": ["a"], "data": ["a"]}
    rewritten = rewrite_override(override, lambda group: groups.get(group, []))
    assert rewritten == expected
    again = rewrite_override(rewritten, lambda group: groups.get(group, []))
    assert again == expected


def test_1_is_a_number_of_batches_and_1_0_is_a_fraction():
    values = [
        load(
            "pretrain_small", [f"trainer.limit_val_batches={v}"], EXAMPLES / "esm1nv" / "conf"
        ).trainer.limit_val_batches
        for v in ("1", "1.0")
    ]
    assert [(value, type(value)) for value in values] == [(1, int), (1.0, float)]
