#!/usr/bin/env bash
# ModelCheckpoint of Lightning saves a step under the metric of an earlier validation, and so keeps the wrong best one.
#
# Package:   lightning 2.5.6 and 2.6.6 (torch 2.13.0)
# Expected:  With val_check_interval=2 and every_n_train_steps=2, each checkpoint has the val_loss of its own step, and
#            best_model_path is the step with the lowest one, 6.
# What is:   The checkpoint is saved at the end of the training step, before the validation of the same step. Its name
#            and score are those of the validation before: step 8 is "the best", with the val_loss of step 6.
# Met by:    Runs that save at step intervals and monitor a metric of the validation: save_top_k deletes the best
#            weights. bionemo saves after the validation if both are due (training/checkpointing.py).
# Source:    lightning, pytorch/callbacks/model_checkpoint.py, ModelCheckpoint.on_train_batch_end.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

cat >"$work/run.py" <<'PY'
import logging
import sys
import warnings
from pathlib import Path

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LOSSES = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.7}


class Model(pl.LightningModule):
    """The validation loss depends on the step only."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def validation_step(self, batch, index):
        self.log("val_loss", LOSSES[self.global_step])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


checkpoints = ModelCheckpoint(sys.argv[1], filename="{step}-{val_loss:.1f}", monitor="val_loss", save_top_k=-1,
                              every_n_train_steps=2)
trainer = pl.Trainer(max_steps=8, val_check_interval=2, callbacks=[checkpoints], accelerator="cpu", logger=False,
                     num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(99, 1)), torch.utils.data.DataLoader(torch.zeros(1, 1)))
print("lightning", lightning.__version__)
for path in sorted(Path(sys.argv[1]).iterdir()):
    step = torch.load(path, weights_only=True)["global_step"]
    print(f"  {path.stem}: the validation of step {step} gave {LOSSES[step]}")
print(f"  best: {Path(checkpoints.best_model_path).stem}")
PY
for version in 2.5.6 2.6.6; do
    python_packages "$version" "lightning==$version" torch==2.13.0 numpy==2.4.6
    "$work/$version/bin/python" "$work/run.py" "$work/$version.checkpoints" 2>"$work/log" >>"$work/seen" ||
        { cat "$work/log"; exit 1; }
done
compare <<'END'
lightning 2.5.6
  step=2-val_loss=0.5: the validation of step 2 gave 0.5
  step=4-val_loss=0.5: the validation of step 4 gave 0.9
  step=6-val_loss=0.9: the validation of step 6 gave 0.1
  step=8-val_loss=0.1: the validation of step 8 gave 0.7
  best: step=8-val_loss=0.1
lightning 2.6.6
  step=2-val_loss=0.5: the validation of step 2 gave 0.5
  step=4-val_loss=0.5: the validation of step 4 gave 0.9
  step=6-val_loss=0.9: the validation of step 6 gave 0.1
  step=8-val_loss=0.1: the validation of step 8 gave 0.7
  best: step=8-val_loss=0.1
END
