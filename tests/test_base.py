"""Which files of a model's folder are taken, and what is reported when some are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from tests.builders.refusals import refusal, refused

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.models.base import (
    TOKENIZER_FILES,
    check_inside,
    check_model_index,
    choose_files,
    part_digests,
)
from zerotrain.models.families.causal_lm import FAMILY as CAUSAL_LM
from zerotrain.models.families.sdxl import FAMILY

HUB = [
    "model_index.json",
    "README.md",
    "sd_xl_base_1.0.safetensors",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.onnx",
    "text_encoder/pytorch_model.bin",
    "text_encoder_2/config.json",
    "text_encoder_2/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "tokenizer_2/merges.txt",
    "tokenizer_2/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/openvino_model.xml",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
    "vae_1_0/config.json",
]
"""As stabilityai/stable-diffusion-xl-base-1.0 lists them, shortened."""


def choose(names: list[str]) -> dict[str, str]:
    """The files chosen from a folder called MODEL."""
    return choose_files(names, FAMILY.spec, "MODEL")


def without(*prefixes: str) -> list[str]:
    """The hub's files without some."""
    return [name for name in HUB if not name.startswith(prefixes)]


def message(names: list[str]) -> str:
    """The message to the user about a folder of these files."""
    return refusal(choose, names)


def test_only_what_the_family_loads_is_taken():
    """Of a hub's repository: one set of weights in full precision, configurations, tokenizers."""
    left = {"README.md", "sd_xl_base_1.0.safetensors", "vae_1_0/config.json"}
    odd = (".fp16.safetensors", ".onnx", ".bin", ".xml")
    expected = {name for name in HUB if name not in left and not name.endswith(odd)}
    assert choose(HUB) == {name: name for name in expected}


def test_weights_that_exist_in_half_precision_alone_get_the_plain_name():
    """from_pretrained then finds them without naming a variant."""
    half = "unet/diffusion_pytorch_model.fp16.safetensors"
    chosen = choose(without("unet/diffusion_pytorch_model.safetensors"))
    assert chosen["unet/diffusion_pytorch_model.safetensors"] == half


def test_shards_are_taken_with_their_index():
    shards = [f"unet/diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = "unet/diffusion_pytorch_model.safetensors.index.json"
    other = "unet/diffusion_pytorch_model.safetensors.index.fp16.json"
    chosen = choose([*without("unet/diff"), *shards, index, other])
    assert {name for name in chosen if name.startswith("unet/diff")} == {*shards, index}


def test_a_part_takes_files_by_a_fixed_list_of_names():
    """Notes, tokens and scripts that lie in a part are never linked, whatever their names end
    with; what the libraries load there is."""
    private = (
        "notes.txt",
        "token.json",
        "vocab.json.txt",
        "secrets.model",
        "run.py",
        "extra.jinja",
    )
    parts = ("vae", "scheduler", "tokenizer", "unet")
    hostile = [f"{part}/{name}" for part in parts for name in private]
    loaded = [
        "unet/generation_config.json",
        "tokenizer/spiece.model",
        "tokenizer/special_tokens_map.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tekken.json",
        "tokenizer/chat_template.jinja",
    ]
    chosen = choose([*HUB, *hostile, *loaded, "scheduler/config.json", "vae/vocab.json"])
    assert {*chosen} == {*choose(HUB), *loaded}
    names = ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    assert {*choose_files([*names, *private], CAUSAL_LM.spec, "MODEL")} == {*names}


def test_the_list_of_names_has_what_transformers_loads():
    """The vocabularies of every tokenizer of transformers are on the list."""
    folder = Path(transformers.__file__).parent / "models"
    named = {
        name
        for path in folder.glob("*/tokenization*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES[^=]*= *\{([^}]*)\}", path.read_text())
        for name in re.findall(r':\s*"([^"]+)"', table)
    }
    assert len(named) > 20
    assert named <= TOKENIZER_FILES


def test_a_base_takes_no_file_from_outside_of_it(tmp_path):
    """A file of a base that is a link to another place is named, not followed; a snapshot of the
    hub leads into its own cache."""
    folder, cache = tmp_path / "base", tmp_path / "models--me--cats"
    (folder / "vae").mkdir(parents=True)
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / ("0" * 40)).write_text("{}")
    (tmp_path / "token").write_text("secret")
    (folder / "vae" / "config.json").symlink_to(cache / "blobs" / ("0" * 40))
    check_inside(folder, ["vae/config.json"], "base")
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "config.json").symlink_to(tmp_path / "token")
    assert refused(check_inside, folder, ["vae/config.json"], "base MODEL").what == (
        f"base MODEL: vae/config.json is a link that leads out of it, to {tmp_path / 'token'}"
    )


