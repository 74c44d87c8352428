#!/usr/bin/env bash
# A resumed run of Lightning keeps the patience of its checkpoint, whatever the script says now.
#
# Package:   lightning 2.5.6 and 2.6.6 (torch 2.13.0)
# Expected:  EarlyStopping(patience=5) waits for five validations without improvement. A checkpoint restores what the
#            run has reached (best value, count), not the arguments of the script, as for max_steps, monitor or
#            min_delta.
# What is:   state_dict() of EarlyStopping contains patience, and load_state_dict() replaces the argument by it. A run
#            that is continued with a larger patience stops after the old one, and nothing says so; min_delta and the
#            thresholds are those of the script.
# Met by:    Runs that stopped too early and are continued with more patience: they train until the next validation
#            and stop again. bionemo keeps the configured value (training/early_stopping.py).
# Source:    lightning, pytorch/callbacks/early_stopping.py, EarlyStopping.load_state_dict.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

cat >"$work/run.py" <<'PY'
import logging
import sys
import warnings

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
loader = torch.utils.data.DataLoader(torch.zeros(1, 1))


class Model(pl.LightningModule):
    """The validation loss never improves after the first epoch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def validation_step(self, batch, index):
        self.log("val_loss", 1.0 + self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(patience, checkpoint=None):
    stopping = EarlyStopping("val_loss", patience=patience)
    trainer = pl.Trainer(max_epochs=20, callbacks=[stopping], accelerator="cpu", logger=False, num_sanity_val_steps=0,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), loader, loader, ckpt_path=checkpoint)
    trainer.save_checkpoint(sys.argv[1])
    print(f"  EarlyStopping(patience={patience}): ended after epoch {trainer.current_epoch},"
          f" patience is now {stopping.patience}")


print("lightning", lightning.__version__)
fit(2)
fit(8, sys.argv[1])
PY
for version in 2.5.6 2.6.6; do
    python_packages "$version" "lightning==$version" torch==2.13.0 numpy==2.4.6
    "$work/$version/bin/python" "$work/run.py" "$work/$version.ckpt" 2>"$work/log" >>"$work/seen" ||
        { cat "$work/log"; exit 1; }
done
compare <<'END'
lightning 2.5.6
  EarlyStopping(patience=2): ended after epoch 3, patience is now 2
  EarlyStopping(patience=8): ended after epoch 4, patience is now 2
lightning 2.6.6
  EarlyStopping(patience=2): ended after epoch 3, patience is now 2
  EarlyStopping(patience=8): ended after epoch 4, patience is now 2
END
