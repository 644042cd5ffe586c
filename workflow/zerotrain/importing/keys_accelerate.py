"""Rows of the table: the YAML that `accelerate config` writes, and the launchers' flags."""

from __future__ import annotations

from zerotrain.importing.keys import (
    Key,
    by_name,
    honoured,
    left_out,
    no_op,
    passed,
    refused,
    section,
)

NODES = "set launch.machines and launch.processes_per_machine; Slurm chooses the machines"
TPU = "only for TPUs, which are not supported"
ONE_NODE = "the machines of a Slurm job find each other by its id"
COMPILE = "set launch.dynamo_backend and launch.dynamo_mode, which compile the model"
OWN_LAUNCH = "zerotrain starts and ends its processes itself"


def _accelerate(name: str, kind: str, default: object = None) -> Key:
    return passed(name, kind, default, under="launch.accelerate")  # type: ignore[arg-type]


ACCELERATE = by_name(
    [
        honoured("distributed_type", "text", "launch.preset"),
        refused("compute_environment", "text", "only LOCAL_MACHINE is supported", "LOCAL_MACHINE"),
        honoured("mixed_precision", "text", "launch.mixed_precision", "no"),
        honoured("fp16", "flag", "launch.mixed_precision", reason="the form of old versions"),
        honoured("num_processes", "whole", "launch.num_processes"),
        honoured("main_process_port", "whole", "launch.main_process_port"),
        honoured("num_machines", "whole", "launch.machines", 1),
        no_op("machine_rank", "whole", ONE_NODE),
        no_op("main_process_ip", "text", ONE_NODE),
        no_op("rdzv_backend", "text", ONE_NODE),
        no_op("same_network", "flag", ONE_NODE),
        _accelerate("debug", "flag", False),
        _accelerate("enable_cpu_affinity", "flag", False),
        _accelerate("gpu_ids", "text", "all"),
        left_out(
            "use_cpu",
            "flag",
            "the launch files name no device: hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on "
            "the CPU",
            False,
        ),
        no_op("main_training_function", "text", "only for notebooks and TPUs"),
        no_op("downcast_bf16", "text", TPU),
        refused("tpu_name", "text", TPU),
        refused("tpu_zone", "text", TPU),
        refused("tpu_use_cluster", "flag", TPU, False),
        refused("tpu_use_sudo", "flag", TPU, False),
        refused("command_file", "text", TPU),
        refused("commands", "block", TPU),
        refused("tpu_vm", "block", TPU),
        refused("tpu_env", "block", TPU),
        left_out("dynamo_config", "block", COMPILE),
        left_out("dynamo_backend", "text", COMPILE, "no"),
        refused("fp8_config", "block", "fp8 is not supported: bf16, fp16 or no"),
        refused("fsdp_config", "block", "FSDP is not supported: ZeRO stage 3 shards the same"),
        refused("megatron_lm_config", "block", "Megatron-LM is not supported"),
        refused("parallelism_config", "block", "processes split the batch, and nothing else"),
        refused("mpirun_config", "block", "processes are not started by mpirun"),
        section("deepspeed_config"),
        honoured("deepspeed_config.deepspeed_config_file", "text", "launch.preset"),
        honoured("deepspeed_config.zero_stage", "whole", "launch.preset", 2),
        honoured(
            "deepspeed_config.offload_optimizer_device", "text", "launch.offload_optimizer", "none"
        ),
        honoured("deepspeed_config.offload_param_device", "text", "launch.offload_param", "none"),
        honoured("deepspeed_config.offload_optimizer_nvme_path", "text", "launch.offload_path"),
        honoured("deepspeed_config.offload_param_nvme_path", "text", "launch.offload_path"),
        honoured(
            "deepspeed_config.gradient_accumulation_steps",
            "whole",
            "train.gradient_accumulation_steps",
            1,
        ),
        honoured("deepspeed_config.gradient_clipping", "number", "train.max_grad_norm", 1.0),
        honoured("deepspeed_config.zero3_init_flag", "flag", "launch.zero3_init"),
        no_op(
            "deepspeed_config.zero3_save_16bit_model",
            "flag",
            "weights leave through export_weights, which gathers them itself",
        ),
        left_out("deepspeed_config.deepspeed_hostfile", "text", NODES),
        left_out("deepspeed_config.deepspeed_exclusion_filter", "text", NODES),
        left_out("deepspeed_config.deepspeed_inclusion_filter", "text", NODES),
        no_op("deepspeed_config.deepspeed_multinode_launcher", "text", ONE_NODE),
        left_out(
            "deepspeed_config.deepspeed_moe_layer_cls_names",
            "text",
            "no family has mixture-of-experts layers",
        ),
    ]
)
"""accelerate.commands.config.config_args.ClusterConfig, and what stands under its DeepSpeed key."""

