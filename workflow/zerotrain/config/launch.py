"""The section that says how a phase is launched."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from zerotrain.config.section import Memory, Role, Section, Whole

Device = Literal["none", "cpu", "nvme"]
PresetName = Literal[
    "torch", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme", "auto"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def _lower(value: Any) -> Any:
    """Write a backend in lower case, as accelerate does not; `no` is a boolean to YAML 1.1."""
    if value is False:
        return "no"
    return value.lower() if isinstance(value, str) else value


Backend = Annotated[
    Literal["no", "inductor", "eager", "aot_eager", "cudagraphs"], BeforeValidator(_lower)
]


class Fp16Config(Section):
    """fp16's loss scale: the same rule under every engine. Only with mixed_precision fp16."""

    loss_scale: float = Field(0.0, ge=0, description="0 scales dynamically; else it is fixed.")
    initial_scale_power: Whole = Field(
        16, ge=0, le=31, description="The dynamic scale begins at 2 to this power."
    )
    loss_scale_window: Whole = Field(
        2000, ge=1, description="Updates without overflow after which the scale doubles."
    )
    hysteresis: Whole = Field(
        1, ge=1, description="Overflows until the scale is halved; each left out its update."
    )
    min_loss_scale: Whole = Field(1, ge=1, description="The dynamic scale falls no lower.")


