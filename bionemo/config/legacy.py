# SPDX-License-Identifier: Apache-2.0
"""Keys of BioNeMo v1 that are still accepted and do nothing, with what takes their place.

A key stands for all keys below it.
"""

from collections.abc import Mapping

_ALWAYS_EXACT = "softmax, norm, GELU and bias are computed one way, the exact one"
_NO_FUSION_KNOB = "model.compile fuses what can be fused"
_PACKED = "a token never sees another sequence"
_ARCHITECTURE = "the architecture is the model's own"
_HALF = "trainer.precision"
_OVERLAP = "what can run beside the computation does"
_SINGLE = "spans are single residues, drawn at random"
_LAUNCHER = "the launcher is recognised by its environment"
_CALLBACKS = "progress, metrics and metadata are always written"
_INITIAL = ("column_init_method", "row_init_method")
_FSDP = ("", "_sharding_strategy", "_grad_reduce_dtype", "_sharded_checkpoint")
_FP8 = ("", "_e4m3", "_hybrid", "_margin", "_interval", "_amax_history_len", "_amax_compute_algo", "_wgrad")

LEGACY: dict[str, str] = {
    # the run
    "target": "model._target_",
    "infer_target": "model._target_",
    "load_from_checkpoint": "restore_from_path",
    "cluster_type": _LAUNCHER,
    "create_dllogger_callbacks": _CALLBACKS,
    "dllogger_callbacks_kwargs": _CALLBACKS,
    "create_trainer_metric_callback": _CALLBACKS,
    "trainer_metric_callback_kwargs": _CALLBACKS,
    "create_kill_after_signal_callback": "exp_manager.create_preemption_callback",
    "create_metadata_save_callback": _CALLBACKS,
    "create_checkpoint_integrity_callback": "every checkpoint is verified",
    "create_metric_collector": _CALLBACKS,
    "metrics_collector_kwargs": _CALLBACKS,
    "progress_bar_kwargs": "trainer.enable_progress_bar",
    # the trainer
    "trainer.replace_sampler_ddp": "trainer.use_distributed_sampler",
    "trainer.resume_from_checkpoint": "exp_manager.resume_from_checkpoint",
    "trainer.strategy": "the strategy follows from the parallel sizes",
    "trainer.plugins": "the strategy follows from the parallel sizes",
    # the model
    "model.target": "model._target_",
    "model.infer_target": "model._target_",
    "model.apply_query_key_layer_scaling": _ALWAYS_EXACT,
    "model.normalize_attention_scores": _ALWAYS_EXACT,
    "model.fp32_residual_connection": "the residual stream keeps its own precision",
    "model.fp16_lm_cross_entropy": "the loss is always computed in float32",
    "model.masked_softmax_fusion": _NO_FUSION_KNOB,
    "model.bias_gelu_fusion": _NO_FUSION_KNOB,
    "model.bias_activation_fusion": _NO_FUSION_KNOB,
    "model.bias_dropout_add_fusion": _NO_FUSION_KNOB,
    "model.gradient_accumulation_fusion": _NO_FUSION_KNOB,
    "model.persist_layer_norm": _NO_FUSION_KNOB,
    "model.openai_gelu": _ALWAYS_EXACT,
    "model.onnx_safe": _ALWAYS_EXACT,
    "model.esm_gelu": _ALWAYS_EXACT,
    "model.use_esm_attention": "model._target_",
    "model.use_pt_layernorm": _ALWAYS_EXACT,
    "model.use_pt_mlp_out": _ALWAYS_EXACT,
    "model.use_flash_attention": "attention picks the fastest kernel at hand",
    "model.embedding_use_attention_mask": _PACKED,
    "model.megatron_legacy": "checkpoints carry their own version",
    "model.use_cpu_initialization": "weights do not depend on where they are drawn",
    "model.pre_process": "the pipeline stage decides",
    "model.post_process": "the pipeline stage decides",
    "model.bert_binary_head": "there is no sentence-pair task",
    "model.bert_return_types": "there is no sentence-pair task",
    "model.megatron_amp_O2": "trainer.precision",
    "model.grad_div_ar_fusion": "gradients are always reduced in buckets",
    "model.grad_allreduce_chunk_size_mb": "gradients are always reduced in buckets",
    "model.gradient_as_bucket_view": "gradients are always reduced in buckets",
    "model.virtual_pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "model.apex_transformer_log_level": "no part of this project uses Apex",
    "model.sync_batch_comm": "no part of this project uses Apex",
    "model.gc_interval": "Python's garbage collector",
    "model.nsys_profile": "trainer.profiler",
    "model.pipeline_model_parallel_split_rank": "an encoder-decoder is not divided by depth",
    "model.relative_position_bias_self_attention_only": _ARCHITECTURE,
    "model.relative_attention_num_buckets": _ARCHITECTURE,
    "model.relative_attention_max_distance": _ARCHITECTURE,
    "model.bias": _ARCHITECTURE,
    "model.headscale": _ARCHITECTURE,
    "model.hidden_steps": _ARCHITECTURE,
    "model.num_self_attention_per_cross_attention": _ARCHITECTURE,
    "model.share_token_embeddings": _ARCHITECTURE,
    "model.num_query_groups": _ARCHITECTURE,
    "model.rampup_batch_size": "model.global_batch_size is the same from the first step",
    "model.context_parallel_size": "model.sequence_parallel",
    "model.num_micro_batches_with_partial_activation_checkpoints": "model.activations_checkpoint_granularity",
    "model.activations_checkpoint_layers_per_pipeline": "model.activations_checkpoint_num_layers",
    "model.overlap_p2p_comm": _OVERLAP,
    "model.batch_p2p_comm": _OVERLAP,
    "model.ub_tp_comm_overlap": _OVERLAP,
    "model.sharp": "NCCL's own environment variables",
    "model.mcore_gpt": "every model is on Megatron-Core",
    "model.transformer_engine": _NO_FUSION_KNOB,
    **{f"model.fsdp{key}": "model.optim.name=distributed_fused_adam divides the optimizer" for key in _FSDP},
    **{f"model.fp8{key}": _HALF for key in _FP8},
    "model.tokenizer.delimiter": "no tokenizer here has one",
    "model.optim.bucket_cap_mb": "gradients are always reduced in buckets",
    "model.optim.overlap_grad_sync": _OVERLAP,
    "model.optim.overlap_param_sync": _OVERLAP,
    "model.optim.contiguous_grad_buffer": "gradients are always reduced in buckets",
    # low-rank adapters
    "model.peft.restore_from_path": "a run goes on by itself",
    **{f"model.peft.lora_tuning.{key}": "adapters add nothing at first" for key in _INITIAL},
    "model.peft.lora_tuning.adapter_dropout": "model.downstream_task.dropout",
    "model.peft.lora_tuning.layer_selection": "model.peft.lora_tuning.target_modules",
    "model.peft.lora_tuning.weight_tying": "every layer has its own",
    "model.peft.lora_tuning.position_embedding_strategy": "every layer has its own",
    # the data
    "model.data.data_prefix": "model.data.dataset_path",
    "model.data.reset_position_ids": _PACKED,
    "model.data.reset_attention_mask": _PACKED,
    "model.data.eod_mask_loss": _PACKED,
    "model.data.seq_length": "model.seq_length",
    "model.data.canonicalize_input": "model.data.canonicalize_encoder_input",
    "model.data.short_seq_prob": _SINGLE,
    "model.data.mean_ngram_size": _SINGLE,
    "model.data.geometric_dist": _SINGLE,
    "model.data.permutation": _SINGLE,
    "model.data.whole_word_masking": _SINGLE,
    "model.data.favor_longer_ngrams": _SINGLE,
    "model.data.dataset_type": "model._target_",
    "model.data.skip_lines": "model.data.data_impl_kwargs.csv_mmap.header_lines",
    "model.data.micro_batch_size": "model.micro_batch_size",
    "model.data.skip_warmup": "indexes are made when they are missing",
    "model.data.index_mapping_type": "order is computed, not stored",
    # validation on a downstream task
    "model.dwnstr_task_validation.dataset.class": "model.dwnstr_task_validation.dataset.task_type",
    "model.dwnstr_task_validation.dataset.infer_target": "the model that trains",
}


# Of a prediction alone, which has no experiment: elsewhere some of these are keys.
_OUTPUT = "the output is all that is written"
OF_PREDICTIONS: dict[str, str] = {
    "exp_manager": _OUTPUT,
    "formatters": _OUTPUT,
    "handlers": _OUTPUT,
    "root": _OUTPUT,
    "disable_existing_loggers": _OUTPUT,
    "trainer.logger": _OUTPUT,
    "model.data.num_workers": "files are read in place",
    "model.data.modify_percent": "nothing is masked",
    "model.micro_batch_size": "model.data.batch_size",
}


def replacement(key: str, more: Mapping[str, str] | None = None) -> str | None:
    """What took the place of a key of v1 or of the group it stands in; None for every other key.

    Args:
        key: of a configuration.
        more: such keys of one kind of configuration.
    """
    known = {**LEGACY, **(more or {})}
    while key:
        if key in known:
            return known[key]
        key = key.rpartition(".")[0]
    return None


def notice(keys: dict[str, str]) -> str | None:
    """One line about the keys that were given in vain, equal reasons told once."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"keys of v1 without effect: {told}" if told else None
