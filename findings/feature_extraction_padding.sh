#!/usr/bin/env bash
# pipeline("feature-extraction") with a batch size returns padding rows as residues.
#
# Package:   transformers 5.24.0 (torch 2.13.0)
# Expected:  batch_size changes the speed, not the result: a protein of 4 residues gives 6 rows (<cls>, 4, <eos>).
# What is:   With batch_size > 1 every protein has as many rows as the longest of its batch. The rows of padding are
#            ordinary numbers (not zero), no mask is returned, so they cannot be told apart. A mean over rows
#            depends on the neighbours in the batch and on the order of the file. No warning.
# Met by:    Embeddings of proteins or molecules by pipeline(): the vector of one protein changes with batch_size.
#            Remedy: batch_size=1, or cut the rows with the tokenizer's attention_mask.
# Source:    transformers, pipelines/feature_extraction.py, postprocess(); documentation, "Pipeline batching".
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import numpy as np
import torch
import transformers
from transformers import EsmConfig, EsmModel, EsmTokenizer, pipeline

transformers.logging.set_verbosity_error()
tokens = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>".split()
with open("vocab.txt", "w") as file:
    file.write("\n".join(tokens))
torch.manual_seed(0)
model = EsmModel(EsmConfig(vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=2,
                           num_attention_heads=4, intermediate_size=64, position_embedding_type="rotary",
                           initializer_range=0.3), add_pooling_layer=False).eval()
extract = pipeline("feature-extraction", model=model, tokenizer=EsmTokenizer("vocab.txt"))
proteins = ["MKTA", "MKTAYIAKQR", "MKTAYIAKQRQISFVKSHFS"]
print("transformers", transformers.__version__)
alone = [np.array(rows)[0] for rows in extract(proteins)]
for size in (1, 2, 3):
    batch = [np.array(rows)[0] for rows in extract(proteins, batch_size=size)]
    print(f"  batch_size={size}: rows {[len(rows) for rows in batch]},"
          f" mean of MKTA as alone: {np.allclose(batch[0].mean(0), alone[0].mean(0), atol=1e-4)},"
          f" first 6 rows as alone: {np.allclose(batch[0][:6], alone[0], atol=1e-4)},"
          f" padding rows all zero: {not batch[0][6:].any() if len(batch[0]) > 6 else 'none'}")
PY
cd "$work"
venv/bin/python run.py >seen
compare <<'END'
transformers 5.24.0
  batch_size=1: rows [6, 12, 22], mean of MKTA as alone: True, first 6 rows as alone: True, padding rows all zero: none
  batch_size=2: rows [12, 12, 22], mean of MKTA as alone: False, first 6 rows as alone: True, padding rows all zero: False
  batch_size=3: rows [22, 22, 22], mean of MKTA as alone: False, first 6 rows as alone: True, padding rows all zero: False
END
