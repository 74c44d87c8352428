# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART: from the training command to generated molecules."""

import shutil
from pathlib import Path

import pytest

from tests.support.molecules import SHARED
from tests.support.runs import config, logged, run, train


def test_validation_metrics_are_logged_and_part_of_checkpoint_names(tmp_path: Path) -> None:
    name = "exp_manager.checkpoint_callback_params.filename='accuracy={val_molecular_accuracy:.2f}-{step}'"
    status, lines = run(tmp_path / "run", "trainer.max_steps=4", name, model="megamolbart")
    assert status == 0, lines
    (validation,) = [line for line in lines if line.startswith("step 4  val_loss")]
    for name in ("character_accuracy", "molecular_accuracy", "percent_invalid"):
        value = logged(tmp_path / "run", f"val_{name}")[4]
        assert 0 <= value <= 1
        assert f"val_{name} {value:.3f}" in validation
    assert list((tmp_path / "run" / "checkpoints").glob("accuracy=val_molecular_accuracy=0.00*"))


def test_unusable_molecules_are_dropped_with_a_note(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "x000.csv").write_text("zinc_id,smiles\n1,CCO\n2,c1cccc1\n3,C[Xx]C\n4,CCN\n")
    overrides = (f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000", "model.data.dataset.val=x000",
             "trainer.max_steps=2", "trainer.devices=1", "trainer.num_nodes=1")  # fmt: skip
    status, lines = run(tmp_path / "run", *overrides, model="megamolbart")
    assert status == 0, lines
    notes = [line for line in lines if line.startswith("note: train data")]
    assert len(notes) == 2
    assert "1 tokens in 1 of 4 records are outside the vocabulary" in notes[0]
    assert "RDKit cannot read 2 of 4 SMILES (the first is record 1, 'c1cccc1'); their records are dropped" in notes[1]
    status, lines = run(tmp_path / "strict", *overrides, "model.data.on_invalid=error", model="megamolbart")
    assert status == 1
    assert lines[-1].startswith("error: train data: RDKit cannot read 2 of 4 SMILES")
    assert not (tmp_path / "strict").exists()


@pytest.mark.slow
def test_a_model_reconstructs_its_training_molecules(tmp_path: Path) -> None:
    """Train on 200 molecules of ZINC with equal input and output; greedy decoding reconstructs nearly all of them."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data")
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        shutil.copy(SHARED / "zinc_sample" / "x000.csv", tmp_path / split)
    overrides = [
        f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000", "model.data.dataset.val=x000",
        "trainer.devices=1", "trainer.num_nodes=1", "model.seq_length=128", "model.hidden_size=128",
        "model.num_attention_heads=4", "model.micro_batch_size=50", "model.hidden_dropout=0",
        "model.attention_dropout=0", "model.data.encoder_augment=False", "model.data.encoder_mask=False",
        "model.optim.lr=0.4", "model.optim.sched.warmup_steps=100", "trainer.max_steps=1200",
        "trainer.val_check_interval=400",
    ]  # fmt: skip
    train(config(tmp_path / "run", *overrides, model="megamolbart"))
    accuracy = logged(tmp_path / "run", "val_molecular_accuracy")
    print(accuracy)
    assert accuracy[1200] > 0.95
    assert logged(tmp_path / "run", "val_percent_invalid")[1200] < 0.05
