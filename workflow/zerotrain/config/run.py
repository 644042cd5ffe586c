"""A run's whole configuration, and what its sections must agree on."""

from __future__ import annotations

from pydantic import model_validator

from zerotrain.config.data import BucketConfig, DataConfig
from zerotrain.config.families import FAMILIES
from zerotrain.config.models import EvaluateConfig, Phase, RunSections
from zerotrain.config.section import Role, keys_with
from zerotrain.config.validation import ValidationConfig

FOLDERS = ("base", "imported", "report", "benchmarks", "logs")
"""Folders of a run next to those of its phases."""
OF_MODALITY: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {
        "cache": ("dtype", "batch_size", "shards"),
        "evaluate": (
            *("images_per_prompt", "num_inference_steps", "guidance_scale"),
            *("conditioning_images", "sizes"),
        ),
    },
    "text": {"evaluate": ("split", "max_samples", "max_new_tokens")},
}
"""Keys of sections that both have, which mean something to one of them."""
OF_SCHEME = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
"""Keys that one weighting_scheme reads."""
OF_HUBER = ("huber_c", "huber_schedule")
"""Keys that the loss types huber and smooth_l1 read."""
OF_GRIDS = (
    "prompts", "images_per_prompt", "num_inference_steps", "guidance_scale", "scheduler", "decode",
    "conditioning_images",
)  # fmt: skip
"""Keys of `validation` that images alone have."""
FROM_BASE = "which launch.zero3_init has not read yet"
NOTHING_TO_LEARN = (
    "rescale_betas_zero_snr leaves noise alone at the last timestep, from which a model that "
    "predicts epsilon learns nothing; set prediction_type: v_prediction, or remove it"
)


class RunConfig(RunSections):
    """A run: data, a base model, and the phases that train it."""

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        check_agreement(self)
        return self


def check_agreement(config: RunSections) -> None:
    """Check that the parts of a configuration do not contradict each other.

    Raises:
        ValueError: naming the keys, their values and what to do; a line for each problem.
    """
    problems = []
    for check in (
        *(_check_names, _check_family, _check_meanings, _check_data, _check_adapter),
        *(_check_average, _check_validation, _check_prompt_images, _check_saves),
    ):
        try:
            check(config)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def _check_names(config: RunSections) -> None:
    names = [phase.name for phase in config.phases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"phases: the name {name!r} stands twice; names are folders")
        if name in FOLDERS:
            raise ValueError(f"phases: {name!r} is a folder of the run; choose another name")
    if config.run == "data":
        raise ValueError("run: 'data' is the folder of the datasets; choose another name")


def _check_family(config: RunSections) -> None:
    family = config.family
    kind = FAMILIES[family]
    if not kind.noise_schedule and (config.prediction_type or config.rescale_betas_zero_snr):
        raise ValueError(
            f"prediction_type and rescale_betas_zero_snr are {_with('noise_schedule')}'s; the "
            f"family {family} has no such choice"
        )
    if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
        raise ValueError(NOTHING_TO_LEARN)
    if not kind.noise_schedule and config.evaluate.scheduler != "default":
        raise ValueError(
            f"evaluate.scheduler: {config.evaluate.scheduler} is a sampler of "
            f"{_with('noise_schedule')}; the family {family} has its base's alone (default)"
        )
    if config.vae and config.is_text:
        raise ValueError(f"vae: the family {family} has no images")
    if config.vae and config.is_preset and not kind.pixels:
        raise ValueError(
            f"vae: identity with base: {config.base} is for {_with('pixels')}; the {config.base} "
            f"model of {family} takes the latents of its autoencoder"
        )
    if config.cache.max_sequence_length and not kind.prompt:
        raise ValueError(
            f"cache.max_sequence_length is a key of {_with('prompt')}; the family {family} "
            "has no such choice"
        )
    if config.data.is_conditioned and not kind.conditioning:
        raise ValueError(
            f"data.conditioning_images and conditioning_columns are for {_with('conditioning')}; "
            f"the family {family} has no input for conditioning images"
        )
    for phase in config.phases:
        phase.train.check_keys_of_family(family)


