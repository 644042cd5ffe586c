"""Which keys of DeepSpeed's and accelerate's own files a launch may set, and why not the others.

A key is free (written into the file as it is given), ours (the configuration has a key of its own
for it, so that a value never stands in two places), without effect here, or refused. The tables are
held complete against DeepSpeed's and accelerate's own classes by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

UNSET = object()


@dataclass(frozen=True)
class Key:
    """What becomes of a key."""

    verdict: Literal["free", "ours", "idle", "refused"]
    text: str = ""
    """Our key, or the reason."""
    harmless: Any = UNSET
    """A value that changes nothing and is taken without a word."""
    kind: type | tuple[str, ...] = object
    """Of a free key's values, or the choice of them; numbers are never negative."""


def _free(kind: type | tuple[str, ...], *names: str) -> dict[str, Key]:
    return dict.fromkeys(names, Key("free", kind=kind))


def _refused(reason: str, *names: str, harmless: Any = UNSET) -> dict[str, Key]:
    return dict.fromkeys(names, Key("refused", reason, harmless))


def _idle(reason: str, *names: str) -> dict[str, Key]:
    return dict.fromkeys(names, Key("idle", reason))


def _ours(**names: str) -> dict[str, Key]:
    return {name: Key("ours", own) for name, own in names.items()}


