"""zerotrain publish: write a model card for exported weights, and upload both to the hub.

The card is a README.md with a head for the hub, https://huggingface.co/docs/hub/model-cards. All
its statements come from files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact, replacing, write_whole
from zerotrain.artifact.documents import read_text
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import (
    ANSWERS,
    LABELS,
    Answer,
    format_metric,
    read_answers,
    read_metrics,
)
from zerotrain.export.formats import OWN_FOLDER
from zerotrain.export.formats.loading_code import (
    METHOD,
    TRUNCATE,
    default_files,
    is_raw,
    loading_code,
)
from zerotrain.export.options import PublishOptions
from zerotrain.export.provenance import Origin, find_origin
from zerotrain.launch.files import launch_facts
from zerotrain.machine.disk_errors import check_no_file
from zerotrain.models.base import MODEL_INDEX, is_model_file
from zerotrain.models.hub import HUB_ID
from zerotrain.models.pretrained import read_config
from zerotrain.state.ran_on import RanOn, as_markdown

if TYPE_CHECKING:
    from zerotrain.evaluation.results import Answer
    from zerotrain.models.families import Family

CARD = "README.md"
KINDS = ("weights", "exported")
MOST_ANSWERS = 10
"""Maximum of a language model's answers on the card."""


def publish(options: PublishOptions) -> None:
    """Write the card, list the files to upload, and upload them in one commit.

    An existing card is used as it is: a user may have completed it.

    Raises:
        PipelineError: the folder is not whole, the repository's name is not valid, or the hub
            refuses the upload.
    """
    weights, repo_id = options.weights, options.repo_id
    if not HUB_ID.fullmatch(repo_id):
        raise PipelineError(
            f"{repo_id!r} names no repository of the hub", hint="write OWNER/NAME, as me/cats"
        )
    card = options.card or weights.parent / f"{weights.name}-card"
    check_no_file(card)
    weights_folder = _read(weights)
    written = _write_card(weights_folder, card, options)
    names = sorted(name for name in weights_folder.files if not name.startswith(RECORDS))
    files = {name: weights_folder.path(name) for name in names if is_model_file(name)}
    if others := [name for name in names if name not in files and name != CARD]:
        print(f"not uploaded, no file of a model: {join_first(others)}")
    files[CARD] = card / CARD
    # A grid that the card does not show may have been drawn with captions that are private.
    if (card / GRID).exists() and GRID in read_text(files[CARD]):
        files[GRID] = card / GRID
    width = max(len(name) for name in files)
    for name, path in files.items():
        print(f"{name:<{width}}  {path.stat().st_size:>14,} bytes")
    print(f"{'wrote' if written else 'kept'} {card / CARD}")
    if options.dry_run:
        print(f"nothing was uploaded; without --dry-run it goes to {repo_id}")
        return
    print(f"published {_upload(repo_id, files, options.private)}")


def _read(folder: Path) -> Artifact:
    artifact.check_published(folder, ours=(folder / MODEL_INDEX).is_file())
    kind = artifact.kind_of(folder)
    if kind not in KINDS:
        raise PipelineError(
            f"{folder}: is no folder that an export wrote",
            hint="name the weights of a phase, or what `zerotrain export` wrote",
        )
    return artifact.read(folder, kind)


def _write_card(weights: Artifact, folder: Path, options: PublishOptions) -> bool:
    """Write the card, and a grid of images, unless there is one; return whether it was written.

    Captions and questions of the dataset may be private: they are shown only by choice.
    """
    if (folder / CARD).exists():
        return False
    origin = find_origin(weights)
    prompts: list[str] = []
    answers: list[Answer] = []
    systems: list[str] = []
    if origin.phase is not None and artifact.is_published(origin.phase / "evaluation"):
        evaluation = artifact.read(origin.phase / "evaluation", "evaluation")
        asked = len(evaluation.content.get("evaluate", {}).get("prompts", ()))
        shown = None if options.show_captions else asked
        if ANSWERS in evaluation.files:
            answers = read_answers(evaluation.path(ANSWERS))[:shown][:MOST_ANSWERS]
            systems = evaluation.content.get("systems", [])[:shown]
        elif shown != 0:
            prompts = evaluation.content["prompts"]
            # A picture without a card may be the user's own.
            if not (folder / GRID).exists():
                with replacing(folder / GRID) as new:
                    artifact.copy_new(evaluation.path("grid.png"), new)
        if not options.show_captions and len(evaluation.content["prompts"]) > asked:
            print(
                "not on the card: samples of the dataset's own captions or questions; to show them "
                f"remove {folder / CARD} and add --show-captions"
            )
    text = model_card(weights, options.repo_id, origin, options.license, prompts, answers, systems)
    write_whole(folder / CARD, text)
    return True


def _upload(repo_id: str, files: dict[str, Path], private: bool) -> str:
    """Create the repository if it is missing, commit the files, and return the commit's URL."""
    from huggingface_hub import CommitOperationAdd, HfApi

    # HTTPError is the error of the HTTP client that huggingface_hub uses.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        commit = api.create_commit(
            repo_id, operations, commit_message="Weights and card, by zerotrain"
        )
    except (HTTPError, ConnectionError, TimeoutError, ValueError) as error:
        raise PipelineError(
            f"{repo_id}: the hub did not take it ({str(error).splitlines()[0]})",
            hint="check the network or HF_ENDPOINT, and log in with `hf auth login` by a token "
            "that may write",
        ) from error
    return str(commit.commit_url)


