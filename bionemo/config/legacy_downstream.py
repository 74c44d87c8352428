# SPDX-License-Identifier: Apache-2.0
"""Files and keys of BioNeMo v1 for downstream tasks.

There such a file was a model's whole configuration with a few keys of the task among them; here the model says itself
what it is.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from bionemo.config.hints import all_keys
from bionemo.config.schema import SCHEMAS, DownstreamConfig, ModelConfig, RunConfig

# Where keys stand now.
MOVED = {
    "model.dropout_rate": "model.downstream_task.dropout",
    "model.cnn_dim": "model.downstream_task.cnn_dim",
    "model.hidden_layer_size": "model.downstream_task.hidden_layer_size",
}
_FILES = "the preparation deals the files: model.data.preprocessing"
_LOSS = "the loss follows from model.data.task_type"
# Of a downstream run alone: elsewhere some of these are keys.
OF_DOWNSTREAM = {
    "restore_from_path": "model.restore_encoder_path",
    "model.name": "name",
    "model.loss_func": _LOSS,
    "model.downstream_task.loss_func": _LOSS,
    "model.downstream_task.n_outputs": "model.data.target_sizes",
    "model.data.num_classes": "model.data.target_sizes",
    "model.accumulate_grad_batches": "model.micro_batch_size",
    "model.modify_percent": "nothing is masked",
    "model.data.modify_percent": "nothing is masked",
    "model.data.num_workers": "files are read whole",
    "model.data.max_seq_length": "the model says how much it reads",
    **{f"model.data.{key}": _FILES for key in ("links_file", "split_data", "val_frac", "test_frac")},
}
# In the place of what a file of v1 does not say: neither decay nor schedule, and every residue counts.
_PLAIN = {"name": "adam", "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
_CONSTANT = {"name": "WarmupAnnealing", "warmup_steps": 0, "min_lr": "${model.finetuning_optim.lr}"}


def chooses_task(cfg: DictConfig) -> bool:
    """Whether a config is one of ours, made of the groups of `conf/downstream`."""
    return _get(cfg, "model.data.preprocessing._target_") is not None and _get(cfg, "model._target_") is None


def take_places(cfg: DictConfig, complete: bool) -> list[str]:
    """Put keys of v1 where they stand now, and say so.

    Args:
        cfg: as it was composed.
        complete: whether the file is one of ours; then the old key was typed and counts, else the new one.
    """
    taken = []
    for old, new in MOVED.items():
        if _get(cfg, old) is None:
            continue
        group, _, name = old.rpartition(".")
        with open_dict(cfg):
            value = OmegaConf.select(cfg, group).pop(name)
            if complete or _get(cfg, new) is None:
                OmegaConf.update(cfg, new, value, force_add=True)
        taken.append(f"{old} ({new})")
    return [f"keys of v1 taken for: {', '.join(taken)}"] if taken else []


def make_room(base: DictConfig, cfg: DictConfig) -> list[str]:
    """Make a config of ours fit to be laid under a file of v1, and take out of that what the model says itself.

    Args:
        base: takes what the file says; of a file that describes a task, no other task's mask, optimizer and schedule
            stay in it.
        cfg: of the file.
    """
    with open_dict(base), open_dict(cfg):
        if _get(cfg, "model.data.target_column") is not None:
            base.model.data.mask_column = None
            if (optim := _get(cfg, "model.finetuning_optim")) is not None:
                base.model.finetuning_optim = _PLAIN
                base.model.finetuning_optim.sched = {} if "sched" in optim else _CONSTANT
        if _get(cfg, "model._target_") is not None:  # a pretraining's file lies under it
            del cfg.model["_target_"]
            cfg.model.data.pop("preprocessing", None)
        count = _drop(cfg, "", _of_pretraining())
    return [f"{count} keys of the model's pretraining are left out: the model says itself what it is"] if count else []


def _of_pretraining() -> set[str]:
    """Full keys that a pretraining knows and a downstream run does not."""
    keys = set(all_keys(RunConfig))
    for schema in SCHEMAS.values():
        if issubclass(schema, ModelConfig):
            keys |= {f"model.{key}" for key in all_keys(schema)}
    return keys - set(all_keys(DownstreamConfig)) - set(OF_DOWNSTREAM)


def _drop(node: Any, prefix: str, keys: set[str]) -> int:
    """Take keys out, and count them."""
    count = 0
    for name in list(node):
        key = f"{prefix}{name}"
        if key in keys:
            del node[name]
            count += 1
        elif isinstance(below := node._get_node(name), DictConfig) and not below._is_none():
            count += _drop(below, f"{key}.", keys)
    return count


def _get(cfg: DictConfig, key: str) -> Any:
    """The node at a key, unresolved; None where there is none."""
    node: Any = cfg
    for name in key.split("."):
        node = node._get_node(name) if isinstance(node, DictConfig) and name in list(node) else None
        if node is None:
            return None
    return node
