"""The sections that say what is trained, how a step is made and how a phase is launched."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zerotrain import optimizers
from zerotrain.config.section import Section, Whole
from zerotrain.optimizer_arguments import read_arguments


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return value


def _optimizer(value: str) -> str:
    found, _ = optimizers.find(value)
    if found.refused:
        raise ValueError(f"{found.title}: {found.refused}; the nearest that works: {found.instead}")
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression that is searched for in parameter names."""


class ParamGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    parameters: list[Pattern] = Field(
        min_length=1,
        description="Regular expressions; a parameter whose name contains one belongs here.",
    )
    learning_rate: float | None = Field(
        None, ge=0, description="Peak of the schedule for these; default: the phase's."
    )
    adam_weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of these; default: the phase's."
    )


class LoraConfig(Section):
    """Train a low-rank adapter and leave the model as it is. Without this section all is trained.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021),
    https://arxiv.org/abs/2106.09685.
    """

    rank: Whole = Field(16, ge=1, description="Rank of the two factors.")
    alpha: float | None = Field(
        None, gt=0, description="The adapter's effect is scaled by alpha / rank; default: rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the first factor.")
    target_modules: list[str] = Field(
        ["to_q", "to_k", "to_v", "to_out.0"],
        min_length=1,
        description="Ends of the names of the linear layers that get an adapter.",
    )


class TrainConfig(Section):
    """What a training step is. A phase may change any of these from its first step on."""

    resolution: Whole = Field(
        1024, ge=8, multiple_of=8, description="Side of the square that images are cut to."
    )
    global_batch_size: Whole = Field(
        1, ge=1, description="Samples per optimizer step over all processes and accumulations."
    )
    gradient_accumulation_steps: Whole = Field(
        1, ge=1, description="Forward passes per optimizer step."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations to save memory.")
    optimizer: Annotated[str, AfterValidator(_optimizer)] = Field(
        "adamw",
        description="A class of torch.optim or a name of DeepSpeed's, in any case: "
        "`docs/optimizers.md` lists them.",
    )
    optimizer_args: dict[str, Any] = Field(
        {}, description="What the optimizer takes beyond the keys here: `momentum`, `betas`, ..."
    )
    param_groups: list[ParamGroup] = Field(
        [],
        description="Parameters with values of their own: a list of `parameters` (regular "
        "expressions), `learning_rate`, `adam_weight_decay`. The first that fits counts.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak of the schedule.")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape after warm-up; a function of the global step alone."
    )
    lr_warmup_steps: Whole = Field(0, ge=0, description="Steps of linear warm-up.")
    lr_warmup_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Warm-up as a share of the schedule; not with lr_warmup_steps.",
    )
    lr_scheduler_steps: Whole | None = Field(
        None,
        ge=1,
        description="Horizon of the schedule in steps; default: the last `until` when training "
        "starts, kept when `until` is raised later.",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Keeps Adam's divisor from zero.")
    adam_weight_decay: float = Field(
        1e-2,
        ge=0,
        description="Weight decay of any optimizer; the default is AdamW's, others have their own.",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient clipping by norm; 0 is none.")
    snr_gamma: float | None = Field(
        None, gt=0, description="Min-SNR loss weighting (5.0 is usual)."
    )
    caption_dropout_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of samples trained with the empty caption (for guidance).",
    )
    save_every: Whole = Field(500, ge=1, description="Steps between rolling checkpoints.")
    keep: Whole = Field(2, ge=1, description="Rolling checkpoints kept.")
    log_every: Whole = Field(10, ge=1, description="Steps between lines of the log.")

    @model_validator(mode="after")
    def _one_warmup(self) -> TrainConfig:
        if self.lr_warmup_ratio is not None and self.lr_warmup_steps:
            raise ValueError("give lr_warmup_steps or lr_warmup_ratio, not both")
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is no multiple of "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}"
            )
        return self

    @model_validator(mode="after")
    def _arguments_of_the_optimizer(self) -> TrainConfig:
        found, _ = optimizers.find(self.optimizer)
        read_arguments(found, self.optimizer_args, self.optimizer_keys_given())
        groups = [group.adam_weight_decay for group in self.param_groups]
        if found.weight_decay is None and any(groups):
            raise ValueError(f"param_groups: {found.title} has no weight decay")
        return self

    def optimizer_keys_given(self) -> dict[str, float]:
        """The adam_ keys that the user gave."""
        keys = ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay")
        return {key: getattr(self, key) for key in keys if key in self.model_fields_set}


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

    preset: Literal[
        "torch", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"
    ] = Field(
        "torch", description="A file of config/launch: plain PyTorch, or a ZeRO stage with offload."
    )
    num_processes: Whole = Field(
        1, ge=1, description="Processes, one a GPU; the global batch is shared among them."
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="Type of forward and backward passes; `no` is fp32."
    )
    num_cpu_threads_per_process: Whole | None = Field(
        None,
        ge=1,
        description="Part of the numbers: other counts give other bits. Default: the cores, shared "
        "among the processes.",
    )
    offload_path: str | None = Field(
        None, description="Folder on a fast disk for presets that offload to NVMe."
    )
    fp16: Fp16Config = Field(Fp16Config(), description="Loss scaling of mixed_precision fp16.")

    @model_validator(mode="before")
    @classmethod
    def _yaml_no(cls, value: Any) -> Any:
        # `mixed_precision: no` is a boolean to YAML 1.1 readers.
        if isinstance(value, dict) and value.get("mixed_precision") is False:
            return {**value, "mixed_precision": "no"}
        return value

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
        if (self.preset == "zero3_nvme") != (self.offload_path is not None):
            raise ValueError(
                f"preset {self.preset} and offload_path {self.offload_path!r}: zero3_nvme needs a "
                "folder on a fast disk, and no other preset uses one"
            )
        return self