GRID = "samples.png"
TEMPLATE = Path(__file__).with_suffix(".md.j2")
TASKS = {"causal_lm": "text-generation", "seq2seq_lm": "text2text-generation"}
"""The hub's names of the tasks of language models."""


def model_card(
    weights: Artifact,
    repo_id: str,
    origin: Origin,
    license: str | None,
    prompts: Sequence[str] = (),
    answers: Sequence[Answer] = (),
    systems: Sequence[str] = (),
) -> str:
    """Return the card's text.

    Args:
        weights: The exported folder.
        repo_id: OWNER/NAME of the repository.
        origin: Its base model and the phase that trained it.
        license: The licence's id on the hub, if it is known.
        prompts: Prompts of the rows of the sample grid; none without a grid.
        answers: Answers of a language model in its evaluation.
        systems: The system's turn before each answer; none if no answer has one.
    """
    from huggingface_hub import ModelCardData

    from zerotrain.models.families import load_family

    family: Any = load_family(weights.content["family"])
    form = format_of(weights, family)
    adapter = form in ("adapter", "method", "diffusers_lora", "kohya", "peft")
    head = ModelCardData(
        base_model=origin.hub_id,
        base_model_relation=("adapter" if adapter else "finetune") if origin.hub_id else None,
        library_name="peft" if form == "peft" else OWN_FOLDER[family.modality],
        license=license,
        pipeline_tag=TASKS.get(family.name)
        or ("image-to-image" if default_files(weights.folder) else "text-to-image"),
        tags=[family.name, "zerotrain", *([_method(weights)] if adapter else [])],
    )
    code = None
    if form in ("adapter", "method", OWN_FOLDER[family.modality]):
        code = loading_code(
            weights.folder,
            family.name,
            prompts[0] if prompts else answers[0].prompt if answers else "a prompt",
            repo=repo_id,
            max_sequence_length=weights.content.get("max_sequence_length"),
            long_captions=weights.content.get("long_captions", TRUNCATE),
            raw=is_raw(weights.content),
            system=systems[0] if systems else None,
        )
    made, metrics, launch = weights.made_by, None, None
    facts = [
        ("family", family.name),
        ("base model", origin.hub_id or ""),
        ("format", weights.content.get("to", OWN_FOLDER[family.modality])),
        ("type", weights.content["dtype"]),
        ("weights", "averaged (EMA)" if weights.content.get("ema") else ""),
        ("run", "/".join(str(made[key]) for key in ("run", "phase") if made.get(key))),
        ("steps", str(weights.content["step"])),
        ("sha256 of the weights' manifest", weights.identity),
    ]
    if origin.phase is not None:
        metrics = _metrics({**read_metrics(origin.phase / "metrics.json")})
        launch = launch_facts(origin.phase / "launch" / "run.yaml")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["plain"] = _plain
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        head=head.to_yaml(),
        title=repo_id.split("/")[-1],
        facts=[(name, value) for name, value in facts if value],
        grid=GRID,
        prompts=prompts,
        answers=[(a.prompt, a.expected or "", a.generated) for a in answers],
        code=code,
        form=form,
        family=family.name,
        text=family.modality == "text",
        repo=repo_id,
        base=origin.hub_id or "BASE",
        pipeline=family.spec.pipeline,
        model=family.spec.classes[family.trained_part],
        part=family.trained_part,
        trained_on=as_markdown(RanOn.of_manifest(made, weights.content["step"])).rstrip("\n"),
        metrics=metrics,
        launch=[(name, value) for name, value, _ in launch or ()],
    )


def format_of(weights: Artifact, family: Family) -> str:
    """Return the format of a folder, for which the card shows code."""
    from zerotrain.models.families.lora import adapter_file

    if weights.kind == "weights":
        file, _ = adapter_file(family.trained_part)
        if METHOD in weights.files:
            return "method"
        return "adapter" if file in weights.files else OWN_FOLDER[family.modality]
    return str(weights.content["to"])


def _method(weights: Artifact) -> str:
    """Return the adapter's method from its configuration, in lower case: lora, loha."""
    from zerotrain.models.families.lora import PEFT_CONFIG

    for name in (METHOD, PEFT_CONFIG):
        if name in weights.files:
            return str(read_config(weights.path(name)).get("peft_type")).lower()
    return "lora"


def _metrics(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    names = [*(n for n in LABELS if n in metrics), *sorted(metrics.keys() - LABELS.keys())]
    return [(LABELS.get(name, name), format_metric(name, metrics[name])) for name in names]


_MARKUP = re.compile(
    r"[|`*\\~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])[(\[:]|(?<=[A-Za-z]):(?=//)|(?i:(?<=www))\."
    r"|^\s|^[#>+=-]|(?:(?<=^\d)|(?<=^\d\d))[.)](?=\s)"
)
"""What ends a cell, begins code, emphasis, links, images and links of bare addresses, and, at the
start of a text, a heading, a quote, a list, a rule or code."""


def _plain(text: str) -> str:
    """Escape text of others so that Markdown and HTML show it as it is, on one line."""
    escaped = _MARKUP.sub(lambda found: f"&#{ord(found[0])};", escape(text, quote=False))
    return "<br>".join(escaped.splitlines())
