# SPDX-License-Identifier: Apache-2.0
"""Configuration keys and files of BioNeMo v1: keys that are ignored, keys that were renamed, complete files.

A key in a table stands for all keys below it.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from bionemo.config.hints import all_keys, with_subclasses
from bionemo.config.schema import DownstreamConfig, InferConfig, ModelConfig, RunConfig


def _by_key(table: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Convert prefix -> reason -> names to full key -> reason."""
    return {
        f"{prefix}{name}": reason
        for prefix, reasons in table.items()
        for reason, names in reasons.items()
        for name in names.split()
    }


# Keys without effect in every command: prefix -> what replaced them, or why they have no effect -> names.
IGNORED = _by_key({
    "": {
        "model._target_": "target infer_target",
        "restore_from_path": "load_from_checkpoint",
        "the launcher is detected from its environment variables": "cluster_type",
        "progress, metrics and metadata are always written": (
            "create_dllogger_callbacks dllogger_callbacks_kwargs create_trainer_metric_callback "
            "trainer_metric_callback_kwargs create_metadata_save_callback create_metric_collector "
            "metrics_collector_kwargs"
        ),
        "a run saves a checkpoint after SIGTERM and ends": "create_kill_after_signal_callback",
        "every checkpoint is verified": "create_checkpoint_integrity_callback",
        "trainer.enable_progress_bar": "progress_bar_kwargs",
    },
    "trainer.": {
        "exp_manager creates loggers and checkpoints": "logger enable_checkpointing",
        "samples are always distributed over the ranks": "use_distributed_sampler replace_sampler_ddp",
        "trainer.min_steps": "min_epochs",
        "gradients are clipped by their norm": "gradient_clip_algorithm",  # see FIXED
        "trainer.limit_train_batches": "overfit_batches",  # see FIXED
        "trainer.fast_dev_run": "barebones",  # see FIXED
        "predictions are made by `bionemo predict`": "limit_predict_batches",
        "the models have no batch normalization": "sync_batchnorm",
        "the files are read once for all epochs": "reload_dataloaders_every_n_epochs",
        "exp_manager.resume_from_checkpoint": "resume_from_checkpoint",
        "the strategy follows from the parallel sizes": "strategy plugins",
    },
    "exp_manager.": {
        "checkpoints are not uploaded": (
            "wandb_logger_kwargs.log_model wandb_logger_kwargs.checkpoint_name mlflow_logger_kwargs.log_model "
            "clearml_logger_kwargs.log_model clearml_logger_kwargs.model_name clearml_logger_kwargs.log_cfg "
            "clearml_logger_kwargs.log_metrics"
        ),
        "`bionemo checkpoint average` averages weights": "ema",  # see FIXED
        "seconds per step are always logged": "log_step_timing log_delta_step_timing step_timing_kwargs",
        "`bionemo plan` prints FLOPs per step": "log_tflops_per_sec_per_gpu",
        "set a larger trainer.max_steps": "resume_past_end",
        "a run saves a checkpoint after SIGTERM and ends": "create_preemption_callback",
        "a completed validation is not repeated": "disable_validation_on_resume",
        "exp_manager.log_global_rank_0_only": "log_local_rank_0_only",
        "there are no speech models": "create_ipl_epoch_stopper_callback ipl_epoch_stopper_callback_params",
    },
    "exp_manager.checkpoint_callback_params.": {
        "checkpoints are directories named by filename": "filepath",
        "no message is printed for a checkpoint": "verbose",
        "the last checkpoint is kept for resuming": "save_last",
        "names of checkpoints contain the names of metrics": "auto_insert_metric_name",
        "every_n_train_steps or train_time_interval": "every_n_epochs save_on_train_epoch_end",
        "model.tensor_model_parallel_size": "model_parallel_size",
        "save_weights_only omits the optimizer state": "save_last_n_optim_states",
    },
    "model.": {
        "model._target_": "target infer_target use_esm_attention",
        "model.dwnstr_task_validation": "validation",  # see FIXED
        "a resumed run continues with the schedule of its checkpoint": (
            "optim.sched.last_epoch finetuning_optim.sched.last_epoch "
            "dwnstr_task_validation.dataset.optim.sched.last_epoch"
        ),
        "softmax, normalization, GELU and bias have one exact implementation": (
            "apply_query_key_layer_scaling normalize_attention_scores openai_gelu onnx_safe esm_gelu use_pt_layernorm "
            "use_pt_mlp_out"
        ),
        "the residual stream keeps its own precision": "fp32_residual_connection",
        "the loss is always computed in float32": "fp16_lm_cross_entropy",
        "model.compile fuses operations": (
            "masked_softmax_fusion bias_gelu_fusion bias_activation_fusion bias_dropout_add_fusion "
            "gradient_accumulation_fusion persist_layer_norm transformer_engine"
        ),
        "the fastest attention kernel is selected automatically": "use_flash_attention use_emha gpu_attention",
        "a token never attends to another sequence": "embedding_use_attention_mask",
        "checkpoints contain their own version": "megatron_legacy",
        "initial weights do not depend on the device": "use_cpu_initialization",
        "determined by the pipeline stage": "pre_process post_process",
        "there is no sentence-pair task": "bert_binary_head bert_return_types",
        "trainer.precision": (
            "megatron_amp_O2 float8 fp8 fp8_e4m3 fp8_hybrid fp8_margin fp8_interval fp8_amax_history_len "
            "fp8_amax_compute_algo fp8_wgrad"
        ),
        "gradients are always reduced in buckets": (
            "grad_div_ar_fusion grad_allreduce_chunk_size_mb gradient_as_bucket_view"
        ),
        "model.pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
        "Apex is not used": "apex_transformer_log_level sync_batch_comm",
        "Python's garbage collector": "gc_interval",
        "trainer.profiler": "nsys_profile",
        "encoder-decoders have no pipeline parallelism": "pipeline_model_parallel_split_rank",
        "the model class defines the architecture": (
            "relative_position_bias_self_attention_only relative_attention_num_buckets bias headscale hidden_steps "
            "relative_attention_max_distance num_self_attention_per_cross_attention share_token_embeddings "
            "num_query_groups"
        ),
        "model.global_batch_size is constant": "rampup_batch_size",  # see FIXED
        "model.sequence_parallel": "context_parallel_size",
        "model.data.drop_last": "drop_last",
        "model.activations_checkpoint_granularity": "num_micro_batches_with_partial_activation_checkpoints",
        "model.activations_checkpoint_num_layers": "activations_checkpoint_layers_per_pipeline",
        "communication overlaps with computation where possible": (
            "overlap_p2p_comm batch_p2p_comm ub_tp_comm_overlap optim.overlap_grad_sync optim.overlap_param_sync"
        ),
        "NCCL's environment variables": "sharp",
        "every model uses Megatron-Core": "mcore_gpt",
        "the layers have one architecture": "normalization transformer_block_type encoder_arch decoder_arch",
        "model.optim.name=distributed_fused_adam divides the optimizer state": (
            "fsdp fsdp_sharding_strategy fsdp_grad_reduce_dtype fsdp_sharded_checkpoint"
        ),
        "the model class defines the tokenizer": (
            "tokenizer.library tokenizer.type tokenizer.model tokenizer.model_name tokenizer.mask_id "
            "tokenizer.delimiter mask_token_id"
        ),
        "gradient buckets are managed automatically": "optim.bucket_cap_mb optim.contiguous_grad_buffer",
    },
    "model.peft.": {
        "a run resumes automatically": "restore_from_path",
        "adapters are initialized to add zero": "lora_tuning.column_init_method lora_tuning.row_init_method",
        "model.downstream_task.dropout": "lora_tuning.adapter_dropout",
        "model.peft.lora_tuning.target_modules": "lora_tuning.layer_selection",
        "every layer has its own adapter": "lora_tuning.weight_tying lora_tuning.position_embedding_strategy",
    },
    "model.data.": {
        "model.data.dataset_path": "data_prefix",
        "a token never attends to another sequence": "reset_position_ids reset_attention_mask eod_mask_loss",
        "model.seq_length": "seq_length",
        "model.data.canonicalize_encoder_input": "canonicalize_input",
        "spans are single residues at random positions": (
            "short_seq_prob max_ngram_size mean_ngram_size geometric_dist permutation whole_word_masking "
            "favor_longer_ngrams"
        ),
        "model._target_": "dataset_type",
        "model.data.data_impl_kwargs.csv_mmap.header_lines": "skip_lines",
        "model.micro_batch_size": "micro_batch_size",
        "missing indexes are built automatically": "skip_warmup",
        "the order of samples is computed, not stored": "index_mapping_type force_regen_sample_mapping",
        "model.data.shuffle determines the order": "dataloader_type",
        "nothing is downloaded from NGC: set model.data.dataset_path, or model.data.preprocessing.source": (
            "ngc_registry_target ngc_registry_version"
        ),
        "members are always stored next to their cluster": "train.sort_fastas",
        "validations compare tokens and decode no SMILES": "canonicalize_target_smile",
        "FASTA files have no settings": (
            "data_impl_kwargs.fasta_fields_mmap train.data_impl_kwargs.fasta_fields_mmap "
            "val.data_impl_kwargs.fasta_fields_mmap test.data_impl_kwargs.fasta_fields_mmap"
        ),
    },
    "model.dwnstr_task_validation.dataset.": {
        "model.dwnstr_task_validation.dataset.task_type": "class",
        "the model being trained": "infer_target",
        "the embeddings are in memory": "num_workers",
    },
})  # fmt: skip
# Ignored keys that may only have one value, or be null, empty, 0 or False: others would change the training.
FIXED = {
    "model.rampup_batch_size": None, "model.validation.validation_enabled": False, "exp_manager.ema.enable": False,
    "trainer.overfit_batches": 0, "trainer.barebones": False, "trainer.gradient_clip_algorithm": "norm",
    "model.normalization": "layernorm", "model.transformer_block_type": "pre_ln",
    "model.encoder_arch": "transformer", "model.decoder_arch": "transformer", "model.data.max_ngram_size": 1,
}  # fmt: skip
# Keys without effect in one command; other commands may define them.
IGNORED_IN: dict[type, dict[str, str]] = {
    InferConfig: _by_key({
        "": {
            "a prediction writes only its output": "exp_manager formatters handlers root disable_existing_loggers",
        },
        "model.": {
            "files are read in the main process": "data.num_workers",
            "nothing is masked": "data.modify_percent",
            "model.data.batch_size": "micro_batch_size",
        },
    }),
    DownstreamConfig: _by_key({
        "": {"model.restore_encoder_path": "restore_from_path"},
        "model.": {
            "name": "name",
            "the loss follows from model.data.task_type": "loss_func downstream_task.loss_func",
            "model.data.target_sizes": "downstream_task.n_outputs data.num_classes",
            "model.micro_batch_size": "accumulate_grad_batches",
            "nothing is masked": "modify_percent data.modify_percent",
            "files are read as a whole": "data.num_workers",
            "the model defines its maximum length": "data.max_seq_length",
            "model.data.preprocessing splits the records": (
                "data.links_file data.split_data data.val_frac data.test_frac"
            ),
        },
    }),
}  # fmt: skip
# Keys of a downstream run that were renamed: old key -> new key.
RENAMED = {
    "model.dropout_rate": "model.downstream_task.dropout",
    "model.cnn_dim": "model.downstream_task.cnn_dim",
    "model.hidden_layer_size": "model.downstream_task.hidden_layer_size",
}
# Defaults of v1's downstream files: no weight decay, a constant learning rate.
_V1_OPTIMIZER = {"name": "adam", "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
_V1_SCHEDULE = {"name": "WarmupAnnealing", "warmup_steps": 0, "min_lr": "${model.finetuning_optim.lr}"}


def replacement(key: str, schema: type = RunConfig) -> str | None:
    """Return what replaced an ignored key of v1, or why it has no effect; None for every other key."""
    ignored = {**IGNORED, **IGNORED_IN.get(schema, {})}
    while key:
        if key in ignored:
            return ignored[key]
        key = key.rpartition(".")[0]
    return None


def describe_ignored_keys(keys: Mapping[str, str]) -> list[str]:
    """Return a note about keys (key -> reason) that have no effect, grouped by reason; [] if there are none."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    groups = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return [f"keys of v1 without effect: {groups}"] if groups else []


def selects_task(cfg: DictConfig) -> bool:
    """Return whether a downstream configuration is composed of the groups in `conf/downstream`."""
    return _select(cfg, "model.data.preprocessing._target_") is not None and _select(cfg, "model._target_") is None


def migrate_keys(cfg: DictConfig, complete: bool) -> list[str]:
    """Move values of renamed keys to their new keys; return a note about them.

    Args:
        cfg: composed configuration, modified in place.
        complete: whether `selects_task`. Then the old key comes from the command line and replaces the new key's
            value. Otherwise the new key's value takes precedence.
    """
    moved = []
    for old, new in RENAMED.items():
        if _select(cfg, old) is None:
            continue
        group, _, name = old.rpartition(".")
        with open_dict(cfg):
            value = OmegaConf.select(cfg, group).pop(name)
            if complete or _select(cfg, new) is None:
                OmegaConf.update(cfg, new, value, force_add=True)
        moved.append(f"{old} ({new})")
    return [f"keys of v1 that were renamed: {', '.join(moved)}"] if moved else []


def merge_v1_defaults(base: DictConfig, cfg: DictConfig) -> list[str]:
    """Prepare the merge of a downstream file of v1 over a configuration of ours; return a note about removed keys.

    Such a file contains the whole pretraining configuration, which a downstream run reads from the checkpoint.

    Args:
        base: our configuration, modified in place. If the file defines a task, the values of our own task (mask
            column, optimizer, schedule) are replaced by v1's defaults.
        cfg: the file's configuration, modified in place. Its pretraining keys are removed.
    """
    with open_dict(base), open_dict(cfg):
        if _select(cfg, "model.data.target_column") is not None:
            base.model.data.mask_column = None
            if (optim := _select(cfg, "model.finetuning_optim")) is not None:
                base.model.finetuning_optim = _V1_OPTIMIZER
                base.model.finetuning_optim.sched = {} if "sched" in optim else _V1_SCHEDULE
        if _select(cfg, "model._target_") is not None:  # the file includes one of our pretraining files
            del cfg.model["_target_"]
            cfg.model.data.pop("preprocessing", None)
        count = _remove(cfg, "", _pretraining_keys())
    return [f"{count} pretraining keys are ignored: they are read from the checkpoint"] if count else []


def _pretraining_keys() -> set[str]:
    """Return the full keys that a pretraining run has and a downstream run does not."""
    keys = set(all_keys(RunConfig))
    for schema in with_subclasses(ModelConfig):
        keys |= {f"model.{key}" for key in all_keys(schema)}
    return keys - set(all_keys(DownstreamConfig)) - set(IGNORED_IN[DownstreamConfig])


def _remove(node: DictConfig, prefix: str, keys: set[str]) -> int:
    count = 0
    for name in list(node):
        key = f"{prefix}{name}"
        if key in keys:
            del node[name]
            count += 1
        elif isinstance(child := node._get_node(name), DictConfig) and not child._is_none():
            count += _remove(child, f"{key}.", keys)
    return count


def _select(cfg: DictConfig, key: str) -> Any:
    """Return the value at a key; None if it does not exist or is a reference that cannot be resolved."""
    return OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
