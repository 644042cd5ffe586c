"""Import, writing and templates, as a browser does them."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from zerotrain.builder.draft import read_draft

REFERENCES = Path(__file__).parents[1] / "importing" / "references"
RECIPE = """\
# A recipe.
run: cats
base: nano # small
data: {images: photos}
phases:
  - {name: plain, until: 300}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one recipe as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def hidden(page: str, name: str) -> str:
    return page.partition(f'name="{name}" value="')[2].partition('"')[0]


def test_dropped_file_is_shown_and_opens_in_the_form(client: TestClient) -> None:
    """Every key is listed with its outcome; what a run needs beyond it is added for the form."""
    file = ("ds.json", (REFERENCES / "openmind" / "example_zero2.json").read_bytes())
    page = client.post("/import", files={"files": file}, data={"precision": "bf16"}).text
    assert page.startswith("<!doctype html>")  # without scripts a page, with them a part of it
    twice = client.post("/import", files=[("files", file), ("files", file)])
    assert "two files have the name" in twice.text
    scripted = {"HX-Request": "true"}
    page = client.post("/import", files={"files": file}, headers=scripted).text
    assert page.startswith("<h2>ds.json")
    for text in ("Taken over", "Was auto", "Ignored", "It does not say run, base, data, phases"):
        assert text in page
    part = "# Of a file.\ntrain:\n  learning_rate: 1.0e-4 # kept\n"
    form = {"name": "mine", "text": part.replace("\n", "\r\n")}
    answer = client.post("/import/open", data=form, follow_redirects=False)
    assert answer.headers["location"] == "/build?from=config%2Ftemplates%2Fmine.yaml"
    saved = Path("config/templates/mine.yaml").read_text(encoding="utf-8")
    assert saved.startswith("# Of a file.\n")
    assert "learning_rate: 1.0e-4 # kept" in saved
    assert "  - name: train\n    until: 1000\n" in saved


def test_refused_import_lists_escaped_problems(client: TestClient) -> None:
    """Problems are sentences; keys with HTML or control characters are text."""
    known = "--model_name_or_path a/b --max_steps 3 --bf16"
    command = f"accelerate launch train.py {known} --<b>x</b> 1 --other\x1b[2J 2"
    answer = client.post("/import", data={"pasted": command})
    assert answer.status_code == 422
    assert "2 problems: nothing was imported" in answer.text
    assert "<b>" not in answer.text
    assert "\x1b" not in answer.text
    assert client.post("/import", data={"pasted": "a: 1", "num_processes": "-1"}).status_code == 422
    assert client.post("/import", data={"pasted": "a: 1", "precision": "fp8"}).status_code == 422


def test_diff_is_confirmed_and_written_with_the_recipe_s_comments(client: TestClient) -> None:
    """A configuration that began with a recipe keeps its comments in a new file; a changed file
    refuses the confirmation."""
    changed = {"run": "dogs", "data.images": "dogs", "phase.until": "400"}
    form = {"name": "dogs", "text": read_draft({"from": "config/recipe.yaml", **changed}).text}
    page = client.post("/write", data=form).text
    assert '<span class="added">+base: nano # small' in page
    assert not Path("config/dogs.yaml").exists()
    digest = hidden(page, "digest")
    done = client.post("/write/confirm", data={**form, "digest": digest})
    assert "config/dogs.yaml is written" in done.text
    assert Path("config/dogs.yaml").read_text(encoding="utf-8") == (
        RECIPE.replace("cats", "dogs").replace("photos", "dogs").replace("300", "400")
    )
    again = client.post("/write/confirm", data={**form, "digest": digest})
    assert again.status_code == 422
    assert "was saved by another program" in again.text


def test_templates_are_saved_listed_and_deleted(client: TestClient) -> None:
    """The list has a link that opens each in the form, with its description as text."""
    form = {"name": "mine", "text": "# <script>alert(1)</script>\r\ntrain: {}\r\n"}
    page = client.post("/templates", data=form).text
    assert "/build?from=config%2Ftemplates%2Fmine.yaml" in page
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert "already" in client.post("/templates", data=form).text
    assert "mine" not in client.post("/templates/delete", data={"name": "mine"}).text
    for name in ("../recipe", "recipe", ""):
        assert client.post("/templates/delete", data={"name": name}).status_code == 422
    assert Path("config/recipe.yaml").is_file()