def _inside(section: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": key for name, key in keys.items()}


_LOADER = "the program has its own loader, whose order a checkpoint keeps"
_CHECKPOINT = "checkpoints have zerotrain's own format, the same under every engine"
_STATE = "its optimizer states lie where no checkpoint of zerotrain could take them from"
_QUANTIZED = "weights and gradients would be rounded beyond what a switch can carry exactly"
_PARALLEL = "the model is trained data-parallel; models are not cut within a layer"
_ALIAS = "an old name; use offload_optimizer, offload_param or the key without fp16"

_OFFLOAD = {
    **_free(bool, "pin_memory"),
    **_free(int, "buffer_count"),
    **_ours(device="launch.{target}", nvme_path="launch.offload_path"),
}
_ZERO = {
    **_ours(stage="launch.preset"),
    **_free(
        bool, "contiguous_gradients", "reduce_scatter", "allgather_partitions", "overlap_comm",
        "use_multi_rank_bucket_allreduce", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "ignore_unused_parameters", "memory_efficient_linear",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "stage3_gather_16bit_weights_on_model_save",
    ),
    **_free(
        int, "reduce_bucket_size", "allgather_bucket_size", "sub_group_size",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_module_granularity_threshold",
    ),
    **_refused(
        "under it DeepSpeed names other parameters' moments, so that no checkpoint would be right",
        "round_robin_gradients", harmless=False,
    ),
    **_refused("a padding between parameters that checkpoints do not know", "parameter_alignment",
               harmless=False),
    **_refused("clipping and the log need the norm of the gradients", "compute_grad_norm",
               harmless=True),
    **_refused(_CHECKPOINT, "elastic_checkpoint", "pipeline_loading_checkpoint", harmless=False),
    **_refused(_CHECKPOINT, "load_from_fp32_weights", harmless=True),
    **_refused(_STATE, "zenflow"),
    **_refused(_STATE, "save_muon_momentum_buffer_in_memory", harmless=False),
    **_refused(_QUANTIZED, "zero_quantized_weights", "zero_quantized_nontrainable_weights",
               "zero_quantized_gradients", harmless=False),
    **_refused("a second sharding within a node that checkpoints do not know",
               "zero_hpz_partition_size", harmless=1),
    **_refused("stage 1 of old DeepSpeed versions", "legacy_stage1", harmless=False),
    **_refused("layers of mixtures of experts; no family has them", "leaf_module"),
    **_refused(_ALIAS, "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
               "stage3_gather_fp16_weights_on_model_save", harmless=False),
    **_inside("offload_optimizer", {
        **_OFFLOAD, **_free(bool, "pipeline_read", "pipeline_write", "fast_init"),
        **_refused(_STATE, "ratio", harmless=1.0),
        **_refused(_STATE, "super_offload", harmless=False),
        **_idle("belongs to super_offload", "cpuadam_cores_perc"),
    }),
    **_inside("offload_param", {**_OFFLOAD, **_free(int, "buffer_size", "max_in_cpu")}),
}  # fmt: skip
_FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")

DEEPSPEED: dict[str, Key] = {
    **_ours(
        train_batch_size="train.global_batch_size",
        train_micro_batch_size_per_gpu="train.global_batch_size and gradient_accumulation_steps",
        gradient_accumulation_steps="train.gradient_accumulation_steps",
        gradient_clipping="train.max_grad_norm",
        optimizer="train.optimizer",
        scheduler="train.lr_scheduler",
    ),
    **_inside("optimizer", _ours(type="train.optimizer", params="train.optimizer_args",
                                 legacy_fusion="train.optimizer")),
    **_inside("scheduler", _ours(type="train.lr_scheduler", params="train.lr_scheduler_args")),
    **_inside("zero_optimization", _ZERO),
    **_inside("fp16", {
        **_ours(enabled="launch.mixed_precision", **{key: f"launch.fp16.{key}" for key in _FP16}),
        **_refused("inputs are cast by the model family", "auto_cast", harmless=False),
        **_refused("the loss scale would differ from plain PyTorch's", "consecutive_hysteresis",
                   harmless=False),
        **_refused("master weights are float32, or a switch would lose their last bits",
                   "fp16_master_weights_and_grads", harmless=False),
    }),
    **_inside("bf16", {
        **_ours(enabled="launch.mixed_precision"),
        **_free(bool, "immediate_grad_update", "check_grad_overflow"),
        **_idle("a loss scale belongs to fp16: bf16 has float32's range", *_FP16),
        **_refused("master weights and moments are float32, or a switch would lose their last bits",
                   "bf16_master_weights_and_grads", "bf16_optimizer_states", harmless=False),
    }),
    **_inside("activation_checkpointing", {
        **_ours(**{key: f"launch.{key}" for key in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")}),
        **_free(int, "number_checkpoints"),
        **_free(bool, "synchronize_checkpoint_boundary", "profile"),
    }),
    **_inside("aio", {**_free(int, "block_size", "queue_depth", "intra_op_parallelism"),
                      **_free(bool, "single_submit", "overlap_events"),
                      **_refused("the check of NVMe offload does not cover it", "use_gds",
                                 harmless=False)}),
    **_free(bool, "prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state",
            "disable_python_gc"),
    **_free(int, "steps_per_print"),
    **_free(float, "gradient_predivide_factor"),
    **_free(("fp32", "fp16", "bf16"), "communication_data_type"),
    **_free(str, "log_level"),
    **_free(object, "timers", "comms_logger", "flops_profiler"),
    **_idle("the program chooses the optimizer itself and answers for it",
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    **_idle("only without ZeRO, which every preset here has", "disable_allgather"),
    **_idle("only where sequences are cut over processes", "seq_parallel_communication_data_type"),
    **_idle(_LOADER, "dataloader_drop_last"),
    **_idle(_CHECKPOINT, "checkpoint", "datastates_ckpt", "nebula"),
    **_refused(_LOADER, "data_efficiency", "curriculum_learning"),
    **_refused("the step counts micro batches itself", "managed_gradient_accumulation",
               harmless=True),
    **_refused("curves are logged for TensorBoard already", "tensorboard", "wandb", "csv_monitor",
               "comet"),
    **_refused("the loss is a mean over all processes", "gradient_allreduce_op", harmless="mean"),
    **_refused("Apex is gone; set launch.mixed_precision", "amp"),
    **_refused("precision is launch.mixed_precision", "torch_autocast", "data_types"),
    **_refused(_QUANTIZED, "weight_quantization", "compression_training", "quantize_training"),
    **_refused(_PARALLEL, "tensor_parallel", "sequence_parallel_size", "expert_parallel",
               "use_data_before_expert_parallelism", "pipeline", "sparse_attention",
               "sparse_gradients", "vocabulary_size"),
    **_refused("the number of processes is part of the numbers: change it in a phase",
               "elasticity"),
    **_refused("`zerotrain plan` does that without a GPU", "autotuning"),
    **_refused("for training with generation between steps", "hybrid_engine"),
    **_refused("graphs are not compiled yet", "compile", "graph_harvesting"),
    **_refused("layers would be left out at random, which plain PyTorch cannot repeat",
               "progressive_layer_drop", "eigenvalue"),
    **_refused("an old name; use bf16", "bfloat16"),
}  # fmt: skip
"""By dotted key; one without an entry of its own takes that of the section it stands in."""

_MODEL = "the model is prepared by the program, not by accelerate"

ACCELERATE: dict[str, Key] = {
    **_free(str, "gpu_ids", "rdzv_backend", "main_process_ip"),
    **_free(bool, "same_network", "enable_cpu_affinity", "debug"),
    **_ours(
        distributed_type="launch.preset",
        mixed_precision="launch.mixed_precision",
        num_processes="launch.num_processes",
        main_process_port="launch.main_process_port",
    ),
    **_ours(deepspeed_config="launch.deepspeed"),
    **_inside("deepspeed_config", {
        **_ours(zero3_init_flag="launch.zero3_init", zero_stage="launch.preset",
                deepspeed_config_file="launch.deepspeed"),
        **_refused("several nodes come with a cluster's launcher", "deepspeed_hostfile",
                   "deepspeed_multinode_launcher", "deepspeed_inclusion_filter",
                   "deepspeed_exclusion_filter"),
    }),
    **_refused("phases run on one machine so far", "num_machines", harmless=1),
    **_refused("phases run on one machine so far", "machine_rank", harmless=0),
    **_refused("a GPU is used where there is one; hide it with CUDA_VISIBLE_DEVICES", "use_cpu",
               harmless=False),
    **_idle("the program is started as a module", "main_training_function"),
    **_idle("accelerate's place for other machines; only this one is launched on",
            "compute_environment"),
    **_refused("sharding is ZeRO's here", "fsdp_config", "megatron_lm_config",
               "parallelism_config", harmless={}),
    **_refused(_MODEL, "dynamo_config", "fp8_config", harmless={}),
    **_refused("processes are started by accelerate's own launcher", "mpirun_config", harmless={}),
    **_idle("for TPUs, on which nothing here runs", "downcast_bf16", "tpu_name", "tpu_zone",
            "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"),
}  # fmt: skip


def find_key(table: dict[str, Key], dotted: str) -> Key | None:
    """What becomes of a dotted key: its own entry, or that of a section it stands in."""
    while dotted:
        if dotted in table:
            return table[dotted]
        dotted = dotted.rpartition(".")[0]
    return None
