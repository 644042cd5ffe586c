"""A model card shows others' text as text, and no private caption by itself."""

from __future__ import annotations

import html
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from zerotrain import artifact
from zerotrain.evaluation.results import ANSWERS, Answer, write_answers
from zerotrain.export import publish as module
from zerotrain.export.options import PublishOptions
from zerotrain.export.provenance import Origin
from zerotrain.export.publish import _plain

HOSTILE = [
    "![a](https://evil.org/track.png)",
    "[click](https://evil.org)",
    "[click][1]",
    "[1]: https://evil.org",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "see https://evil.org or www.evil.org",
    "a | b",
    "`code` *strong* ~~gone~~ \\",
    "line\n\n# heading\u2028- item",
    "# heading",
    "> quote",
    "- item",
    "+ item",
    "1. item",
    "---",
    "    code",
    "_emphasis_ and __strong__",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_is_shown(text: str) -> None:
    """Nothing that begins a link, an image, HTML, code, a cell or a line is left."""
    found = _plain(text)
    assert not any(part in found for part in ("](", "][", "]:", "://", "www.", "|", "`", "*", "\n"))
    assert "<" not in found.replace("<br>", "")
    shown = found.replace("<br>", "\n").splitlines()[0]
    assert not shown.startswith(("#", ">", "-", "+", " ", "1.", "_", "="))
    assert html.unescape(found.replace("<br>", "\n")).split() == text.split()


@pytest.mark.parametrize("text", ["a red house, 35mm", "0.5 [0.9, 0.999]", "stable-diffusion_xl"])
def test_plain_text_stays(text: str) -> None:
    """A card is read as a file, too."""
    assert _plain(text) == text


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the card of an evaluation; what it shows: prompts, answers, systems, files."""
    given: dict[str, object] = {}

    def card(weights, repo, origin, license, prompts, answers, systems) -> str:
        given.update(prompts=prompts, answers=answers, systems=systems)
        return "card"

    def write(own: list[str], others: list[str], *, text: bool = False, **options: bool):
        phase = tmp_path / "phase"
        with artifact.publish(phase / "evaluation", "evaluation") as draft:
            if text:
                found = [Answer(prompt, None, "answer") for prompt in own + others]
                write_answers(draft.folder / ANSWERS, found)
            else:
                Image.new("RGB", (2, 2)).save(draft.folder / "grid.png")
            draft.content = {
                "prompts": own + others,
                "systems": [""] * len(own) + ["private system"] * len(others),
                "evaluate": {"prompts": own},
            }
        (phase / "metrics.json").write_text(json.dumps({}))
        monkeypatch.setattr(module, "find_origin", lambda weights: Origin(phase=phase))
        monkeypatch.setattr(module, "model_card", card)
        folder = tmp_path / f"card-{options}"
        asked = PublishOptions(tmp_path, "me/cats", **options)
        module._write_card(SimpleNamespace(), folder, asked)  # type: ignore[arg-type]
        return given, (folder / "samples.png").exists()

    return write


def test_captions_are_published_by_choice(shown, capsys: pytest.CaptureFixture[str]) -> None:
    """Without prompts of its own, an evaluation samples captions of the dataset: neither they nor
    their images are on the card, and a line says so."""
    given, grid = shown([], ["a private caption"])
    assert (given["prompts"], grid) == ([], False)
    assert "--show-captions" in capsys.readouterr().out
    given, grid = shown([], ["a private caption"], show_captions=True)
    assert (given["prompts"], grid) == (["a private caption"], True)


def test_own_prompts_are_published(shown, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate.prompts is a choice."""
    given, grid = shown(["a house"], [])
    assert (given["prompts"], grid, capsys.readouterr().out) == (["a house"], True, "")


def test_questions_of_a_dataset_are_published_by_choice(shown) -> None:
    """Of a language model: own questions first, those of the dataset only by choice."""
    given, _ = shown(["1+1="], ["a private question"], text=True)
    assert [answer.prompt for answer in given["answers"]] == ["1+1="]
    assert given["systems"] == [""]
    given, _ = shown(["1+1="], ["a private question"], text=True, show_captions=True)
    assert len(given["answers"]) == 2


def test_a_new_repository_is_private() -> None:
    """It can be made public later; what was public cannot be made private again."""
    assert PublishOptions(Path("a"), "me/cats").private


def test_a_grid_that_the_card_does_not_show_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier card may have shown private captions, which are drawn into its grid."""
    card = tmp_path / "card"
    card.mkdir()
    (card / "samples.png").write_bytes(b"drawn captions")
    (card / "README.md").write_text("# cats\n")
    folder = SimpleNamespace(files={}, path=lambda name: tmp_path / name)
    monkeypatch.setattr(module, "_read", lambda weights: folder)
    options = PublishOptions(tmp_path / "weights", "me/cats", card=card, dry_run=True)
    module.publish(options)
    assert "samples.png" not in capsys.readouterr().out
    (card / "README.md").write_text("![samples](samples.png)\n")
    module.publish(options)
    assert "samples.png" in capsys.readouterr().out