DEEPSPEED_FLAGS = {
    name.partition(".")[2]: name for name in ACCELERATE if name.startswith("deepspeed_config.")
}
"""Flags of `accelerate launch` that stand under deepspeed_config in its YAML."""

LAUNCH_FLAGS = by_name(
    [
        honoured("config_file", "text", "launch", reason="read, with what it names"),
        honoured("use_deepspeed", "flag", "launch.preset"),
        honoured("multi_gpu", "flag", "launch.preset"),
        honoured("num_cpu_threads_per_process", "whole", "launch.num_cpu_threads_per_process"),
        left_out("cpu", "flag", ACCELERATE["use_cpu"].reason, False),
        no_op("quiet", "flag", OWN_LAUNCH),
        no_op("tee", "text", OWN_LAUNCH + "; rules write logs/"),
        no_op("log_dir", "text", OWN_LAUNCH + "; rules write logs/"),
        no_op("role", "text", OWN_LAUNCH),
        no_op("rdzv_conf", "text", ONE_NODE),
        left_out("max_restarts", "whole", OWN_LAUNCH + "; a restart is the same command", 0),
        no_op("monitor_interval", "number", OWN_LAUNCH),
        no_op("module", "flag", "the script is not run: its family is"),
        no_op("no_python", "flag", "the script is not run: its family is"),
        left_out("dynamo_mode", "text", ACCELERATE["dynamo_backend"].reason, "default"),
        left_out("dynamo_use_fullgraph", "flag", ACCELERATE["dynamo_backend"].reason, False),
        left_out("dynamo_use_dynamic", "flag", ACCELERATE["dynamo_backend"].reason, False),
        left_out(
            "dynamo_use_regional_compilation", "flag", ACCELERATE["dynamo_backend"].reason, False
        ),
        refused("use_fsdp", "flag", ACCELERATE["fsdp_config"].reason, False),
        refused("use_megatron_lm", "flag", ACCELERATE["megatron_lm_config"].reason, False),
        refused("use_parallelism_config", "flag", ACCELERATE["parallelism_config"].reason, False),
        refused("tpu", "flag", TPU, False),
    ]
)
"""Flags of `accelerate launch` beside those that are keys of its YAML."""

TORCHRUN_FLAGS = by_name(
    [
        honoured("nproc_per_node", "text", "launch.num_processes", 1),
        honoured("master_port", "text", "launch.main_process_port"),
        refused("nnodes", "text", NODES, "1"),
        no_op("node_rank", "whole", ONE_NODE),
        no_op("master_addr", "text", ONE_NODE),
        no_op("standalone", "flag", ONE_NODE),
        no_op("rdzv_backend", "text", ONE_NODE),
        no_op("rdzv_endpoint", "text", ONE_NODE),
        no_op("rdzv_id", "text", ONE_NODE),
        no_op("rdzv_conf", "text", ONE_NODE),
        left_out("max_restarts", "whole", OWN_LAUNCH + "; a restart is the same command", 0),
        no_op("monitor_interval", "number", OWN_LAUNCH),
        no_op("start_method", "text", OWN_LAUNCH),
        no_op("role", "text", OWN_LAUNCH),
        no_op("log_dir", "text", OWN_LAUNCH + "; rules write logs/"),
        no_op("redirects", "text", OWN_LAUNCH + "; rules write logs/"),
        no_op("tee", "text", OWN_LAUNCH + "; rules write logs/"),
        no_op("module", "flag", "the script is not run: its family is"),
        no_op("no_python", "flag", "the script is not run: its family is"),
    ]
)
"""Flags of torchrun and of `python -m torch.distributed.run`."""
