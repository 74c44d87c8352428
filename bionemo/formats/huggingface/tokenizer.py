# SPDX-License-Identifier: Apache-2.0
"""The files of a vocabulary for transformers' `AutoTokenizer`, in the format of the package tokenizers."""

import json
from typing import Any

from bionemo.tokenizers import TokenTable

_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


def write_tokenizer(
    alphabet: TokenTable, max_length: int, letters: str = ".", begin_and_end: bool = True
) -> dict[str, str]:
    """Return the texts of the files, by name.

    Unlike `Alphabet.encode`, the tokenizer knows no lower-case letters, and each unknown letter is a token.

    Args:
        alphabet: the tokens.
        max_length: maximum number of tokens.
        letters: regular expression of one token of a text.
        begin_and_end: a text is put between the begin and the end token.
    """
    ids = {alphabet.bos_id, alphabet.eos_id, alphabet.pad_id, alphabet.mask_id, alphabet.unk_id}
    special = {id_: text for id_, text in enumerate(alphabet.tokens) if id_ in ids or text.startswith("<")}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin, end = (alphabet.tokens[id_] for id_ in (alphabet.bos_id, alphabet.eos_id))

    def template(*sequences: str) -> list[dict[str, Any]]:
        pieces = [{"Sequence": {"id": name, "type_id": 0}} for name in sequences]
        parts = [[{"SpecialToken": {"id": begin, "type_id": 0}}, each] for each in pieces]
        parts = [[*each, {"SpecialToken": {"id": end, "type_id": 0}}] for each in parts]
        return [piece for part in parts for piece in part]

    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
        "added_tokens": [{"id": id_, "content": text, **added} for id_, text in special.items()],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": letters}, "behavior": "Isolated", "invert": False},
        "post_processor": (begin_and_end and {
            "type": "TemplateProcessing", "single": template("A"), "pair": template("A", "B"),
            "special_tokens": {
                text: {"id": text, "ids": [id_], "tokens": [text]}
                for text, id_ in ((begin, alphabet.bos_id), (end, alphabet.eos_id))
            },
        }) or None,
        "model": {
            "type": "WordLevel", "vocab": {text: id_ for id_, text in enumerate(alphabet.tokens)},
            "unk_token": alphabet.tokens[alphabet.unk_id],
        },
    }  # fmt: skip
    names = {"bos": begin, "cls": begin, "eos": end, "sep": end, "pad": alphabet.tokens[alphabet.pad_id],
             "mask": alphabet.tokens[alphabet.mask_id], "unk": alphabet.tokens[alphabet.unk_id]}  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length,
        **{f"{name}_token": text for name, text in names.items()},
    }  # fmt: skip
    return {_FILE: json.dumps(tokenizer, indent=1) + "\n", _SETTINGS: json.dumps(settings, indent=2) + "\n"}
