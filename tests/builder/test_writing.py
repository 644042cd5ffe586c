"""Writing configurations from the page: shown first, then written once, with a backup."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.refusals import refusal

from zerotrain.builder.writing import (
    FOLDER,
    Written,
    confirm,
    delete_template,
    list_templates,
    propose,
    save_template,
)

TEXT = """\
# A model of digits.
run: digits  # as its file
base: nano
data: {images: photos}
train:
  learning_rate:   1.0e-3 # tried 1e-2
phases:
  - {name: plain,   until: 300, launch: torch}
"""
OTHER = TEXT.replace("until: 300", "until: 400").replace("# tried 1e-2", "")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str = TEXT, name: str = "digits") -> Written:
    return confirm(name, text, propose(name, text).digest)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_written_before_the_confirmation(project: Path) -> None:
    """A proposal of a new file is its lines; the file is there once it is confirmed, without a
    backup."""
    proposal = propose("digits", TEXT)
    assert [line for line in proposal.diff() if line[:1] == "+"] == [
        f"+{line}" for line in TEXT.splitlines()
    ]
    assert files(project) == set()
    assert write() == Written(Path("config/digits.yaml"), None)
    assert Path("config/digits.yaml").read_text(encoding="utf-8") == TEXT


def test_existing_file_keeps_its_comments_and_a_backup(project: Path) -> None:
    """Only the changed value differs; each confirmation keeps the bytes that it replaced."""
    write()
    shown = propose("config/digits.yaml", OTHER).diff()
    assert [line for line in shown if line[:1] in "+-"] == [
        "-  - {name: plain,   until: 300, launch: torch}",
        "+  - {name: plain,   until: 400, launch: torch}",
    ]
    assert write(OTHER).backup == Path("config/digits.yaml.bak")
    assert Path("config/digits.yaml").read_text(encoding="utf-8") == TEXT.replace("300", "400")
    assert Path("config/digits.yaml.bak").read_text(encoding="utf-8") == TEXT
    assert write(TEXT).backup == Path("config/digits.yaml.bak2")
    assert not propose("digits", TEXT).changes
    assert files(project) == {f"config/digits.yaml{end}" for end in ("", ".bak", ".bak2")}


def test_file_that_was_saved_since_is_not_replaced(project: Path) -> None:
    """A confirmation is of the diff that was shown: no other file or text passes."""
    write()
    digest = propose("digits", OTHER).digest
    edited = TEXT.replace("nano", "other/model")
    Path("config/digits.yaml").write_text(edited, encoding="utf-8")
    assert "was saved by another program" in refusal(confirm, "digits", OTHER, digest)
    assert "was saved by another program" in refusal(confirm, "digits", TEXT, digest)
    new = propose("second", TEXT).digest
    Path("config/second.yaml").write_text(edited, encoding="utf-8")
    assert "was saved by another program" in refusal(confirm, "second", TEXT, new)
    assert files(project) == {"config/digits.yaml", "config/second.yaml"}
    assert Path("config/digits.yaml").read_text(encoding="utf-8") == edited


NAMES = ["../x", "/etc/x", "a/b", "", ".hidden", "a b", "a\nb", "x" * 100, "config/../../x", "-x"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_their_folder_are_refused(name: str, project: Path) -> None:
    """Neither a configuration nor a template is written, read or deleted by such a name."""
    for call in (propose, save_template):
        assert "name" in refusal(call, name, TEXT)
    assert "name" in refusal(delete_template, name)
    assert files(project) == set()


def test_links_out_of_the_project_are_not_followed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """What a link in config/ leads to is neither changed nor shown."""
    outside = tmp_path_factory.mktemp("outside") / "secret.yaml"
    outside.write_text(TEXT)
    Path("config/templates").mkdir(parents=True)
    Path("config/digits.yaml").symlink_to(outside)
    Path("config/templates/mine.yaml").symlink_to(outside)
    assert "leads out of the project" in refusal(propose, "digits", OTHER)
    assert "does not follow" in refusal(delete_template, "mine")
    assert "does not follow" in refusal(save_template, "mine", OTHER, replace=True)
    assert list_templates() == []
    assert outside.read_text() == TEXT


def test_invalid_configurations_are_not_written() -> None:
    """The reader's own messages say what is wrong, before a diff is shown."""
    assert "phases.0.until" in refusal(propose, "x", TEXT.replace("300", "never"))
    assert "not valid YAML: line 2, column 1" in refusal(propose, "x", "a: [")
    assert "not in the project's folder" in refusal(propose, "x", TEXT.replace("torch", "/x.yaml"))
    assert "contains itself" in refusal(propose, "x", "a: &a [*a]")
    assert "holds a list, not keys" in refusal(propose, "x", "- a")
    assert "more than 256 KiB" in refusal(propose, "x", TEXT + "#" * 2**18)


def test_templates_are_saved_and_deleted() -> None:
    """A template may be unfinished, keeps its comments, and is replaced on request only."""
    part = "# For cats.\ntrain: {learning_rate: 1.0e-4}\n"
    assert save_template("cats", part).about == "For cats."
    assert (FOLDER / "cats.yaml").read_text(encoding="utf-8") == part
    for_editors = f"# yaml-language-server: $schema=schema.json\n{part}"
    assert save_template("cats", for_editors, replace=True).about == "For cats."
    assert "already" in refusal(save_template, "cats", TEXT)
    save_template("cats", TEXT, replace=True)
    save_template("sums", part)
    assert [one.name for one in list_templates()] == ["cats", "sums"]
    assert (FOLDER / "cats.yaml").read_text(encoding="utf-8") == TEXT
    delete_template("cats")
    assert "no template cats" in refusal(delete_template, "cats")
    assert [one.name for one in list_templates()] == ["sums"]
