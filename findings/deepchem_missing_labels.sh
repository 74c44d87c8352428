#!/usr/bin/env bash
# DeepChem counts missing labels as class 0 in ROC-AUC, unless use_sample_weights=True is given.
#
# Package:   deepchem 2.8.0
# Expected:  A cell without a label does not enter the metric. DeepChem marks such cells itself: CSVLoader gives
#            them label 0 and weight 0.
# What is:   Metric.compute_metric() ignores the weights by default (use_sample_weights=False), and so does
#            model.evaluate(dataset, [metric]), the call of the tutorials: the missing cells are negatives.
# Met by:    Multi-task sets with gaps (Tox21, MUV, ToxCast, PCBA). ROC-AUC of two programs on one file differs by the
#            share of gaps; here 1.0 becomes 0.333. Training does use the weights, so only the figure is wrong.
# Source:    deepchem/metrics/metric.py, Metric.compute_metric(); deepchem/models/models.py, Model.evaluate().
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv deepchem==2.8.0 rdkit==2026.9.1 numpy==2.4.6 pandas==2.3.3 scikit-learn==1.9.1 scipy==1.17.1

cat >"$work/run.py" <<'PY'
import importlib.metadata
import deepchem as dc
import numpy as np
from sklearn.metrics import roc_auc_score

# One task, eight molecules, four of them without a label.
with open("tox.csv", "w") as file:
    file.write("smiles,task\nC,0\nCC,0\nCCC,1\nCCCC,1\nCCO,\nCCCO,\nCCCCO,\nCCCCCO,\n")
dataset = dc.data.CSVLoader(["task"], feature_field="smiles", featurizer=dc.feat.CircularFingerprint()).create_dataset("tox.csv")
scores = np.array([0.2, 0.4, 0.6, 0.9, 0.95, 0.97, 0.98, 0.99])


class Fixed(dc.models.Model):
    """A model that returns the given scores."""

    def predict(self, dataset, transformers=()):
        return np.stack([1 - scores, scores], axis=1)


print("deepchem", importlib.metadata.version("deepchem"))
print("labels ", dataset.y.ravel().astype(int).tolist())
print("weights", dataset.w.ravel().astype(int).tolist())
given = dataset.w.ravel() > 0
print("scikit-learn on the four labels:  ", roc_auc_score(dataset.y.ravel()[given], scores[given]))
metric = dc.metrics.Metric(dc.metrics.roc_auc_score)
print("evaluate():                       ", f"{Fixed().evaluate(dataset, [metric])['roc_auc_score']:.3f}")
print("evaluate(use_sample_weights=True):", f"{Fixed().evaluate(dataset, [metric], use_sample_weights=True)['roc_auc_score']:.3f}")
PY
cd "$work"
venv/bin/python run.py | grep -v "requires PyTorch" >seen
compare <<'END'
deepchem 2.8.0
labels  [0, 0, 1, 1, 0, 0, 0, 0]
weights [1, 1, 1, 1, 0, 0, 0, 0]
scikit-learn on the four labels:   1.0
evaluate():                        0.333
evaluate(use_sample_weights=True): 1.000
END
