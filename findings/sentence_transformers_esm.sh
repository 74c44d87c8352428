#!/usr/bin/env bash
# SentenceTransformer on an ESM-2 directory averages <cls> and <eos> and cuts long proteins, both silently.
#
# Package:   sentence-transformers 6.2.0 (transformers 5.24.0, torch 2.13.0)
# Expected:  The mean over residues, which is what "ESM-2 embedding" means in the field; proteins of any length, since
#            ESM-2 has rotary positions and no table that ends.
# What is:   A directory without modules.json gets a mean pooling over ALL tokens, <cls> and <eos> included: for
#            a peptide of 4 residues a third of the vector. max_seq_length is taken from max_position_embeddings of
#            config.json (1,026 in ESM-2, 66 here); residues behind it are dropped without a message, so
#            two proteins that differ only behind it have one embedding. transformers itself does not cut.
# Met by:    Embedding data bases of proteins (similarity search, clustering) built with this package.
# Source:    sentence-transformers documentation, "Creating Custom Models" (default mean pooling), max_seq_length.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from transformers import EsmConfig, EsmModel, EsmTokenizer

transformers.logging.set_verbosity_error()
tokens = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>".split()
with open("vocab.txt", "w") as file:
    file.write("\n".join(tokens))
torch.manual_seed(0)
model = EsmModel(EsmConfig(vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=2,
                           num_attention_heads=4, intermediate_size=64, position_embedding_type="rotary",
                           max_position_embeddings=66, initializer_range=0.3), add_pooling_layer=False).eval()
tokenizer = EsmTokenizer("vocab.txt")
model.save_pretrained("esm")
tokenizer.save_pretrained("esm")
sentences = SentenceTransformer("esm", device="cpu")


@torch.no_grad()
def rows(protein):
    return model(**tokenizer(protein, return_tensors="pt")).last_hidden_state[0].numpy()


def same(a, b):
    return bool(np.allclose(a, b, atol=1e-4))


print("sentence-transformers", importlib.metadata.version("sentence-transformers"), "/ max_seq_length", sentences.max_seq_length)
peptide, protein = "MKTA", "MKTAYIAKQR" * 20
seen = sentences.encode(peptide)
print("4 residues:   mean of residues:", same(seen, rows(peptide)[1:-1].mean(0)), "/ mean of all tokens:", same(seen, rows(peptide).mean(0)))
seen = sentences.encode(protein)
print("200 residues: mean of all tokens:", same(seen, rows(protein).mean(0)), "/ equal to that of the first 64 residues:",
      same(seen, sentences.encode(protein[:64])), "/ and with another end:", same(seen, sentences.encode(protein[:64] + 136 * "W")))
PY
cd "$work"
venv/bin/python run.py >seen
compare <<'END'
sentence-transformers 6.2.0 / max_seq_length 66
4 residues:   mean of residues: False / mean of all tokens: True
200 residues: mean of all tokens: False / equal to that of the first 64 residues: True / and with another end: True
END
