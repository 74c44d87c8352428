# SPDX-License-Identifier: Apache-2.0
"""GPT-3: a causal decoder for text with learned positions (Brown et al. 2020); GPT-2 has the same architecture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.schema import GPT3Config
from bionemo.data.text.dataset import TextDataset
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.nemo_models import NemoModel
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models import nemo_names
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers.gpt2 import GPT2Tokenizer, read_gpt2

_TOKENIZER_FILES = {"vocab.json": "vocab_file", "merges.txt": "merge_file"}
_OPENAI_VOCABULARY = 50257  # size of OpenAI's vocabulary, whose last token ends a document
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # the default first
_HUGGING_FACE_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_HUGGING_FACE_NAMES = {
    "word_embeddings.weight": "transformer.wte.weight",
    "position_embeddings.weight": "transformer.wpe.weight",
    **module_names({"decoder.final_layernorm": "transformer.ln_f"}),
    **module_names(_HUGGING_FACE_LAYER, "decoder.layers.{}.", "transformer.h.{}."),
}


def _read_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UserError(f"activation_function is {str(activation)[:50]!r}; supported are {', '.join(_ACTIVATIONS)}")
    inner = 4 * config["hidden_size"] if settings.get("n_inner") is None else get_size(settings, "n_inner")
    return {"ffn_hidden_size": inner, "activation": _ACTIVATIONS[activation]}


def _write_settings(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if (activation := config.get("activation")) not in theirs:
        raise UserError(f"activation {str(activation)[:50]!r} is not supported; supported are {', '.join(theirs)}")
    end = vocab_size - 1 if vocab_size == _OPENAI_VOCABULARY else None
    return {
        "n_inner": config["ffn_hidden_size"],
        "activation_function": theirs[activation],
        "embd_pdrop": config.get("hidden_dropout", 0.1),
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _write_tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's vocabulary files if they are valid: an untrusted configuration may name any file."""
    tokenizer = config.get("tokenizer") or {}
    paths = {name: Path(tokenizer[key]) for name, key in _TOKENIZER_FILES.items() if tokenizer.get(key)}
    if len(paths) < len(_TOKENIZER_FILES) or not all(path.is_file() for path in paths.values()):
        return {}
    try:
        read_gpt2(*paths.values())
    except UserError:
        return {}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config["max_position_embeddings"]}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return texts | {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    paths = {key: directory.absolute() / name for name, key in _TOKENIZER_FILES.items()}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {"tokenizer": {key: str(path) for key, path in paths.items()}}


class GPT3(LanguageModel):
    """An autoregressive language model of text, after GPT-3. Pre-LN; the head is the word embedding without a bias."""

    tokenizer = "gpt2"
    default_config = "gpt3"
    dataset = TextDataset
    causal = True
    card_tag = "text-generation"
    nemo = NemoModel(
        nemo_class="nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
        vocab_size=_OPENAI_VOCABULARY, user_vocabulary=True,
        names=WeightNames({
            **nemo_names.WORD_EMBEDDINGS,
            **nemo_names.POSITION_EMBEDDINGS,
            **module_names({"decoder.final_layernorm": "language_model.encoder.final_layernorm"}),
            **module_names(nemo_names.LAYER, "decoder.layers.{}.", "language_model.encoder.layers.{}."),
        }),
        config={
            **nemo_names.LAYER_CONFIG, "mcore_gpt": False, "transformer_engine": False,
            "share_embeddings_and_output_weights": True,
            "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
        },
    )  # fmt: skip
    hugging_face = Architecture(
        title="GPT-2", model_type="gpt2", class_name="GPT2LMHeadModel", prefix="transformer.",
        names=WeightNames(
            _HUGGING_FACE_NAMES, copies={"lm_head.weight": "transformer.wte.weight"}, pads_vocabulary=False,
            qkv_by_head=False, transposes=True,
        ),
        required={  # other values give the weights another meaning
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
            "add_cross_attention": False, "tie_word_embeddings": True,
        },
        sizes={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
            "num_layers": "n_layer",
        },
        numbers={  # with the defaults of GPT2Config
            "hidden_dropout": ("resid_pdrop", 0.1), "attention_dropout": ("attn_pdrop", 0.1),
            "layernorm_epsilon": ("layer_norm_epsilon", 1e-5), "init_method_std": ("initializer_range", 0.02),
        },
        read_settings=_read_settings, write_settings=_write_settings,
        write_tokenizer=_write_tokenizer, read_tokenizer=_read_tokenizer,
        ignored=(r"h\.\d+\.attn\.(masked_)?bias",),
    )  # fmt: skip
    config: GPT3Config
    vocabulary: GPT2Tokenizer

    def build_head(self) -> VocabularyProjection:
        """See LanguageModel."""
        return VocabularyProjection(self.padded_vocab_size, self.vocabulary.vocab_size, bias=False)
