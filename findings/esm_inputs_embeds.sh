#!/usr/bin/env bash
# EsmModel gives other logits for inputs_embeds than for the input_ids of the same tokens.
#
# Package:   transformers 5.24.0 (torch 2.13.0)
# Expected:  model(inputs_embeds=model.get_input_embeddings()(ids)) equals model(input_ids=ids), as in BERT and as the
#            documentation of inputs_embeds says ("instead of passing input_ids").
# What is:   ESM-2 checkpoints have token_dropout=true: the embeddings are multiplied by (1 - 0.12) / (1 - share of
#            masked tokens), also in inference. With inputs_embeds this step is skipped, so every vector is larger
#            by the factor 1 / 0.88 (without masks), and rows of <mask> are not zeroed. No warning.
# Met by:    Integrated gradients and saliency (Captum), soft prompts, design by gradient, ONNX export from embeddings:
#            they explain or optimise another function than the one that predicts.
# Source:    transformers, models/esm/modeling_esm.py, EsmEmbeddings.forward: "if self.token_dropout and input_ids is
#            not None".
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import torch
import transformers
from transformers import EsmConfig, EsmForMaskedLM

print("transformers", transformers.__version__)
torch.manual_seed(0)
ids = torch.tensor([[0, 20, 15, 11, 5, 19, 12, 5, 15, 16, 10, 2]])  # <cls> MKTAYIAKQR <eos>
masked = ids.clone()
masked[0, 3] = 32
for token_dropout in (True, False):
    model = EsmForMaskedLM(EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, position_embedding_type="rotary", token_dropout=token_dropout, initializer_range=0.5,
    )).eval()
    for name, tokens in (("no mask", ids), ("one <mask>", masked)):
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(tokens)
            by_ids, by_embeddings = model(input_ids=tokens).logits, model(inputs_embeds=embeddings).logits
            used = model.esm.embeddings(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            given = model.esm.embeddings(inputs_embeds=embeddings, attention_mask=torch.ones_like(tokens))
        print(f"  token_dropout={token_dropout!s:5} {name:10}: embedding of M times {(used[0, 1] / given[0, 1]).mean():.4f},"
              f" embedding at 3 zero: {not used[0, 3].any()} / {not given[0, 3].any()},"
              f" logits equal: {torch.allclose(by_ids, by_embeddings, atol=1e-4)}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
transformers 5.24.0
  token_dropout=True  no mask   : embedding of M times 0.8800, embedding at 3 zero: False / False, logits equal: False
  token_dropout=True  one <mask>: embedding of M times 0.9600, embedding at 3 zero: True / False, logits equal: False
  token_dropout=False no mask   : embedding of M times 1.0000, embedding at 3 zero: False / False, logits equal: True
  token_dropout=False one <mask>: embedding of M times 1.0000, embedding at 3 zero: False / False, logits equal: True
END