def _check_meanings(config: RunSections) -> None:
    """Check that the user gave no key that nothing reads."""
    own = FAMILIES[config.family].modality
    for modality, sections in OF_MODALITY.items():
        for section, keys in sections.items():
            given = getattr(config, section).model_fields_set & {*keys}
            if modality != own and given:
                kinds = {"image": "images", "text": "text"}
                raise ValueError(
                    f"{section}.{min(given)} means something to {kinds[modality]} alone; remove "
                    f"it: the family {config.family} is one of {kinds[own]}"
                )
    default = FAMILIES[config.family].weighting_scheme
    for key, scheme in OF_SCHEME.items():
        # A default may stand, as one of a moving average.
        usual = type(config.train).model_fields[key].default
        phases = [p.train for p in config.phases if getattr(p.train, key) != usual]
        if phases and scheme not in {train.weighting_scheme or default for train in phases}:
            raise ValueError(
                f"{key} is read by weighting_scheme: {scheme} alone, and no phase has that; "
                "remove it, or set that"
            )
    trains = [phase.train for phase in config.phases]
    for key in OF_HUBER if {train.loss_type for train in trains} <= {"l2", "l1"} else ():
        # A default may stand, as in _check_average.
        if any(getattr(train, key) != type(train).model_fields[key].default for train in trains):
            raise ValueError(
                f"{key} is read by loss_type: huber and smooth_l1 alone, and no phase has them; "
                "remove it, or set one of them"
            )


def _check_data(config: RunSections) -> None:
    if config.is_text != config.data.is_text:
        given, wanted = (
            "text" if is_text else "images" for is_text in (config.data.is_text, config.is_text)
        )
        raise ValueError(
            f"data.source {config.data.source} gives {given}, and the family {config.family} "
            f"trains on {wanted}"
        )
    if config.is_text and config.evaluate.judge != "none":
        raise ValueError("evaluate.judge judges images; remove it")
    if config.evaluate.judge != "none" and not config.data.holdout:
        raise ValueError("evaluate.judge needs held-out images: set data.holdout, say 0.5")
    if config.evaluate.sizes and config.data.is_conditioned:
        raise ValueError(
            "evaluate.sizes: with conditioning images all sampled images are squares; remove it"
        )
    if len({phase.train.packing for phase in config.phases}) > 1:
        raise ValueError("packing is the same in all phases: they share a cache")
    if len({phase.train.long_captions for phase in config.phases}) > 1:
        raise ValueError("long_captions is the same in all phases: they share a cache")
    for phase in config.phases:
        _check_resolutions(config.data, phase)
        _check_buckets(config.data.aspect_buckets, phase)


def _check_resolutions(data: DataConfig, phase: Phase) -> None:
    most = phase.train.resolution
    for part in data.parts:
        side, key = data.resolutions.get(part.name or "", most), "data"
        if part is not data:
            key = f"data.sources.{part.name}"
        if side > most:
            raise ValueError(
                f"{key}.resolution: {side} is more than the resolution of phase {phase.name}, "
                f"{most}, which is that of the largest images; lower one or raise the other"
            )
        if part.max_pixels and side * side > part.max_pixels:
            raise ValueError(
                f"phase {phase.name}: resolution {side} needs {side * side} pixels, "
                f"{key}.max_pixels is {part.max_pixels}; lower one or raise the other"
            )


def _check_buckets(buckets: BucketConfig | None, phase: Phase) -> None:
    side = phase.train.resolution
    if buckets is None:
        return
    if buckets.sizes is None and buckets.alignment > side:
        raise ValueError(
            f"data.aspect_buckets.alignment: {buckets.alignment} is more than the resolution of "
            f"phase {phase.name}, {side}; lower it, to 16 for one"
        )
    if buckets.sizes is not None and all(w * h > side * side for w, h in buckets.sizes):
        width, height = min(buckets.sizes, key=lambda size: size[0] * size[1])
        raise ValueError(
            f"data.aspect_buckets.sizes: the smallest, {width}x{height}, has more pixels than "
            f"{side}x{side}, the resolution of phase {phase.name}; raise that, or add a size"
        )


def _check_adapter(config: RunSections) -> None:
    _check_base_precision(config)
    if config.lora is not None and config.peft is not None:
        raise ValueError("give lora or peft, not both: a run trains one adapter")
    if config.trainable_parameters and (config.lora is not None or config.peft is not None):
        raise ValueError(
            "trainable_parameters chooses among the model's own, and an adapter leaves them all "
            "as they are; remove it, or narrow the adapter's target_modules"
        )
    if config.lora and config.lora.fused_layers and not FAMILIES[config.family].fused_layers:
        raise ValueError(
            f"lora.fused_layers is for {_with('fused_layers')}: the layers of {config.family} "
            "are trained one by one; remove it"
        )
    for phase in config.phases:
        if phase.launch.zero3_init and config.lora is not None and config.lora.use_dora:
            raise ValueError(
                f"phase {phase.name}: lora.use_dora begins with the lengths of the base's weights, "
                f"{FROM_BASE}; set one of them to false"
            )


