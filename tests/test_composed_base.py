"""`base: PLACE:FILES,PLACE:FILES`: parts of one model from several folders or hub repositories."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from tests.builders.images import build_nano
from tests.builders.runs import make_run
from tests.families import texts

from zerotrain import artifact
from zerotrain.config.families import FAMILIES
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.models.base import choose_files
from zerotrain.models.base_places import Selection, listing, local_folders, read_selections
from zerotrain.models.families import load_family
from zerotrain.models.hub import ModelLocation
from zerotrain.stages.build_base import BuildSettings, build_base

DIFFSYNTH = (
    "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors,"
    "Qwen/Qwen-Image:text_encoder/model*.safetensors,"
    "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
)
"""As the references spell it."""
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
PARTS = {"model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Qwen-Image of the family's own classes."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    return build_nano("qwen_image", folder, steps=2)


def some_of(model: Path, folder: Path, *parts: str) -> Path:
    """A folder with some parts of a model."""
    shutil.copytree(model, folder)
    for path in folder.iterdir():
        if path.is_dir() and path.name not in parts:
            shutil.rmtree(path)
    if "model_index.json" not in parts:
        (folder / "model_index.json").unlink()
    return folder


def build(base: str, output: Path, **changes: object) -> artifact.Artifact:
    """Build a base and read it back, verified."""
    raw = make_run(family="qwen_image", base=base) | changes
    build_base(BuildSettings.of(parse_config(raw, "test.yaml")), None, output)
    return artifact.read(output, "base")


def refusal(base: str, output: Path, **changes: object) -> str:
    """The message to the user; nothing is published."""
    with pytest.raises(PipelineError) as caught:
        build(base, output, **changes)
    assert not output.exists()
    return str(caught.value)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that holds the model as Qwen/Qwen-Image, next to other files; what was downloaded."""
    asked: list[str] = []
    names = [path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()]
    names += ["README.md", "transformer/diffusion_pytorch_model.fp16.safetensors", "vae/model.onnx"]

    def info(self: HfApi, repo: str, revision: str | None) -> SimpleNamespace:
        assert (repo, revision) == ("Qwen/Qwen-Image", None)
        return SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename=n) for n in names])

    def download(repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("Qwen/Qwen-Image", "c0ffee")
        asked.extend(allow_patterns)
        return str(model)

    monkeypatch.setattr(HfApi, "model_info", info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_the_references_spelling_takes_what_it_names_and_what_belongs_to_it(hub, model, tmp_path):
    """Weights of the patterns, configurations, tokenizer, scheduler and model_index.json."""
    found = build(DIFFSYNTH, tmp_path / "base")
    assert set(found.content["parts"]) == PARTS
    assert found.content["commit"] == "c0ffee"
    files = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert set(hub) == files & {*found.files}
    assert not [name for name in hub if "fp16" in name or "onnx" in name or "README" in name]
    load_family("qwen_image").load_encoders(found.folder, "cpu")


def test_parts_come_from_several_folders(model, tmp_path):
    """Each file is the one that was named; a folder of another name is known by its class."""
    most = some_of(model, tmp_path / "most", *PARTS - {"vae", "tokenizer"})
    other = some_of(model, tmp_path / "other", "tokenizer")
    shutil.copytree(model / "vae", other / "my_vae")
    from_most = f"{most}:transformer/,{most}:text_encoder/*"
    base = f"{from_most},{other}:my_vae/*.safetensors,{other}:tokenizer/"
    found = build(base, tmp_path / "base")
    assert set(found.content["parts"]) == PARTS
    for name, entry in found.files.items():
        if name != "model_index.json":
            assert entry["sha256"] == artifact.file_sha256(model / name), name
    assert found.content["commit"] is None
    assert local_folders(base) == [most, other]


def test_the_parts_of_redux_lie_in_its_own_repository(tmp_path):
    """Next to those of FLUX.1 dev, whose model_index.json is taken; the base reads an image."""
    folder = tmp_path / "redux"
    build_nano("flux", folder, steps=2, pipeline="FluxPriorReduxPipeline")
    extra = ("image_embedder", "image_encoder")
    other = some_of(folder, tmp_path / "FLUX.1-Redux-dev", *extra)
    (other / "model_index.json").write_text('{"_class_name": "FluxPriorReduxPipeline"}')
    dev = some_of(folder, tmp_path / "FLUX.1-dev", *set(os.listdir(folder)) - {*extra})
    weights = ("transformer/*", "text_encoder/*", "text_encoder_2/*", "vae/*")
    base = ",".join(f"{dev}:{files}" for files in weights)
    image = f"{other}:image_encoder/model.safetensors,{other}:image_embedder/*.safetensors"
    found = build(f"{base},{image}", tmp_path / "base", family="flux")
    assert set(found.content["parts"]) == {*os.listdir(folder)}
    for name, entry in found.files.items():
        if name != "model_index.json":
            assert entry["sha256"] == artifact.file_sha256(folder / name), name
    reads = load_family("flux").conditioning(found.folder)
    assert (reads.least, reads.most, reads.in_prompt) == (1, 1, True)
    plain = build(base, tmp_path / "plain", family="flux")
    assert not load_family("flux").conditioning(plain.folder).in_prompt


def test_a_variant_that_a_pattern_names_is_taken(model, tmp_path):
    """Full precision lies next to it; only what is named is read."""
    other = tmp_path / "other"
    other.mkdir()
    os.link(model / "vae/config.json", other / "config.json")
    (other / "diffusion_pytorch_model.safetensors").write_bytes(b"full precision")
    fixed = other / "diffusion_pytorch_model.fp16.safetensors"
    os.link(model / "vae/diffusion_pytorch_model.safetensors", fixed)
    base = f"{model}:transformer/*,{model}:text_encoder/*,{other}:*fp16.safetensors"
    found = build(base, tmp_path / "base")
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert found.files[weights]["sha256"] == artifact.file_sha256(fixed)


def test_what_is_wrong_is_named(model, tmp_path):
    """Each mistake has its sentence, with the pattern that was given."""
    rest = f"{model}:text_encoder/*,{model}:vae/*"
    copy = some_of(model, tmp_path / "copy", "vae", "transformer")
    (copy / "notes").mkdir()
    (copy / "notes/a.txt").write_text("")
    for base, message in {
        f"{model}:transfomer/*.safetensors,{rest}": f"{model}:transfomer/*.safetensors matches no ",
        f"{model}:transformer/*.bin,{rest}": "there is transformer/config.json, transformer/diff",
        rest: "base: the part transformer is missing",
        f"{model}:transformer/*,{rest},{copy}:vae/*": f"the part vae comes from {model}:vae/* and "
        f"from {copy}:vae/*",
        f"{copy}:notes/a.txt,{rest}": f"base: {copy}:notes/a.txt is not a known part",
        f"{model}:transformer/*,vae": "base: 'vae' is not PLACE:FILES",
        f"{copy}:transformer/*,{copy}:vae/*": "base: no model_index.json",
    }.items():
        assert message in refusal(base, tmp_path / "base")
    text = refusal(f"{model}:transformer/*,{copy}:vae/*", tmp_path / "base", revision="main")
    assert "revision: 'main' is set, but base" in text


def test_a_place_without_colon_is_read_as_before(tmp_path):
    """Hub ids, presets, and folders with a colon in their names."""
    (tmp_path / "a:b").mkdir()
    for base in ("nano", "owner/name", str(tmp_path / "a:b")):
        assert read_selections(base) == []
    assert read_selections("o/n:vae/, /a/b:x*") == [
        Selection("o/n", "vae/*"),
        Selection("/a/b", "x*"),
    ]


def test_such_a_base_can_be_planned(model, tmp_path):
    """Of a hub id as shipped; a folder's part by its own config.json."""
    (known,) = (find_architecture("qwen_image", "Qwen/Qwen-Image").parts,)
    assert find_architecture("qwen_image", DIFFSYNTH).parts == known
    hub = DIFFSYNTH.split(",")[1]
    found = find_architecture("qwen_image", f"{model}:transformer/*,{hub},{model}:vae/*").parts
    assert found["text_encoder"] == known["text_encoder"]
    config = json.loads((model / "transformer/config.json").read_text())
    assert found["transformer"].config == config
    with pytest.raises(PipelineError, match="the part transformer is missing"):
        find_architecture("qwen_image", f"{hub},{model}:vae/*")
    with pytest.raises(PipelineError, match="base: 'Qwen/Qwen-Imag' is no folder"):
        find_architecture("qwen_image", DIFFSYNTH.replace("Qwen/Qwen-Image:t", "Qwen/Qwen-Imag:t"))


def test_sd3_without_t5_is_what_names_no_t5():
    """Its tokenizer does not come along; with T5 named it does."""
    family = FAMILIES["sd3"]
    weights = {part: f"{part}/model.safetensors" for part in family.classes}
    others = [part for part in family.parts if part not in family.classes and part != "scheduler"]
    tokenizers = ["scheduler/scheduler_config.json", *(f"{part}/vocab.json" for part in others)]
    place = ModelLocation("o/n", (*weights.values(), *tokenizers, "model_index.json"))
    named = [Selection("o/n", name) for part, name in weights.items() if part != "text_encoder_3"]
    found = choose_files(listing(named, {"o/n": place}, family), family, "base")
    assert set(place.names) - set(found) == {weights["text_encoder_3"], "tokenizer_3/vocab.json"}
    named += [Selection("o/n", weights["text_encoder_3"])]
    assert set(choose_files(listing(named, {"o/n": place}, family), family, "b")) == {*place.names}


def test_the_processor_comes_from_where_the_transformer_is():
    """As DiffSynth-Studio names a base for editing, which shares encoder and autoencoder."""
    family = FAMILIES["qwen_image"]
    weights = {part: f"{part}/model.safetensors" for part in family.classes}
    rest = ("processor/vocab.json", "tokenizer/vocab.json", "scheduler/scheduler_config.json")
    edit = ModelLocation("o/edit", (*weights.values(), *rest, "model_index.json"))
    plain = ModelLocation("o/plain", (*weights.values(), *rest[1:], "model_index.json"))
    named = [Selection("o/edit" if part == "transformer" else "o/plain", name)
             for part, name in weights.items()]  # fmt: skip
    found = listing(named, {"o/edit": edit, "o/plain": plain}, family)
    assert {*choose_files(found, family, "base")} == {*edit.names}
    owners = {name: place.name for name, (place, _) in found.items()}
    assert owners["processor/vocab.json"] == owners["model_index.json"] == "o/edit"
    assert owners["tokenizer/vocab.json"] == "o/plain"


def test_a_language_model_may_be_named_so(tmp_path):
    """One of several weights next to each other; configuration and tokenizer come along."""
    folder = texts.build("causal_lm", tmp_path / "model")
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"other weights")
    changes = {"family": "causal_lm", "data": {"source": "sums"}}
    found = build(f"{folder}:model.safetensors", tmp_path / "base", **changes)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {*found.files}
    assert "model-00001-of-00001.safetensors" not in found.files
    planned = find_architecture("causal_lm", f"{folder}:model.safetensors")
    assert planned.trained.class_name == "Qwen2ForCausalLM"


def test_the_pipelines_class_is_the_trained_parts_unless_another_place_is_named():
    """So that the transformer of a model that edits can be trained from captions alone."""
    family = FAMILIES["qwen_image"]
    names = (TRANSFORMER, "scheduler/scheduler_config.json", "model_index.json")
    encoders = ("text_encoder/model.safetensors", "vae/a.safetensors", "tokenizer/vocab.json")
    edits, plain = ModelLocation("o/edit", names), ModelLocation("o/plain", (*names, *encoders))
    places = {"o/edit": edits, "o/plain": plain}
    named = [Selection("o/edit", TRANSFORMER), *(Selection("o/plain", n) for n in encoders[:2])]
    assert listing(named, places, family)["model_index.json"][0] is edits
    named.append(Selection("o/plain", "model_index.json"))
    found = listing(named, places, family)
    assert found["model_index.json"][0] is plain
    assert found["scheduler/scheduler_config.json"][0] is edits
