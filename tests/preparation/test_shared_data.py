# SPDX-License-Identifier: Apache-2.0
"""Real UniRef clusters, from raw files to the samples drawn in training; slow, and skipped without the data."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import PreparationConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.data.sampler import DataPosition
from bionemo.preparation import prepare
from bionemo.preparation.manifest import verify
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES, ROOT

DATA = ROOT.parent / "shared" / "data"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.is_dir(), reason="the data is not here")]
TREE = ["manifest.json", "uf50", "uf90"]


def sequences(path: Path) -> dict[str, str]:
    """Parse names and sequences of a FASTA file line by line."""
    found: dict[str, str] = defaultdict(str)
    for line in path.read_text().splitlines():
        if line.startswith(">"):
            name = line[1:].split()[0]
        else:
            found[name] += line
    return found


def test_uniref_clusters_from_raw_files_to_samples(tmp_path: Path) -> None:
    raw = DATA / "uniref50_90"
    overrides = [f"source={raw}", f"output={tmp_path}"]
    prepare(load("uniref50_90", overrides, CONF_DIR / "preparation", PreparationConfig))
    assert sorted(path.name for path in tmp_path.iterdir()) == TREE
    assert sorted(path.name for path in (tmp_path / "uf50").iterdir()) == ["test", "train", "val"]
    assert verify(tmp_path) == []

    lines = (raw / "mapping.tsv").read_text().splitlines()[1:]
    members = [line.split("\t")[1].split(",") for line in lines]
    names = [name for cluster in members for name in cluster]
    truth = sequences(raw / "uniref90membersandreps_ur50trainfiltreps.fasta")
    rows = [
        row for path in sorted((tmp_path / "uf90" / "uf90_csvs").glob("*.csv")) for row in csv.DictReader(path.open())
    ]
    assert [(row["record_name"], row["sequence"]) for row in rows] == [(name, truth[name]) for name in names]

    cfg = load("pretrain_esm2_8M", [f"model.data.dataset_path={tmp_path}"], EXAMPLES / "esm2nv" / "conf")
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm2nv"), MaskedDataset, MicroBatches(4, 1))
    stream = data.steps("train", True, None, MicroBatches(4, 1), DataPosition()).sampler.stream
    draws, clusters = 400, len(members)
    owner = np.repeat(np.arange(clusters), [len(cluster) for cluster in members])
    half = clusters // 2
    _, drawn = stream.read(0, draws * clusters)
    first_half = np.concatenate([drawn[epoch * clusters : epoch * clusters + half] for epoch in range(draws)])
    assert chisquare(np.bincount(owner[first_half], minlength=clusters)).pvalue > 1e-3
    size = np.bincount(owner)[owner]
    counts = np.bincount(drawn, minlength=len(names))
    assert np.array_equal(np.bincount(owner, weights=counts), np.full(clusters, draws))
    several = size > 1
    lost = int((np.bincount(owner) > 1).sum())  # the last member of each cluster follows from the others
    assert chisquare(counts[several], draws / size[several], ddof=lost - 1).pvalue > 1e-3
