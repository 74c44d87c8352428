#!/usr/bin/env bash
# torchmetrics applies the sigmoid to some batches and not to others, so AUROC depends on the batches.
#
# Package:   torchmetrics 1.9.0 (torch 2.13.0)
# Expected:  BinaryAUROC over several update() calls equals the AUROC of all scores at once; AUROC does not change
#            under monotonic functions, so logits or probabilities make no difference.
# What is:   Every update() decides alone: if all its scores lie in [0, 1] they are taken as probabilities, else the
#            sigmoid is applied. Logits of a batch that happen to lie in [0, 1] stay, those of the other
#            batches are squeezed, and both are ranked together. The same holds for average precision and
#            for the threshold 0.5 of BinaryAccuracy and F1. No warning.
# Met by:    Heads with few logits per batch (small batches, or the last batch of an epoch; weak heads have logits near
#            0). Remedy: apply the sigmoid yourself before every update.
# Source:    torchmetrics documentation of BinaryAUROC ("If preds has values outside [0,1] ..."); normalize_logits_if_needed.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision

logits = torch.tensor([0.05, 0.30, 0.10, 0.35, -0.40, 0.50, -0.30, 0.45])  # every positive is above every negative
labels = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
above = logits[labels == 1][:, None] > logits[labels == 0][None]
print("torchmetrics", torchmetrics.__version__)
print("share of pairs in the right order (AUROC by definition):", above.float().mean().item())
for size in (8, 4, 2, 1):
    values = []
    for metric in (BinaryAUROC(), BinaryAveragePrecision(), BinaryAccuracy()):
        for start in range(0, 8, size):
            metric.update(logits[start : start + size], labels[start : start + size])
        values.append(round(metric.compute().item(), 3))
    print(f"batches of {size}: AUROC {values[0]}, average precision {values[1]}, accuracy {values[2]}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
torchmetrics 1.9.0
share of pairs in the right order (AUROC by definition): 1.0
batches of 8: AUROC 1.0, average precision 1.0, accuracy 0.75
batches of 4: AUROC 0.75, average precision 0.817, accuracy 0.75
batches of 2: AUROC 0.75, average precision 0.817, accuracy 0.75
batches of 1: AUROC 0.75, average precision 0.817, accuracy 0.5
END
