"""zerotrain publish: a card that says what the files say, and an upload to a hub's stand-in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.adapters import difference
from tests.builders.states import HISTORY, RAN_ON
from tests.formats.conftest import FORMATS, REPO, head_of, publish, publish_phase, run_card, upload

from zerotrain import artifact
from zerotrain.export.command import convert
from zerotrain.export.provenance import Origin
from zerotrain.export.publish import model_card
from zerotrain.models.families.sdxl import FAMILY


@pytest.fixture
def phase(lora: Path, base: Path, tmp_path: Path) -> Path:
    """An evaluated phase with the LoRA's weights, and a base that names a hub id."""
    folder = tmp_path / "houses" / "only"
    named = tmp_path / "houses" / "base"
    with artifact.publish(named, "base") as draft:
        shutil.copytree(base, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        draft.content = {"family": "sdxl", "base": "stabilityai/stable-diffusion-xl-base-1.0"}
    publish_phase(folder, named, lora, "sdxl")
    with artifact.publish(folder / "evaluation", "evaluation") as draft:
        Image.new("RGB", (8, 8), "red").save(draft.folder / "grid.png")
        prompts = ["a red house", "a | b"]
        draft.content = {"prompts": prompts, "evaluate": {"prompts": prompts}}
    (folder / "metrics.json").write_text(json.dumps({"prompt_accuracy": 0.97, "step": 12}))
    (folder / "launch").mkdir()
    shutil.copy("tests/golden/launch/sdxl/zero2_offload/run.yaml", folder / "launch")
    return folder


def test_a_dry_run_writes_the_card_and_lists_the_files(phase, monkeypatch):
    """Without a network; the weights' folder stays as it is."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    before = artifact.read(phase / "weights", "weights").identity
    said = publish(phase / "weights", REPO, "--license", "openrail++", "--dry-run")
    listed = [line.split()[0] for line in said.splitlines() if line.endswith("bytes")]
    files = artifact.read(phase / "weights", "weights").files
    assert set(listed) == {*files, "README.md", "samples.png"}
    assert artifact.read(phase / "weights", "weights").identity == before
    assert "nothing was uploaded" in said
    card = phase / "weights-card" / "README.md"
    assert head_of(card) == {
        "base_model": "stabilityai/stable-diffusion-xl-base-1.0",
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "license": "openrail++",
        "pipeline_tag": "text-to-image",
        "tags": ["sdxl", "zerotrain", "lora"],
    }
    text = card.read_text()
    assert "| prompt accuracy | 97.0% |" in text
    assert "| preset | zero2_offload |" in text
    assert "![Samples, a row for each prompt](samples.png)" in text
    assert "- a red house" in text
    assert f'pipeline.load_lora_weights("{REPO}")' in text
    assert f"| {before} |" in text


def test_a_card_says_what_trained_the_weights_and_what_changed():
    """From the weights' own manifest, which travels without its run; a stranger's is no markup."""
    made_by = {"ran_on": {**RAN_ON, "driver": "<i>5\n# 7"}, "history": HISTORY}
    said = {"family": "sdxl", "to": "kohya", "dtype": "fp32", "step": 700}
    weights = artifact.Artifact(Path("weights"), "exported", said, {}, {}, made_by)
    text = model_card(weights, REPO, Origin(base="nano"), None)
    assert "## What it was trained on\n\n- exact: steps 301 to 700, since the change" in text
    assert "- device: NVIDIA H100 80GB HBM3, driver &lt;i&gt;5 # 7\n" in text
    assert text.endswith("- after step 300: NVIDIA_TF32_OVERRIDE unset → 0\n")
    bare = artifact.Artifact(Path("weights"), "exported", {**said, "step": "x"}, {}, {}, {})
    assert "What it was trained on" not in model_card(bare, REPO, Origin(base="nano"), None)


@pytest.mark.parametrize("named", ["nano", "/home/me/models/sdxl", "a/b:unet/*,c/d:vae/*"])
def test_a_card_names_no_base_that_others_lack(named):
    """A preset, a folder of one's own, parts of several: readers put the name of theirs there."""
    said = {"family": "sdxl", "to": "kohya", "dtype": "fp32", "step": 1}
    weights = artifact.Artifact(Path("weights"), "exported", said, {}, {}, {})
    text = model_card(weights, REPO, Origin(base=named), None)
    assert named not in text
    assert "base_model" not in text
    assert 'DiffusionPipeline.from_pretrained("BASE")' in text


def test_a_card_that_was_completed_by_hand_is_kept(phase):
    publish(phase / "weights", REPO, "--dry-run")
    card = phase / "weights-card" / "README.md"
    card.write_text("mine\n")
    assert f"kept {card}" in publish(phase / "weights", REPO, "--dry-run")
    assert card.read_text() == "mine\n"


def test_an_export_leads_to_the_phase_that_it_came_from(phase, tmp_path):
    """Over any number of formats; where a folder is gone, the card says less."""
    convert(phase / "weights", "merged", tmp_path / "merged")
    convert(tmp_path / "merged", "ldm", tmp_path / "ldm")
    publish(tmp_path / "ldm", REPO, "--dry-run")
    text = (tmp_path / "ldm-card" / "README.md").read_text()
    assert "base_model_relation: finetune" in text
    assert "97.0%" in text
    shutil.rmtree(phase / "weights")
    publish(tmp_path / "ldm", REPO, "--dry-run", "--card", tmp_path / "other")
    text = (tmp_path / "other" / "README.md").read_text()
    assert "base_model" not in text
    assert "97.0%" not in text


@pytest.mark.parametrize("form", ["diffusers", "ldm", "single_file", "kohya", "peft", "adapter"])
def test_the_card_says_how_to_load_it(whole, lora, base, trained, tmp_path, form, monkeypatch):
    """Its code runs, and gives the model that was trained."""
    source = whole if not FORMATS.get(form, FORMATS["peft"]).adapter else lora
    convert(source, "diffusers" if form == "adapter" else form, tmp_path / "out")
    publish(tmp_path / "out", REPO, "--dry-run")
    monkeypatch.chdir(tmp_path)  # it writes an image there
    scope = run_card(tmp_path / "out", base)
    expected = trained if source == lora else FAMILY.load_model(whole).eval()
    if form == "single_file":
        assert scope["tensors"].keys() == expected.state_dict().keys()
        return
    model = scope["model"] if form == "peft" else scope["pipeline"].unet
    assert difference(model.eval(), expected) <= 1e-5


@pytest.mark.slow
def test_weights_and_card_are_uploaded_in_one_commit(phase, tmp_path, hub):
    """Every file as it is here; the repository is made first."""
    kept, address = hub
    convert(phase / "weights", "kohya", tmp_path / "kohya")
    done = upload(address, tmp_path / "kohya", REPO, "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"published {address}/{REPO}/commit/1\n")
    assert (kept.created["name"], kept.created["visibility"]) == ("houses", "private")
    assert kept.files == {
        "lora.safetensors": (tmp_path / "kohya" / "lora.safetensors").read_bytes(),
        "README.md": (tmp_path / "kohya-card" / "README.md").read_bytes(),
        "samples.png": (phase / "evaluation" / "grid.png").read_bytes(),
    }


@pytest.mark.slow
def test_a_hub_that_refuses_is_a_sentence(phase, tmp_path, hub):
    kept, address = hub
    kept.refuses = True
    convert(phase / "weights", "kohya", tmp_path / "kohya")
    done = upload(address, tmp_path / "kohya", REPO)
    assert done.returncode == 2
    assert "ERROR: me/houses: the hub did not take it (" in done.stderr
    assert "log in with `hf auth login`" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_published_is_refused(phase, base):
    assert "ERROR: 'houses' names no repository" in publish(
        phase / "weights", "houses", "--dry-run"
    )
    assert "is no folder that an export wrote" in publish(phase / "checkpoint", REPO, "--dry-run")
    name = "unet/diffusion_pytorch_model.safetensors"
    (phase / "weights" / name).write_bytes(b"")
    assert f"{name}: 0 bytes" in publish(phase / "weights", REPO, "--dry-run")
