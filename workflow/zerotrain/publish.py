"""zerotrain publish: a model card beside exported weights, and both on the hub."""

from __future__ import annotations

from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact, replacing, write_whole
from zerotrain.base import MODEL_INDEX, is_model_file, some
from zerotrain.disk_errors import check_no_file
from zerotrain.errors import PipelineError
from zerotrain.evaluation.answers import ANSWERS, Answer, read_answers
from zerotrain.model_card import GRID, model_card
from zerotrain.model_place import HUB_ID
from zerotrain.origin import origin_of

CARD = "README.md"
KINDS = ("weights", "exported")
MOST_ANSWERS = 10
"""Of a language model, on the card."""


def publish(
    weights: Path,
    repo_id: str,
    card: Path | None = None,
    *,
    license: str | None,
    private: bool,
    dry_run: bool,
) -> None:
    """Write the card, list what is to be uploaded, and upload it in one commit.

    A card that is there already is taken as it is: a user may have completed it.

    Args:
        weights: A folder that an export wrote.
        repo_id: OWNER/NAME of the repository, which is made if it is missing.
        card: Folder of the card and its picture; default: WEIGHTS-card beside the weights.
        license: The licence's id on the hub, for the card.
        private: Whether a new repository is seen by its owner alone.
        dry_run: Write and list only; the network is not asked.

    Raises:
        PipelineError: the folder is not whole, the name is none, or the hub refuses.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise PipelineError(
            f"{repo_id!r} names no repository of the hub", hint="write OWNER/NAME, as me/cats"
        )
    card = card or weights.parent / f"{weights.name}-card"
    check_no_file(card)
    found = _read(weights)
    written = _write_card(found, repo_id, card, license)
    names = sorted(name for name in found.files if not name.startswith(RECORDS))
    files = {name: found.path(name) for name in names if is_model_file(name)}
    if others := [name for name in names if name not in files]:
        print(f"not uploaded, no file of a model: {some(others)}")
    files |= {path.name: path for path in sorted(card.iterdir()) if path.name in (CARD, GRID)}
    width = max(len(name) for name in files)
    for name, path in files.items():
        print(f"{name:<{width}}  {path.stat().st_size:>14,} bytes")
    print(f"{'wrote' if written else 'kept'} {card / CARD}")
    if dry_run:
        print(f"nothing was uploaded; without --dry-run it goes to {repo_id}")
        return
    print(f"published {_upload(repo_id, files, private)}")


def _read(folder: Path) -> Artifact:
    artifact.check_published(folder, ours=(folder / MODEL_INDEX).is_file())
    kind = artifact.kind_of(folder)
    if kind not in KINDS:
        raise PipelineError(
            f"{folder}: is no folder that an export wrote",
            hint="name the weights of a phase, or what `zerotrain export` wrote",
        )
    return artifact.read(folder, kind)


def _write_card(found: Artifact, repo_id: str, folder: Path, license: str | None) -> bool:
    """Write card, and picture of images, unless there is a card; whether it was written."""
    if (folder / CARD).exists():
        return False
    origin = origin_of(found)
    prompts: list[str] = []
    answers: list[Answer] = []
    if origin.phase is not None and artifact.is_published(origin.phase / "evaluation"):
        evaluation = artifact.read(origin.phase / "evaluation", "evaluation")
        if ANSWERS in evaluation.files:
            answers = read_answers(evaluation.path(ANSWERS))[:MOST_ANSWERS]
        else:
            prompts = evaluation.content["prompts"]
            # A picture without a card may be the user's own.
            if not (folder / GRID).exists():
                with replacing(folder / GRID) as new:
                    artifact.copy_new(evaluation.path("grid.png"), new)
    text = model_card(found, repo_id, origin, license, prompts, answers)
    write_whole(folder / CARD, text)
    return True


def _upload(repo_id: str, files: dict[str, Path], private: bool) -> str:
    """Make the repository if it is missing, and commit the files; the commit's address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    # HTTPError is that of whichever HTTP client the hub's own uses.
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
