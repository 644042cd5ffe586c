"""What a configuration's sections must agree on, each of them being right on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotrain.families import FAMILIES
from zerotrain.peft_methods import Method, method_of

if TYPE_CHECKING:
    from zerotrain.config.models import Phase, RunConfig

FOLDERS = ("base", "imported", "report", "benchmarks", "logs")
"""Folders of a run beside those of its phases."""
OF_MODALITY: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {
        "cache": ("dtype", "batch_size"),
        "evaluate": ("images_per_prompt", "num_inference_steps", "guidance_scale"),
    },
    "text": {"evaluate": ("max_samples", "max_new_tokens")},
}
"""Keys of sections that both have, which mean something to one of them."""
OF_SCHEME = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
"""Keys that one weighting_scheme reads."""
AVERAGE_KEYS = ("ema_decay", "ema_update_interval", "ema_device")
"""Keys of `train` that need its use_ema."""
OF_GRIDS = (
    "prompts", "images_per_prompt", "num_inference_steps", "guidance_scale", "scheduler", "decode",
)  # fmt: skip
"""Keys of `validation` that images alone have."""
FROM_BASE = "which launch.zero3_init has not read yet"
NOTHING_TO_LEARN = (
    "rescale_betas_zero_snr leaves noise alone at the last timestep, from which a model that "
    "predicts epsilon learns nothing; set prediction_type: v_prediction, or remove it"
)


def check_agreement(config: RunConfig) -> None:
    """Refuse a configuration whose parts contradict each other.

    Raises:
        ValueError: naming the keys, their values and what to do.
    """
    _check_names(config)
    _check_family(config)
    _check_meanings(config)
    _check_data(config)
    _check_adapter(config)
    _check_average(config)
    _check_validation(config)
    _check_saves(config)


def _check_names(config: RunConfig) -> None:
    names = [phase.name for phase in config.phases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"phases: the name {name!r} stands twice; names are folders")
        if name in FOLDERS:
            raise ValueError(f"phases: {name!r} is a folder of the run; choose another name")
    if config.run == "data":
        raise ValueError("run: 'data' is the folder of the datasets; choose another name")


def _check_family(config: RunConfig) -> None:
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
    if config.cache.max_sequence_length and not kind.text_length:
        raise ValueError(
            f"cache.max_sequence_length is a key of {_with('text_length')}; the family {family} "
            "has no such choice"
        )
    for phase in config.phases:
        phase.train.refuse_keys_of_others(family)


def _check_meanings(config: RunConfig) -> None:
    """Refuse keys that the user gave and nothing reads."""
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
        phases = [phase.train for phase in config.phases if key in phase.train.model_fields_set]
        if phases and scheme not in {train.weighting_scheme or default for train in phases}:
            raise ValueError(
                f"{key} is read by weighting_scheme: {scheme} alone, and no phase has that; "
                "remove it, or set that"
            )


def _check_data(config: RunConfig) -> None:
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
    if len({phase.train.packing for phase in config.phases}) > 1:
        raise ValueError("packing is the same in all phases: they share a cache")
    for phase in config.phases:
        pixels, most = phase.train.resolution**2, config.data.max_pixels
        if most and pixels > most:
            raise ValueError(
                f"phase {phase.name}: resolution {phase.train.resolution} needs {pixels} pixels, "
                f"data.max_pixels is {most}; lower one or raise the other"
            )


def _check_adapter(config: RunConfig) -> None:
    method = method_of(config.peft)
    if config.lora is not None and config.peft is not None:
        raise ValueError("give lora or peft, not both: a run trains one adapter")
    if config.trainable_parameters and (config.lora is not None or config.peft is not None):
        raise ValueError(
            "trainable_parameters chooses among the model's own, and an adapter leaves them all "
            "as they are; remove it, or narrow the adapter's target_modules"
        )
    if method is not None and method.changes == "prompt" and not config.is_text:
        raise ValueError(
            f"peft: {method.title} puts trained tokens before a text, and the family "
            f"{config.family} makes images"
        )
    for phase in config.phases:
        if phase.launch.zero3_init and config.lora is not None and config.lora.use_dora:
            raise ValueError(
                f"phase {phase.name}: lora.use_dora begins with the lengths of the base's weights, "
                f"{FROM_BASE}; set one of them to false"
            )
        if method is not None:
            _check_method(method, config.peft or {}, phase)


def _check_method(method: Method, settings: dict[str, object], phase: Phase) -> None:
    if method.reads_base and phase.launch.zero3_init:
        raise ValueError(
            f"phase {phase.name}: {method.title} begins with the base's weights, {FROM_BASE}; set "
            "zero3_init to false"
        )
    drawn = str(settings.get("prompt_tuning_init", "RANDOM")).startswith("RANDOM")
    if not drawn and phase.launch.zero3_init:
        raise ValueError(
            f"phase {phase.name}: prompt_tuning_init {settings['prompt_tuning_init']} begins with "
            f"the base's embeddings, {FROM_BASE}; set zero3_init to false"
        )
    if method.changes == "prompt" and phase.train.packing:
        raise ValueError(
            f"phase {phase.name}: packing has several examples in a row, and {method.title} puts "
            "its tokens before the first alone; set packing to false"
        )
    if method.title == "prefix tuning" and phase.train.gradient_checkpointing:
        raise ValueError(
            f"phase {phase.name}: prefix tuning keeps its prefix in the attention's cache, which "
            "gradient_checkpointing turns off; set it to false"
        )


def _check_average(config: RunConfig) -> None:
    if any(phase.train.use_ema for phase in config.phases):
        return
    # A default may stand: `zerotrain new` writes it as a comment that may be taken away.
    own = type(config.train).model_fields
    for key in AVERAGE_KEYS:
        if any(getattr(phase.train, key) != own[key].default for phase in config.phases):
            raise ValueError(
                f"{key} says how a moving average is kept, and none is: set train.use_ema: true, "
                f"or remove {key}"
            )


def _check_validation(config: RunConfig) -> None:
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


def _check_saves(config: RunConfig) -> None:
    """An end in epochs or samples is known to render_launch, which looks at it then."""
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
    """The families whose kind has a trait."""
    return ", ".join(name for name, kind in FAMILIES.items() if getattr(kind, trait))