def test_the_links_of_a_published_base_are_hashed_once(tmp_path, monkeypatch):
    """Their files are large: the manifest is read once, and a file only when it has changed."""
    read, hashed = [], []
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(name)
    with artifact.publish(tmp_path / "base", "base") as draft:
        for name in ("a.json", "b.json"):
            (draft.folder / name).symlink_to(tmp_path / name)

    def count_read(folder, kind, **options):
        read.append(folder)
        return artifact.read(folder, kind, **options)

    def count_hash(path):
        hashed.append(path.name)
        return artifact.file_sha256(path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("zerotrain.artifact.verdicts.LEAST_BYTES", 0)
    monkeypatch.setattr("zerotrain.artifact.verdicts.SETTLED_SECONDS", 0.0)
    monkeypatch.setattr("zerotrain.models.base.read", count_read)
    monkeypatch.setattr("zerotrain.models.base.file_sha256", count_hash)
    for _ in range(2):
        check_inside(tmp_path / "base", ["a.json", "b.json"], "base")
    assert read == [tmp_path / "base"] * 2
    assert hashed == ["a.json", "b.json"]


def test_the_manifest_of_own_weights_is_no_part_of_a_model():
    """Weights that a run here wrote are a base, too: their manifest stays theirs."""
    names = ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    found = choose_files([*names, "manifest.json"], CAUSAL_LM.spec, "MODEL")
    assert sorted(found) == sorted(names)


def test_a_folder_without_model_index_is_no_model():
    text = message(without("model_index.json"))
    assert "MODEL: no model_index.json, so this is not a model in diffusers' layout" in text
    assert "from_single_file" in text


def test_a_missing_part_is_named_with_what_is_there():
    text = message(without("text_encoder_2/"))
    assert (
        "MODEL: the part text_encoder_2 is missing; there is scheduler, text_encoder, tok" in text
    )


def test_pickled_weights_are_refused():
    text = message(without("text_encoder/model"))
    assert "text_encoder: weights only as pytorch_model.bin, a pickle" in text
    assert "save_pretrained" in text


def test_a_part_without_weights_is_refused():
    text = message(without("vae/diffusion"))
    assert "MODEL: vae: no safetensors weights; there is config.json" in text


@pytest.fixture
def index() -> dict[str, object]:
    """What model_index.json says of an SDXL."""
    classes = {part: ["diffusers", name] for part, name in FAMILY.spec.classes.items()}
    return {"_class_name": "StableDiffusionXLPipeline", **classes}


def test_a_part_of_another_class_is_refused(index, tmp_path):
    path = tmp_path / "model_index.json"
    path.write_text(json.dumps(index | {"unet": ["diffusers", "SD3Transformer2DModel"]}))
    with pytest.raises(PipelineError, match="names SD3Transformer2DModel for unet, family sdxl"):
        check_model_index(path, FAMILY.spec, "MODEL")
    path.write_text(json.dumps(index | {"text_encoder": [None, None]}))
    with pytest.raises(PipelineError, match="names nothing for text_encoder"):
        check_model_index(path, FAMILY.spec, "MODEL")
    path.write_text("{")
    with pytest.raises(PipelineError, match=r"model_index\.json: not valid JSON"):
        check_model_index(path, FAMILY.spec, "MODEL")


def test_parts_that_are_not_taken_are_not_promised(index, tmp_path):
    """An image encoder that is not linked must not be looked for when the weights are loaded."""
    path = tmp_path / "model_index.json"
    path.write_text(json.dumps(index | {"image_encoder": ["transformers", "CLIPVisionModel"]}))
    assert check_model_index(path, FAMILY.spec, "M") == index | {"image_encoder": [None, None]}


def test_the_digest_of_a_part_follows_its_files_alone():
    files = {"vae/a": "1", "vae/b": "2", "unet/a": "3", "model_index.json": "4"}
    before, after = part_digests(files), part_digests(files | {"vae/b": "5"})
    assert list(before) == ["model_index.json", "unet", "vae"]
    assert {part for part in before if before[part] != after[part]} == {"vae"}
