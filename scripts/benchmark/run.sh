#!/usr/bin/env bash
# Run all comparisons, interleaved, five repeats each: about two and a half hours on two cores.
# Argument: a FASTA file of real proteins; by default, random residues with the lengths of UniRef.
# Peers are installed into .venv-peers, with the versions of peers.txt.
set -euo pipefail
cd "$(dirname "$0")"
root=$PWD/../..
fasta=${1:+--fasta "$(realpath "$1")"}
ours=${PYTHON:-$root/.venv/bin/python}
peers=$root/.venv-peers/bin/python

if [ ! -x "$peers" ]; then
    python3 -m venv "$root/.venv-peers"
    "$peers" -m pip install -qq 'torch==2.13.0'
    "$peers" -m pip install -qq -r peers.txt
fi
compare() {
    echo "## $1"
    "$ours" compare.py --ours "$ours $2" --peer "$peers $3"
}

compare "training ESM2-8M, bf16, against EsmForMaskedLM, padded to the longest, bf16" "train_ours.py $fasta" "train_hf.py $fasta --bf16"
compare "training ESM2-8M, fp32, against EsmForMaskedLM, padded to the longest, fp32" "train_ours.py $fasta --precision 32" "train_hf.py $fasta"
compare "training ESM2-8M, bf16, against EsmForMaskedLM, padded to 1024, fp32" "train_ours.py $fasta" "train_hf.py $fasta --pad 1024 --batch 8 --steps 3"
compare "training ESM2-8M, fp32, against EsmForMaskedLM, padded to 1024, fp32" "train_ours.py $fasta --precision 32" "train_hf.py $fasta --pad 1024 --batch 8 --steps 3"

big=$(mktemp --suffix=.fasta) model=$(mktemp -d)
trap 'rm -rf "$big" "$model"' EXIT
compare_ours() { # the peer needs packages of ours
    echo "## $1"
    "$ours" compare.py --ours "$ours $2" --peer "$ours $3"
}
"$ours" embedding.py make "$model"
compare_ours "embedding, ESM2-8M, fp32, against EsmModel in the given order" "embedding.py bionemo $model $fasta" "embedding.py hf $model $fasta"
compare_ours "embedding, ESM2-8M, fp32, against EsmModel sorted by length" "embedding.py bionemo $model $fasta" "embedding.py hf $model $fasta --by-length"
compare_ours "masked marginals, ESM2-8M, fp32, 300 residues, against EsmForMaskedLM, one position at a time" "variants.py bionemo $model" "variants.py hf $model"
esmc="--override=model.num_layers=12 --override=model.hidden_size=320 --override=model.num_attention_heads=5 --override=model.ffn_hidden_size=1024"
compare_ours "training ESMC of 12 layers, fp32, against EsmcForMaskedLM, padded to the longest, fp32" "train_ours.py $fasta --config pretrain_esmc_300M --precision 32 $esmc" "train_hf.py $fasta --size ESMC-12"
"$ours" embedding.py make "$model" --size ESMC-12
compare_ours "embedding, ESMC of 12 layers, fp32, against EsmcModel in the given order" "embedding.py bionemo $model $fasta" "embedding.py hf $model $fasta"
compare_ours "embedding, ESMC of 12 layers, fp32, against EsmcModel sorted by length" "embedding.py bionemo $model $fasta" "embedding.py hf $model $fasta --by-length"
compare_ours "training ProtT5nv, fp32, against T5" "steps.py prott5nv ours --steps 2" "steps.py prott5nv hf --steps 1"
compare_ours "training MegaMolBART, fp32, against BART" "steps.py megamolbart ours --rows 64 --steps 3" "steps.py megamolbart hf --rows 64 --steps 3"
compare_ours "training GPT-3 126m, fp32, against GPT-2" "steps.py gpt3 ours --rows 1 --steps 1" "steps.py gpt3 hf --rows 1 --steps 1"

"$ours" - "$big" <<'PYTHON'
import sys, textwrap
from proteins import proteins
with open(sys.argv[1], "w") as file:
    for number, sequence in enumerate(proteins(None, 400_000)):
        file.write(f">UniRef50_{number} n=1 Tax=unknown\n" + "\n".join(textwrap.wrap(sequence, 60)) + "\n")
PYTHON
compare "index build against pyfastx" "store.py --library bionemo --what index --fasta $big" "store.py --library pyfastx --what index --fasta $big"
compare "random access against sqlite" "store.py --library bionemo --what access --fasta $big" "store.py --library sqlite --what access --fasta $big"
compare "random access against pyfastx" "store.py --library bionemo --what access --fasta $big" "store.py --library pyfastx --what access --fasta $big"

"$ours" preparation.py --write "$big" --sequences 5000000
compare "preparing 5 million sequences against pyfastx doing the same" "preparation.py bionemo $big" "preparation.py pyfastx $big"
compare "preparing 5 million sequences against pyfastx reading them" "preparation.py bionemo $big" "preparation.py pyfastx-read $big"
compare "preparing 5 million sequences against Biopython reading them" "preparation.py bionemo $big" "preparation.py biopython-read $big"

echo "## sample pipeline against Hugging Face's tokenizer and collator"
# shellcheck disable=SC2086  # two arguments, or none
"$ours" sample_pipeline.py $fasta
echo "## checkpoints against Lightning's"
"$ours" checkpoint.py
"$ours" checkpoint.py --position
echo "## dropout against torch's"
"$ours" attention.py
if [ -d "$root/../shared/data/molecules" ]; then
    echo "## molecules against plain RDKit"
    "$ours" molecules.py
fi
if [ -d "${BIONEMO_STRUCTURES:-}" ]; then
    echo "## structures against Biotite"
    find "$BIONEMO_STRUCTURES" -name '*.cif' -exec "$ours" structures.py {} +
fi
echo "## start-up"
"$ours" startup.py
