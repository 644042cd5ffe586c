"""Tables of the pages on families, exporting, optimizers and importing, from what they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zerotrain.config.adapters import ATTENTION, is_target
from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.config.optimizers import TABLE, Optimizer, continues, is_plain_adam
from zerotrain.export.formats import FORMATS
from zerotrain.importers.keys import DIFFSYNTH, DIFFUSERS, KOHYA_DATASET, SIMPLETUNER, TRAINER
from zerotrain.launch.keys import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_LAUNCHER_FLAGS,
    LAUNCH_FLAGS,
    TORCHRUN_FLAGS,
    Key,
)
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.model import trained_model
from zerotrain.launch.planner.storage import parameters_of
from zerotrain.models.families import load_family

TRAITS = {
    "noise_schedule": "prediction_type, rescale_betas_zero_snr, evaluate.scheduler",
    "prompt": "cache.max_sequence_length",
    "chunks": "train.long_captions: chunk",
    "pixels": "vae: identity",
    "conditioning": "data.conditioning_images, data.conditioning_columns",
    "token_routing": "train.tread_config",
}
"""Keys of a family's own that are no objective's."""


TRAINED = {True: "LoRA", False: "whole model", None: "either"}
MODELS = {"image": "images: ", "text": "text: ", None: ""}
IMPORTED: dict[str, tuple[str, Mapping[str, Key]]] = {
    "accelerate's YAML": ("Key", ACCELERATE),
    "DeepSpeed's JSON": ("Key", DEEPSPEED),
    "Flags of `accelerate launch`": ("Flag in addition to the YAML's keys", LAUNCH_FLAGS),
    "Flags of `torchrun`": ("Flag", TORCHRUN_FLAGS),
    "Flags of `deepspeed`": ("Flag", DEEPSPEED_LAUNCHER_FLAGS),
    "DiffSynth-Studio's flags": ("Flag", DIFFSYNTH),
    "Flags of diffusers' example scripts": ("Flag", DIFFUSERS),
    "HF Trainer's and openMind's flags": ("Flag", TRAINER),
    "SimpleTuner's config.json": ("Key", SIMPLETUNER),
    "kohya's dataset configuration": ("Key", KOHYA_DATASET),
}


def replace_generated(page: str, name: str, text: str) -> str:
    """Replace what stands between the comments that mark a generated part of a page."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return before + begin + text + end + rest.partition(end)[2]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    first, *others = (f"| {' | '.join(row)} |\n" for row in (head, *rows))
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


def families_table() -> str:
    """Return the table of families, from themselves and their small models."""
    head = ("family", "trained", "other parts", "own keys", "LoRA by default", "nano, micro")
    return table(head, map(_family, FAMILIES))


def _family(name: str) -> tuple[str, ...]:
    family, kind = load_family(name), FAMILIES[name]
    model = trained_model(find_architecture(name, "nano"))
    layers = [parameter.rpartition(".")[0] for parameter in model.shapes]
    targets = [end for end in ATTENTION if any(is_target(layer, [end]) for layer in layers)]
    trained = family.spec.classes[family.trained_part]
    optional = {*family.spec.optional_parts, *family.spec.extra_parts}
    others = [
        f"`{part}`: {class_name}" + (" (optional)" if part in optional else "")
        for part, class_name in {**family.spec.classes, **family.spec.extra_parts}.items()
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


def formats_table() -> str:
    """Return the table of export formats."""
    return table(
        ("`--to`", "of", "what is written", "who opens it"),
        (
            (f"`{name}`", MODELS[form.modality] + TRAINED[form.adapter], form.files, form.opens)
            for name, form in FORMATS.items()
        ),
    )


def optimizers_tables() -> str:
    """Return the tables of optimizers: those that work, their arguments, those that do not."""
    works = [optimizer for optimizer in TABLE if not optimizer.refused]
    tables = (
        table(
            ("`optimizer`", "what it is", "packages", "engines, stages", "optimizer offload",
             "slots", "a switch keeps"),
            map(_optimizer, works),
        ),
        table(
            ("`optimizer`", "`optimizer_args` with their defaults", "default weight decay"),
            map(_arguments, works),
        ),
        table(
            ("refused", "packages", "why", "nearest that works"),
            (
                (o.title, o.packages or "torch", f"{o.about}: {o.refused}", f"`{o.instead}`")
                for o in TABLE if o.refused
            ),
        ),
    )  # fmt: skip
    return "\n".join(tables)


def _optimizer(optimizer: Optimizer) -> tuple[str, ...]:
    slots = [f"`{slot}`" for slot in optimizer.slots]
    slots += [f"`{s}` (with `{a}`)" for s, a in optimizer.optional_slots.items()]
    where = "torch alone" if optimizer.whole else "torch, ZeRO 1, 2, 3"
    offload = "none" if optimizer.whole else "cpu"
    if is_plain_adam(optimizer.name, {}):
        offload = "cpu, nvme (without `optimizer_args`)"
    keeps = "all"
    if optimizer.scalars:
        keeps += f", with {', '.join(f'`{scalar}`' for scalar in optimizer.scalars)}"
    if others := [
        f"`{o.name}`" for o in TABLE if o is not optimizer and continues(o.name, optimizer.name)
    ]:
        keeps += f"; from and to {', '.join(others)}, too"
    return (
        f"`{optimizer.name}`",
        optimizer.about,
        optimizer.packages or "torch",
        where,
        offload,
        ", ".join(slots) or "none",
        keeps,
    )


def _arguments(optimizer: Optimizer) -> tuple[str, ...]:
    given = [f"`{key}: {_yaml(value)}`" for key, value in optimizer.arguments.items()]
    decay = "has none" if optimizer.weight_decay is None else f"{optimizer.weight_decay:g}"
    return f"`{optimizer.name}`", ", ".join(given), decay


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}"


def importing_tables() -> str:
    """Return the tables of other programs' keys, a section each."""
    tables = [
        f"### {title}\n\n" + table((first, "What becomes of it", ""), rows)
        for title, (first, keys) in IMPORTED.items()
        if (rows := [_key_row(key) for key in keys.values() if key.type != "section"])
    ]
    return "\n" + "\n".join(tables) + "\n"


def _key_row(key: Key) -> tuple[str, str, str]:
    reason = key.reason
    if key.fate == "mapped":
        became = "honoured by " + ", ".join(f"`{ours}`" for ours in key.ours.split(", "))
    elif key.fate == "passed_through":
        became, reason = f"honoured by `{key.ours}`", "as it is"
    elif key.fate == "ignored_no_effect":
        became = "no-op"
    else:
        became = "left out" if key.fate == "dropped" else key.fate
        if key.default is not None:
            became += f", unless `{_default(key.default)}`"
    return f"`{key.name}`", became, reason


def _default(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
