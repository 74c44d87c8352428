#!/usr/bin/env bash
# transformers 5 ignores vocab_file= and merges_file=: the tokenizer has no vocabulary, and nothing fails.
#
# Package:   transformers 5.24.0 against 4.57.6
# Expected:  RobertaTokenizer(vocab_file=..., merges_file=...), BertTokenizer(vocab_file=...) and the like read these
#            files, as documented up to 4.57, or raise TypeError for an argument that is gone.
# What is:   In version 5 the arguments are called vocab and merges; the old names vanish in **kwargs. The tokenizer
#            then has its special tokens only (5 for RoBERTa, BART and BERT): a SMILES becomes an EMPTY
#            list of tokens, a protein nothing but [UNK]. The files are not even opened.
# Met by:    Code for ChemBERTa, MolGPT, BARTSmiles or ProtBert style vocabularies that builds the tokenizer from its
#            files and does not use from_pretrained(). Training and inference run, every molecule is the same.
# Source:    transformers, models/roberta/tokenization_roberta.py, __init__(vocab, merges, ..., **kwargs).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages v4 transformers==4.57.6
python_packages v5 transformers==5.24.0

cat >"$work/run.py" <<'PY'
import json
import transformers

tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"CNOcno()=123[]@H+-", "CC"]
with open("vocab.json", "w") as file:
    json.dump({token: index for index, token in enumerate(tokens)}, file)
with open("merges.txt", "w") as file:
    file.write("#version: 0.2\nC C\n")
with open("vocab.txt", "w") as file:
    file.write("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] L A G V E S I K R D T P N Q F Y M H C W X U B Z O".split()))

print("transformers", transformers.__version__)
for name, files, text in (
    ("RobertaTokenizerFast", {"vocab_file": "vocab.json", "merges_file": "merges.txt"}, "CCO"),
    ("BartTokenizerFast", {"vocab_file": "vocab.json", "merges_file": "merges.txt"}, "CCO"),
    ("GPT2TokenizerFast", {"vocab_file": "vocab.json", "merges_file": "merges.txt", "unk_token": "<unk>"}, "CCO"),
    ("BertTokenizerFast", {"vocab_file": "vocab.txt", "do_lower_case": False}, "M K T"),
):
    tokenizer = getattr(transformers, name)(**files)
    print(f"  {name:21} entries {len(tokenizer):2}  {text!r} -> {tokenizer.tokenize(text)}, ids {tokenizer(text)['input_ids']}")
PY
cd "$work"
for venv in v4 v5; do "$venv/bin/python" run.py; done >seen
compare <<'END'
transformers 4.57.6
  RobertaTokenizerFast  entries 24  'CCO' -> ['CC', 'O'], ids [0, 23, 7, 2]
  BartTokenizerFast     entries 24  'CCO' -> ['CC', 'O'], ids [0, 23, 7, 2]
  GPT2TokenizerFast     entries 25  'CCO' -> ['CC', 'O'], ids [23, 7]
  BertTokenizerFast     entries 30  'M K T' -> ['M', 'K', 'T'], ids [2, 21, 12, 15, 3]
transformers 5.24.0
  RobertaTokenizerFast  entries  5  'CCO' -> [], ids [2, 3]
  BartTokenizerFast     entries  5  'CCO' -> [], ids [2, 3]
  GPT2TokenizerFast     entries  2  'CCO' -> [], ids []
  BertTokenizerFast     entries  5  'M K T' -> ['[UNK]', '[UNK]', '[UNK]'], ids [2, 1, 1, 1, 3]
END
