# SPDX-License-Identifier: Apache-2.0
"""`MODEL` or `model=MODEL` is the model of every command."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.model_argument import hub_id, split_model


@pytest.mark.parametrize(
    "word", ["x.nemo", "RUN:best", "/a/RUN/checkpoints/step=8-val_loss=1.5-last", "RUN/checkpoints/step=8", "~/x", "."]
)
def test_a_path_is_a_model(word: str) -> None:
    keys = ["model.data.dataset_path=a/b=c.fasta", "+a.b=1", "~model.data.x", "hydra/launcher=basic", "name=x/y"]
    for place in range(len(keys) + 1):
        assert split_model([*keys[:place], word, *keys[place:]]) == (word, keys)
        assert split_model([*keys[:place], f"model={word}", *keys[place:]]) == (word, keys)
    assert split_model(keys) == (None, keys)


def test_there_is_one_model() -> None:
    for words in (["a", "b"], ["a", "model=b"], ["model=a", "name=x", "model=b"]):
        with pytest.raises(UserError, match=r"'a' and 'b': give one MODEL"):
            split_model(words)


def test_where_model_is_a_group(tmp_path: Path) -> None:
    """A forgotten value is no model, because a model must exist."""
    path = tmp_path / "step=3-last"
    keys = ["model=esm2nv_8M", "site/cluster=x", "~a/b"]
    path.mkdir()
    assert split_model([*keys, str(path)], has_groups=True) == (str(path), keys)
    assert split_model([f"{tmp_path}:best"], has_groups=True) == (f"{tmp_path}:best", [])
    with pytest.raises(UserError, match=r"cannot read 'name': it is neither key=value nor the path or id of a model"):
        split_model([*keys, "name"], has_groups=True)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("lab/esm2_t6_8M-x.1", ("lab/esm2_t6_8M-x.1", None)), ("hf://lab/x", ("lab/x", None)),
        ("hf:/lab/x@main", ("lab/x", "main")), ("lab/x@refs/pr/1", ("lab/x", "refs/pr/1")),
        ("lab/x@a--b", ("lab/x", "a--b")), ("hf://here/x", ("here/x", None)),
        ("hf://lab/x.nemo", ("lab/x.nemo", None)),
        *((word, None) for word in (
            "x", "here/x", "here/x@main", "lab/x.nemo", "lab/x/y", "/lab/x", "./lab/x", "../lab", "~/x", "lab/",
            "lab/x:best", "lab/x=1", "lab--a/x", "lab/x..y", "lab/x.git", "lab/x.git@main", "lab/x@a..b", "lab/x@",
            "hf://lab", "lab/é",
            "lab/x\n", "-lab/x", "lab/-", "hf://lab/x/y",
        )),
    ],
)  # fmt: skip
def test_ids_of_the_hub(
    word: str, found: tuple[str, str | None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_id(word) == found
    if found:
        assert split_model(["a=b", word], has_groups=True) == (word, ["a=b"])