class LaunchConfig(Section):
    """How a phase is launched: a preset and what overrides it."""

    preset: Annotated[PresetName, Role.UNTRAINED] = Field(
        "torch",
        description="A file of config/launch: plain PyTorch, a ZeRO stage with or without offload, "
        "or `auto`, the lowest of them that fits the GPU.",
    )
    num_processes: Whole = Field(
        1, ge=1, description="Processes, one a GPU; the global batch is shared among them."
    )
    machines: Annotated[Whole, Role.UNTRAINED] = Field(
        1,
        ge=1,
        description="Machines that a job of a cluster trains on together; without a cluster all "
        "processes run on the one there is. See [launchers.md](launchers.md#several-machines).",
    )
    processes_per_machine: Annotated[Whole | None, Role.UNRESOLVED] = Field(
        None,
        ge=1,
        description="Processes on each of the `machines`, in place of num_processes, which is "
        "their product. Default: num_processes / machines.",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="Type of forward and backward passes; `no` is fp32."
    )
    allow_tf32: Annotated[bool, Role.ROUNDING] = Field(
        False,
        description="Multiply float32 matrices in TF32 on GPUs that have it: faster, and with 10 "
        "bits of mantissa. No effect on other devices.",
    )
    full_determinism: Annotated[bool, Role.ROUNDING] = Field(
        True,
        description="Compute with kernels that give equal bits each time, so that a resumed "
        "training ends in those of an undisturbed one. A CPU does in any case. See "
        "[exactness.md](exactness.md).",
    )
    dynamo_backend: Annotated[Backend, Role.ROUNDING] = Field(
        "no",
        description="torch.compile the model with this backend; `no` leaves it as it is. "
        "accelerate's key.",
    )
    dynamo_mode: Annotated[CompileMode, Role.ROUNDING] = Field(
        "default", description="torch.compile's mode, of the backend inductor alone."
    )
    find_unused_parameters: Annotated[bool, Role.UNTRAINED] = Field(
        False,
        description="Look at every step for trained parameters without a gradient, under several "
        "processes of plain PyTorch, and report none: DDP's key of that name. A training that "
        "finds some at its first step does so by itself.",
    )
    num_cpu_threads_per_process: Annotated[Whole | None, Role.UNTRAINED] = Field(
        None,
        ge=1,
        description="Other counts give other bits, and are recorded. Default: the cores of the "
        "machine that trains, shared among its processes.",
    )
    offload_optimizer: Device | None = Field(
        None,
        description="Where master weights, moments and gradients live: on the GPU (none), in host "
        "memory (cpu: ZeRO 1 to 3) or on a disk (nvme: ZeRO 3). Default: the preset's.",
    )
    offload_param: Device | None = Field(
        None,
        description="Where weights wait until they are used; cpu and nvme need ZeRO 3. Default: "
        "the preset's.",
    )
    bf16_optimizer_states: bool = Field(
        False,
        description="Offloaded to host memory, keep the two moments of adamw and adam in bf16: 4 "
        "bytes of it a trained parameter less. Weights and gradients stay float32. See "
        "[memory.md](memory.md#less-host-memory).",
    )
    offload_path: Annotated[str | None, Role.UNTRAINED] = Field(
        None,
        description="Folder on a fast disk for what is offloaded to NVMe; variables such as "
        "`$TMPDIR` are those of the machine that trains.",
    )
    partition_activations: Annotated[bool, Role.UNTRAINED] = Field(
        False, description="DeepSpeed's key of that name; needs gradient_checkpointing."
    )
    cpu_checkpointing: Annotated[bool, Role.UNTRAINED] = Field(
        False,
        description="Keep the activations that gradient checkpointing saves in host memory.",
    )
    contiguous_memory_optimization: Annotated[bool, Role.UNTRAINED] = Field(
        False,
        description="DeepSpeed's key of that name, which is always refused: blocks differ in size.",
    )
    zero3_init: Annotated[bool, Role.UNTRAINED] = Field(
        False,
        description="Build the model in parts under ZeRO 3, so that no process ever holds all of "
        "it; accelerate's zero3_init_flag.",
    )
    fp16: Fp16Config = Field(
        Fp16Config(), description="Loss scaling, with mixed_precision fp16 alone."
    )
    main_process_port: Annotated[Whole | None, Role.UNTRAINED] = Field(
        None,
        ge=1,
        le=65535,
        description="Port on which the processes meet; default: one that is free at the start.",
    )
    ddp_timeout: Annotated[Whole, Role.UNTRAINED] = Field(
        1800,
        ge=1,
        description="Seconds that a process waits for the others, and that a training may stand "
        "still, before it is ended with a sentence that names the process and the place.",
    )
    lock_lease: Annotated[Whole, Role.UNTRAINED] = Field(
        120,
        ge=10,
        description="Seconds after the last sign of life of a training in another container or on "
        "another machine, outside of Slurm, after which a start takes its phase over.",
    )
    device_memory: Annotated[Memory | None, Role.UNRESOLVED] = Field(
        None,
        description='Memory of a GPU that `auto` plans for, such as "24 GiB"; default: that of '
        "the machine that renders the launch files.",
    )
    host_memory: Annotated[Memory | None, Role.UNRESOLVED] = Field(
        None,
        description="Memory of the machine that `auto` plans for; default: that of the machine "
        "that renders the launch files, which on a cluster is another one.",
    )
    deepspeed: Annotated[dict[str, Any], Role.UNTRAINED] = Field(
        {},
        description="Any other key of DeepSpeed's file, nested as it is there; it wins over the "
        "value that would be derived.",
    )
    accelerate: Annotated[dict[str, Any], Role.UNTRAINED] = Field(
        {}, description="Any other key of accelerate's file; it wins over the derived value."
    )

    @model_validator(mode="before")
    @classmethod
    def _yaml_no(cls, value: Any) -> Any:
        # `mixed_precision: no` is a boolean to YAML 1.1 readers.
        if isinstance(value, dict) and value.get("mixed_precision") is False:
            return {**value, "mixed_precision": "no"}
        return value

    @model_validator(mode="after")
    def _processes_of_all_machines(self) -> LaunchConfig:
        """Derive num_processes from processes_per_machine, or the other way round."""
        own, machines, count = self.processes_per_machine, self.machines, self.num_processes
        if own is not None and "num_processes" not in self.model_fields_set:
            count = machines * own
        if count != machines * (count // machines if own is None else own):
            of_each = "" if own is None else f" and processes_per_machine {own}"
            raise ValueError(
                f"num_processes {count} with machines {machines}{of_each}: the processes of all "
                f"machines are machines x processes_per_machine; remove num_processes, or give "
                "a multiple of machines"
            )
        # The section is frozen for its readers.
        self.__dict__.update(num_processes=count, processes_per_machine=count // machines)
        return self

    @model_validator(mode="after")
    def _mode_with_its_backend(self) -> LaunchConfig:
        if self.dynamo_mode != "default" and self.dynamo_backend != "inductor":
            raise ValueError(
                f"dynamo_mode {self.dynamo_mode} and dynamo_backend {self.dynamo_backend}: only "
                "inductor has modes"
            )
        return self

    @model_validator(mode="after")
    def _fp16_with_its_precision(self) -> LaunchConfig:
        if self.fp16.model_fields_set and self.mixed_precision != "fp16":
            raise ValueError(
                f"fp16 ({', '.join(sorted(self.fp16.model_fields_set))}) and mixed_precision "
                f"{self.mixed_precision}: only fp16 scales its losses"
            )
        return self

    @model_validator(mode="after")
    def _path_with_nvme(self) -> LaunchConfig:
        devices = [
            "nvme" if own is None and self.preset == "zero3_nvme" else own
            for own in (self.offload_optimizer, self.offload_param)
        ]
        if "nvme" in devices and self.offload_path is None:
            raise ValueError(
                f"preset {self.preset} with offload_optimizer {devices[0]} and offload_param "
                f"{devices[1]} needs offload_path, a folder on a fast disk"
            )
        if self.offload_path is not None and "nvme" not in devices and self.preset != "auto":
            raise ValueError(
                f"offload_path {self.offload_path!r}, but preset {self.preset} offloads nothing to "
                "a disk: remove it, or choose zero3_nvme"
            )
        return self

    @model_validator(mode="after")
    def _memory_with_auto(self) -> LaunchConfig:
        given = ("offload_optimizer", "offload_param", "bf16_optimizer_states")
        own = [key for key in given if getattr(self, key)]
        if own and self.preset == "auto":
            raise ValueError(
                f"{own[0]} {getattr(self, own[0])}, but preset auto decides what is offloaded: "
                "remove it, or choose a preset"
            )
        memory = [k for k in ("device_memory", "host_memory") if getattr(self, k) is not None]
        if memory and self.preset != "auto":
            raise ValueError(
                f"{memory[0]} {getattr(self, memory[0])}, but only preset auto plans by it: remove "
                "it, or choose auto; `zerotrain plan` shows the plan of any preset"
            )
        return self
