"""The section `train`: how a step is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from zerotrain.config import optimizers
from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS, LOSS
from zerotrain.config.lr_scheduler import SchedulerName, check_contradictions, read_arguments
from zerotrain.config.optimizer_arguments import read_optimizer_args
from zerotrain.config.save_interval import read_interval
from zerotrain.config.section import Memory, Role, Section, Whole, keys_with
from zerotrain.config.token_routes import TreadConfig
from zerotrain.config.trackers import read_names
from zerotrain.config.trained_part import ParamGroup


class ObjectiveConfig(Section):
    """What the loss is. A family has some of these keys, and refuses the others."""

    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = Field(
        "l2",
        description="Cost of an error: its square, its absolute value, or `huber` and `smooth_l1`, "
        "which are squares below a threshold and lines above. Validation measures l2.",
    )
    huber_c: float = Field(0.1, gt=0, description="Threshold of huber and smooth_l1.")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "snr",
        description="How that threshold falls from 1 for clean latents to huber_c for noise; "
        "`constant`: it is huber_c.",
    )
    snr_gamma: float | None = Field(
        None, gt=0, description="sdxl: Min-SNR loss weighting (5.0 is usual)."
    )
    noise_offset: float = Field(
        0.0, ge=0, description="sdxl: noise of a whole channel is added at this scale (0.05)."
    )
    weighting_scheme: (
        Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap", "gaussian"] | None
    ) = Field(
        None,
        description="Flow matching: which timesteps are drawn (logit_normal, mode) or how they are "
        "weighed (sigma_sqrt, cosmap; gaussian is DiffSynth-Studio's). Default: logit_normal for "
        "sd3, none for the others.",
    )
    logit_mean: float = Field(0.0, description="Mean of logit_normal.")
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of logit_normal.")
    mode_scale: float = Field(1.29, description="Scale of mode.")
    flow_shift: float | None = Field(
        None,
        gt=0,
        description="Flow matching: moves timesteps towards noise; default: what the base model's "
        "scheduler says.",
    )
    precondition_outputs: bool = Field(
        False,
        description="sd3: the error is that of the image instead of the velocity, as diffusers' "
        "scripts have it: the loss times the square of the noise's share.",
    )
    flux_guidance_value: float = Field(
        1.0, ge=0, description="flux: guidance embedding passed to guidance-distilled models (dev)."
    )

    def objective(self, family: str) -> dict[str, Any]:
        """Return the values that mean something to a family.

        Those of l2 and of the velocity, which are older than the other choices, are left out.
        """
        keys = [
            key
            for key in FAMILIES[family].objective
            if (self.loss_type != "l2" or key not in LOSS)
            and (self.precondition_outputs or key != "precondition_outputs")
        ]
        return {key: getattr(self, key) for key in keys}

    def check_keys_of_family(self, family: str) -> None:
        """Check that the family has every key that the user gave.

        Raises:
            ValueError: naming the key, and those that the family has.
        """
        given = self.model_fields_set & ObjectiveConfig.model_fields.keys()
        for key in sorted(given - {*FAMILIES[family].objective}):
            others = ", ".join(name for name, kind in FAMILIES.items() if key in kind.objective)
            own = ", ".join(FAMILIES[family].objective) or "none"
            raise ValueError(
                f"{key} is a key of {others}; the family {family} has of its kind: {own}"
            )


def _optimizer(value: str) -> str:
    found, _ = optimizers.find(value)
    if found.refused:
        raise ValueError(
            f"optimizer {found.title}: {found.refused}; the nearest that works: {found.instead}"
        )
    return value


SaveInterval = Annotated[
    int | str,
    BeforeValidator(read_interval),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.e+]+\s*[A-Za-z]*\.?\s*$"},
            ]
        }
    ),
]
"""A number of steps, or a time as zerotrain.config.save_interval keeps it."""


class TrainConfig(ObjectiveConfig):
    """What a training step is. A phase may change any of these from its first step on."""

    resolution: Annotated[Whole, Role.IMAGES] = Field(
        1024,
        ge=8,
        multiple_of=8,
        description="Side of the square that images are cut to; with data.aspect_buckets that of "
        "the largest square.",
    )
    long_captions: Annotated[Literal["truncate", "chunk"], Role.IMAGES] = Field(
        "truncate",
        description="Images: how captions longer than the text encoders take are read, in "
        "sampling too: cut, or of sdxl whole, in chunks of 75 tokens.",
    )
    max_length: Annotated[Whole, Role.TEXT] = Field(
        512, ge=2, description="Text: longest row, in tokens; what is longer is cut at its end."
    )
    packing: Annotated[bool, Role.TEXT] = Field(
        False,
        description="causal_lm: put several examples into a row of max_length; none sees another.",
    )
    global_batch_size: Whole = Field(
        1, ge=1, description="Samples per optimizer step over all processes and accumulations."
    )
    gradient_accumulation_steps: Annotated[Whole, Role.ROUNDING] = Field(
        1, ge=1, description="Forward passes per optimizer step."
    )
    gradient_checkpointing: Annotated[bool, Role.ROUNDING] = Field(
        False, description="Recompute activations to save memory."
    )
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
    lr_scheduler: SchedulerName = Field(
        "constant",
        description="Shape of the learning rate, a function of the global step alone; in any case. "
        "See [schedules.md](schedules.md).",
    )
    lr_scheduler_args: dict[str, Any] = Field(
        {}, description="The schedule's own arguments; see [schedules.md](schedules.md)."
    )
    lr_warmup_steps: Whole = Field(0, ge=0, description="Steps of warm-up.")
    lr_warmup_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Warm-up as a share of the schedule; not with lr_warmup_steps.",
    )
    lr_scheduler_steps: Annotated[Whole | None, Role.UNTRAINED] = Field(
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
    no_decay_norm_bias: bool = Field(
        False,
        description="No weight decay of biases and of the weights of normalisation layers: of all "
        "parameters with fewer than two dimensions. HF's Trainer has it so, diffusers' scripts "
        "do not. A group of param_groups keeps the decay that it names.",
    )
    max_grad_norm: float = Field(
        1.0,
        ge=0,
        description="Gradient clipping: the largest norm, or with `grad_clip_method: value` the "
        "largest value; 0 disables it.",
    )
    grad_clip_method: Literal["norm", "value"] = Field(
        "norm",
        description="`norm`: scale all gradients so that their norm is at most max_grad_norm; "
        "`value`: cut each value to at most that.",
    )
    nan_action: Annotated[Literal["stop", "skip"], Role.UNTRAINED] = Field(
        "stop",
        description="Where the loss or a gradient is not a finite number: `stop`, or `skip` that "
        "update. Either names the samples of the step.",
    )
    on_change: Annotated[Literal["restart", "continue", "stop"], Role.UNTRAINED] = Field(
        "restart",
        description="What follows an edit of a value that decides what is trained, in a phase that "
        "is trained in part: `restart` sets its checkpoints aside and trains from the start, "
        "`continue` resumes with the new value and records it, `stop` refuses. See "
        "[checkpoints.md](checkpoints.md).",
    )
    caption_dropout_probability: Annotated[float, Role.IMAGES] = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of samples trained with the empty caption (for guidance).",
    )
    tread_config: Annotated[TreadConfig | None, Role.ABSENT_IF_NONE] = Field(
        None,
        description="flux, sd3: TREAD, `routes` of `selection_ratio`, `start_layer_idx` and "
        "`end_layer_idx`: that share of the image's tokens, drawn at random, passes these layers "
        "by. Training alone; see [families.md](families.md#token-routing).",
    )
    use_ema: bool = Field(
        False,
        description="Keep a moving average of the weights (EMA), which is what is exported and "
        "measured; the training continues from the weights themselves.",
    )
    ema_decay: Annotated[float, Role.OF_EMA] = Field(
        0.9999,
        gt=0,
        lt=1,
        description="Share of the average that an update leaves; it rises to this as step / "
        "(9 + step).",
    )
    ema_update_interval: Annotated[Whole, Role.OF_EMA] = Field(
        1, ge=1, description="Steps between updates of the average."
    )
    ema_device: Annotated[Literal["accelerator", "cpu"], Role.OF_EMA, Role.UNTRAINED] = Field(
        "accelerator",
        description="Where the average is kept: 4 bytes a trained parameter, shared by the "
        "processes; `cpu` costs a copy of the weights at each update. Offloaded weights are "
        "averaged where they lie, those on a disk in host memory; each update reads those.",
    )
    save_every: Annotated[SaveInterval, Role.UNTRAINED] = Field(
        500, description='Steps between rolling checkpoints, or a time: "30 min", "2 h".'
    )
    keep: Annotated[Whole, Role.UNTRAINED] = Field(
        2, ge=1, description="Rolling checkpoints kept, besides the best one."
    )
    keep_every: Annotated[Whole | None, Role.UNTRAINED] = Field(
        None,
        ge=1,
        description="Every step that this divides is saved, too, and stays for good.",
    )
    disk_low_threshold: Annotated[Memory | None, Role.UNTRAINED] = Field(
        None,
        description='Stop with a checkpoint when the disk has less free, such as "10 GiB"; '
        "default: stop only when a checkpoint no longer fits.",
    )
    log_every: Annotated[Whole, Role.UNTRAINED] = Field(
        10, ge=1, description="Steps between lines of the log."
    )
    report_to: Annotated[list[str], Role.UNTRAINED] = Field(
        ["tensorboard"],
        description="Trackers in addition to metrics.jsonl: `tensorboard`, `wandb`, `mlflow`, "
        "`swanlab`, `comet_ml`, `aim`, `clearml`, `dvclive`, `trackio`, a list of them, `all` that "
        "are installed, or `none`. See [monitoring.md](monitoring.md).",
    )
    tracker_project_name: Annotated[str | None, Role.UNTRAINED] = Field(
        None, min_length=1, description="Project of the trackers; default: `zerotrain`."
    )
    tracker_run_name: Annotated[str | None, Role.UNTRAINED] = Field(
        None,
        min_length=1,
        description="Name of the phase's run in the trackers; default: RUN-PHASE.",
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: Any) -> Any:
        return read_names(value) if isinstance(value, str | list) else value

    @field_validator("lr_scheduler_args", mode="before")
    @classmethod
    def _of_the_schedule(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("lr_scheduler")
        return value if name is None else read_arguments(name, value)

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainConfig:
        # A schedule with an argument that must be given needs it without lr_scheduler_args, too.
        read_arguments(self.lr_scheduler, self.lr_scheduler_args)
        check_contradictions(self.lr_scheduler, dict(self), self.model_fields_set)
        return self

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
        read_optimizer_args(found, self.optimizer_args, self.optimizer_keys_given())
        groups = [group.adam_weight_decay for group in self.param_groups]
        if found.weight_decay is None and any(groups):
            raise ValueError(f"param_groups: {found.title} has no weight decay")
        return self

    def check_keys_of_family(self, family: str) -> None:
        """Check that the family has every key that the user gave.

        Raises:
            ValueError: naming the key.
        """
        super().check_keys_of_family(family)
        text = family in LANGUAGE_MODELS
        for key in keys_with(TrainConfig, Role.IMAGES if text else Role.TEXT):
            if key in self.model_fields_set:
                what = "images, and the family is of text" if text else "text families"
                raise ValueError(f"{key} is a key of {what}; remove it: {family} has no such thing")
        if self.long_captions == "chunk" and not FAMILIES[family].chunks:
            others = ", ".join(name for name, kind in FAMILIES.items() if kind.chunks)
            raise ValueError(
                f"long_captions: chunk is {others}'s; "
                f"{family} has a text encoder that reads more: set cache.max_sequence_length"
            )
        if self.tread_config and not FAMILIES[family].token_routing:
            others = ", ".join(name for name, kind in FAMILIES.items() if kind.token_routing)
            raise ValueError(
                f"tread_config is a key of {others}; remove it: in the blocks of {family} tokens "
                "cannot be routed"
            )
        if self.packing and family != "causal_lm":
            raise ValueError(f"packing is causal_lm's; {family} reads one example a row")

    def optimizer_keys_given(self) -> dict[str, float]:
        """Return the adam_ keys that the user gave."""
        keys = ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay")
        return {key: getattr(self, key) for key in keys if key in self.model_fields_set}
