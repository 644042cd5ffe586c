"""zerotrain publish: write a model card for exported weights, and upload both to the hub."""

from __future__ import annotations

from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact, replacing, write_whole
from zerotrain.artifact.documents import read_text
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import ANSWERS, Answer, read_answers
from zerotrain.export.model_card import GRID, model_card
from zerotrain.export.options import PublishOptions
from zerotrain.export.provenance import find_origin
from zerotrain.machine.disk_errors import check_no_file
from zerotrain.models.base import MODEL_INDEX, is_model_file
from zerotrain.models.hub import HUB_ID

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
