"""The table of docs/families.md, from the families themselves and their small models."""

from __future__ import annotations

from zerotrain.families import FAMILIES, PRESETS, load_family
from zerotrain.lora_targets import ATTENTION, is_target
from zerotrain.plan.architecture import find_architecture
from zerotrain.plan.model import parameters_of, trained_model

HEAD = ("family", "trained", "beside it", "keys of its own", "LoRA by default", "nano, micro")
TRAITS = {
    "noise_schedule": "prediction_type, rescale_betas_zero_snr, evaluate.scheduler",
    "text_length": "cache.max_sequence_length",
    "pixels": "vae: identity",
}
"""Keys of a family's own that are no objective's."""


def table() -> str:
    """The table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *(_row(name) for name in FAMILIES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    family, kind = load_family(name), FAMILIES[name]
    model = trained_model(find_architecture(name, "nano"))
    layers = [parameter.rpartition(".")[0] for parameter in model.shapes]
    targets = [end for end in ATTENTION if any(is_target(layer, [end]) for layer in layers)]
    trained = family.classes[family.trained_part]
    others = [
        f"`{part}`: {class_name}" + (" (optional)" if part in family.optional_parts else "")
        for part, class_name in family.classes.items()
        if part != family.trained_part
    ]
    sizes = [
        parameters_of(find_architecture(name, preset).trained, preset) / 1e6 for preset in PRESETS
    ]
    keys = [*kind.objective, *(keys for trait, keys in TRAITS.items() if getattr(kind, trait))]
    return (
        f"`{name}`",
        f"`{kind.trained_part}`: {trained}" if kind.modality == "image" else trained,
        ", ".join(others) or "the tokenizer",
        ", ".join(keys) or "none",
        ", ".join(targets),
        ", ".join(f"{size:.1f} M" for size in sizes),
    )