def _check_base_precision(config: RunSections) -> None:
    if config.base_model_precision == "no_change":
        if config.base_model_exclude_modules:
            raise ValueError(
                "base_model_exclude_modules names layers that base_model_precision leaves as they "
                "are, and it quantizes none; set base_model_precision: nf4, or remove it"
            )
    elif config.lora is None:
        raise ValueError(
            f"base_model_precision: {config.base_model_precision} keeps frozen weights in few bits "
            "while a LoRA trains next to them, and the section lora is missing; add it, or remove "
            "base_model_precision"
        )


def _check_average(config: RunSections) -> None:
    if any(phase.train.use_ema for phase in config.phases):
        return
    # A default may stand: `zerotrain new` writes it as a comment that may be taken away.
    own = type(config.train).model_fields
    for key in keys_with(type(config.train), Role.OF_EMA):
        if any(getattr(phase.train, key) != own[key].default for phase in config.phases):
            raise ValueError(
                f"{key} says how a moving average is kept, and none is: set train.use_ema: true, "
                f"or remove {key}"
            )


def _check_validation(config: RunSections) -> None:
    for phase in config.phases:
        if (section := phase.validation) is None:
            continue
        chooses = section.load_best_model_at_end or section.early_stopping_patience is not None
        if not config.data.holdout and (chooses or not section.prompts):
            raise ValueError(
                f"phase {phase.name}: validation measures held-out samples, and data.holdout: 0 "
                "keeps none; set data.holdout, say 0.1"
            )
        if section.metric_for_best_model == "val_loss_ema" and not phase.train.use_ema:
            raise ValueError(
                f"phase {phase.name}: metric_for_best_model: val_loss_ema is that of averaged "
                "weights, and none are kept: set train.use_ema: true, or remove it"
            )
        given = section.model_fields_set & {*OF_GRIDS}
        if given and config.is_text:
            raise ValueError(
                f"validation.{min(given)} means something to images alone; remove it: the family "
                f"{config.family} is one of text"
            )
        kind = FAMILIES[config.family]
        if not kind.noise_schedule and section.scheduler != "default":
            raise ValueError(
                f"validation.scheduler: {section.scheduler} is a sampler of "
                f"{_with('noise_schedule')}; the family {config.family} has its base's alone"
            )


def _check_prompt_images(config: RunSections) -> None:
    """Check that the user's prompts have conditioning images exactly if samples have some."""
    sections: dict[str, EvaluateConfig | ValidationConfig] = {"evaluate": config.evaluate}
    for phase in config.phases:
        if phase.validation is not None:
            sections[f"phase {phase.name}: validation"] = phase.validation
    for name, section in sections.items():
        given, prompts = section.conditioning_images, section.prompts
        if given is None and prompts and config.data.is_conditioned:
            raise ValueError(
                f"{name}.prompts: samples have conditioning images, and these prompts have none; "
                "set conditioning_images in the same section: a list of files for each prompt"
            )
        if given is not None and not config.data.is_conditioned:
            raise ValueError(
                f"{name}.conditioning_images: samples have no conditioning images; remove it, or "
                "set data.conditioning_images or data.conditioning_columns"
            )
        if given is not None and len(given) != len(prompts):
            raise ValueError(
                f"{name}.conditioning_images: needs a list of files for each prompt; it has "
                f"{len(given)}, and `prompts` has {len(prompts)}"
            )


def _check_saves(config: RunSections) -> None:
    """Check save_every against the end; render_launch checks an end in epochs or samples."""
    end, _, unit = config.phases[-1].until.partition(" ")
    for phase in config.phases:
        each = phase.train.save_every
        given = "save_every" in phase.train.model_fields_set and isinstance(each, int)
        if given and unit == "steps" and int(each) > int(end):
            raise ValueError(
                f"phase {phase.name}: save_every {each}, but the run ends at step {end}: nothing "
                f'would be saved before the end; give at most {end}, or a time such as "30 min"'
            )


def _with(trait: str) -> str:
    """Return the families whose kind has a trait."""
    return ", ".join(name for name, kind in FAMILIES.items() if getattr(kind, trait))
