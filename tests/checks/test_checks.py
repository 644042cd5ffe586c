"""`zerotrain check` finds what stages would refuse later: all of it at once, with its line."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from tests.conftest import ROOT

from zerotrain import artifact
from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import base, read_checked_runs
from zerotrain.launch.planner.architecture import read_shipped
from zerotrain.models.base_places import PARTS

FILE = """\
run: flowers
base: nano
data:
  images: photos
train:
  resolution: 64
phases:
  - name: plain
    until: 300
  - name: offload
    until: 700
    launch: zero2_offload
"""
CONFIG = Path("config/flowers.yaml")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the launch presets, two captioned photos and a local model."""
    monkeypatch.chdir(tmp_path)
    for cached in (base._problems_of_base, base._parameter_names):
        cached.cache_clear()
    Path("config").mkdir()
    Path("config/launch").symlink_to(ROOT / "config/launch")
    Path("photos").mkdir()
    for name in ("cat", "dog"):
        Image.new("RGB", (8, 8)).save(f"photos/{name}.png")
        Path(f"photos/{name}.txt").write_text(f"a {name}", encoding="utf-8")
    write_base("sdxl")
    Path("empty").mkdir()
    Path("weights.bin").write_bytes(b"")
    return tmp_path


def write_base(family: str, *, without: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> None:
    """A base in diffusers' layout with one small tensor a part; its index names absent parts, too.

    Args:
        family: Also the folder.
        without: Parts that have no folder.
        extra: Parts that the family does not know, whose folders have no config.json.
    """
    folder, known = Path(family), read_shipped(family)[0].parts
    index: dict[str, object] = {"_class_name": "X"}
    for part in (*FAMILIES[family].parts, *extra):
        loaded = known.get(part)
        index[part] = [loaded.library, loaded.class_name] if loaded else NOT_MODELS[part]
        if part in without:
            continue
        (folder / part).mkdir(parents=True)
        if loaded is None:
            name = "scheduler" if part == "scheduler" else "tokenizer"
            (folder / part / f"{name}_config.json").write_text("{}")
            continue
        (folder / part / "config.json").write_text(json.dumps(loaded.config))
        write_tensors(folder / part / "model.safetensors", f"mid.{part}.to_q.weight")
    (folder / "model_index.json").write_text(json.dumps(index))


NOT_MODELS = {
    "processor": ["transformers", "Qwen2VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
    **{f"tokenizer{end}": ["transformers", "CLIPTokenizer"] for end in ("", "_2", "_3")},
}
"""Of model_index.json."""


def write_language_model(config: dict[str, object], *names: str) -> None:
    """A base in transformers' layout with small tensors of these names."""
    Path("gpt").mkdir()
    Path("gpt/config.json").write_text(json.dumps(config), encoding="utf-8")
    Path("gpt/tokenizer_config.json").write_text("{}", encoding="utf-8")
    write_tensors(Path("gpt/model.safetensors"), *names)


def write_tensors(path: Path, *names: str) -> None:
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, path)


def problems(text: str) -> PipelineError:
    CONFIG.write_text(text, encoding="utf-8")
    with pytest.raises(PipelineError) as caught:
        read_checked_runs(CONFIG)
    assert "\n" not in caught.value.hint
    return caught.value


def test_a_right_file_is_answered_with_silence() -> None:
    """Of a preset, of a local model with names of its layers, of a hub id."""
    for text in (
        FILE,
        FILE.replace("base: nano", "base: owner/name"),
        FILE.replace("base: nano", "base: google1/name"),
        FILE.replace("base: nano", "base: sdxl\nlora: {target_modules: [to_q]}"),
        FILE.replace("base: nano", "base: nano\nlora: {target_modules: [to_out.0, attn1.to_q]}"),
        FILE.replace("base: nano", "base: sdxl\nfrozen_parameters: [unet]"),
    ):
        CONFIG.write_text(text, encoding="utf-8")
        assert list(read_checked_runs(CONFIG)) == [str(CONFIG)]


NF4 = "lora: {}\nbase_model_precision: nf4\nbase_model_exclude_modules"
BASE = "base: nano"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
LAUNCH = "launch: zero2_offload"


@pytest.mark.parametrize(
    ("old", "new", "sentence", "hint"),
    [
        (BASE, "base: nanoo", "line 2: base: there is no folder nanoo", "did you mean nano? "),
        (BASE, "base: ./nowhere", "line 2: base: there is no folder ./nowhere", "set `base`"),
        (BASE, "base: weights.bin", "line 2: base: weights.bin is a file", ""),
        (BASE, "base: empty", "line 2: base: empty: no model_index.json, so this is not a "
         "model in diffusers' layout; there is nothing", "name the folder that holds"),
        (BASE, f"base: {SDXL.replace('stability', 'stabilty')}", "line 2: base: "
         "stabiltyai/stable-diffusion-xl-base-1.0: there is no such folder",
         f"did you mean {SDXL}?"),
        (BASE, "base: black-forest-labs/FLUX.1-dev", "line 2: base: black-forest-labs/FLUX.1-dev "
         "is of the family flux, the configuration says sdxl", "set family: flux"),
        (BASE, "base: nano\nrevision: main", "line 3: revision: 'main' is set, but base 'nano'",
         "remove `revision`"),
        (BASE, "base: sdxl:unet/*.bin", "line 2: base: sdxl:unet/*.bin matches no file", "pattern"),
        (BASE, "base: sdxl\nlora: {target_modules: [to_k]}", "line 3: lora.target_modules: no "
         "layer of the base has a name that ends in 'to_k'", "near names: to_q"),
        (BASE, f"base: sdxl\n{NF4}: [to_k]", "line 5: base_model_exclude_modules: no layer of the "
         "base has a name that ends in 'to_k'", "near names: to_q"),
        (BASE, f"base: sdxl\n{NF4}: [^to_q]", "line 5: base_model_exclude_modules: no layer of "
         "the base has a name that ends in '^to_q'", "near names: to_q"),
        (BASE, f"base: nano\n{NF4}: [to_qq]", "line 5: base_model_exclude_modules: no layer of "
         "nano has a name that ends in 'to_qq'", "near names: to_q"),
        (BASE, "base: nano\nlora: {target_modules: [to_k, to_qq]}", "line 3: lora.target_modules: "
         "no layer of nano has a name that ends in 'to_qq'", "near names: to_q"),
        (BASE, "base: micro\nfamily: flux\npeft: {peft_type: LOHA, target_modules: [attn1.to_q]}",
         "line 4: peft.target_modules: no layer of micro has a name that ends in 'attn1.to_q'",
         "near names: to_q, attn"),
        (BASE, "base: sdxl\nfrozen_parameters: [up_blocks]", "line 3: frozen_parameters: "
         "'up_blocks' is in the name of none of the 1 parameters",
         "names look like mid.unet.to_q.weight"),
        (BASE, "base: nano\nresume_from_checkpoint: gone", "line 3: resume_from_checkpoint: gone: "
         "no such folder, or nothing in it", "name a folder that exists"),
        (BASE, "base: nano\nresume_from_checkpoint: {folder: photos, names: gone.txt}",
         "line 3: resume_from_checkpoint.names: gone.txt: no such file", "write `module`"),
        ("images: photos", "images: fotos", "line 4: data.images: fotos: no such folder", "give a"),
        ("images: photos", "images: empty", "line 4: data.images: empty: no image in it", "give a"),
        ("images: photos", "images: photos\n  metadata: gone.csv", "line 5: data.metadata: "
         "gone.csv: no such file", "correct data.metadata"),
        ("images: photos", "images: photos\n  caption_extension: .caption", "line 4: data.images: "
         "2 of 2 samples of photos are bad, and none is left", "put NAME.caption next to"),
        (LAUNCH, "launch: {preset: zero2, contiguous_memory_optimization: true}\n"
         "    gradient_checkpointing: true", "line 12: phase offload: "
         "launch.contiguous_memory_optimization joins shards", "remove it; against fragmented"),
        (LAUNCH, "launch: {preset: zero2, zero3_init: true}", "line 12: phase offload: "
         "launch.zero3_init builds the model in parts", "ZeRO stage 3"),
        (LAUNCH, "launch: {preset: zero2, offload_param: cpu}", "line 12: phase offload: "
         "offload_param is cpu under ZeRO stage 2", "a preset of stage 3"),
        (LAUNCH, "launch: {preset: zero2, deepspeed: {zero_optimization: {reduce_bucket_siz: 1}}}",
         "line 12: phase offload: launch.deepspeed: unknown key "
         "zero_optimization.reduce_bucket_siz", "zero_optimization.reduce_bucket_size"),
        (LAUNCH, "launch: {preset: zero3_nvme, offload_path: weights.bin}", "line 12: phase "
         "offload: launch.offload_path: weights.bin is a file", "fast disk"),
        ("until: 700", "until: 200", "line 11: phase offload: until 200 steps is step 200, but the "
         "phase begins at step 300", "give a later end"),
        ("until: 700", "until: 700\n    lr_warmup_steps: 900", "line 10: phase offload: 900 steps "
         "of warm-up, but the schedule has 700", "lower lr_warmup_steps"),
        ("until: 700", "until: 700\n    optimizer: sgd", "line 10: phase offload: sgd continues "
         "nothing, but the state of adamw has exp_avg and exp_avg_sq", "allow: [moments]"),
        ("  resolution: 64", "  report_to: [aim]", "line 6: report_to: aim is not installed",
         "pip install aim"),
    ],
)  # fmt: skip
def test_what_a_stage_would_refuse_is_refused_at_once(
    old: str, new: str, sentence: str, hint: str
) -> None:
    """The sentence is the stage's own, with the line of its key."""
    assert FILE.count(old) == 1
    error = problems(FILE.replace(old, new))
    assert error.what.startswith(f"{CONFIG}: {sentence}"), error.what
    assert "\n" not in error.what
    assert hint in error.hint


EDITS = FILE.replace("base: nano", "family: qwen_image\nbase: nano")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("conditioning_images: gone", "data.conditioning_images: gone: no such folder"),
        ("conditioning_images: [photos, before]", "data.images: 1 of 2 samples of photos are "
         "bad, and 0 may be bad (data.max_bad_samples): dog.png (no "
         "conditioning image: no dog.* in before)"),
        ("conditioning_columns: [edit]", "data.conditioning_columns: edit: there is no table with "
         "columns, neither data.metadata nor metadata.csv or metadata.jsonl in photos"),
        ("metadata: edits.csv\n  conditioning_columns: [edit]", "data.conditioning_columns: "
         "edits.csv has no column 'edit'; it has file_name,text,before,more"),
        ("metadata: edits.csv\n  conditioning_columns: [more]", "data.conditioning_columns: "
         "cat.png has 2 conditioning images and dog.png has 1"),
    ],
)  # fmt: skip
def test_conditioning_images_that_are_missing_are_found(data: str, sentence: str) -> None:
    """With the line of the key that names them."""
    write_edits()
    error = problems(EDITS.replace("images: photos", f"images: photos\n  {data}"))
    where, _, what = error.what.partition(": line ")
    assert (where, what.partition(": ")[2]) == (str(CONFIG), sentence)


@pytest.mark.parametrize(
    ("pipeline", "data", "takes"),
    [
        ("QwenImageEditPipeline", "conditioning_images: [photos, photos]",
         "takes 1 conditioning image for each sample, and the data has 2"),
        ("QwenImageEditPipeline", "metadata: edits.csv\n  conditioning_columns: [before, before]",
         "takes 1 conditioning image for each sample, and the data has 2"),
        ("QwenImageEditPlusPipeline", "holdout: 0",
         "takes at least 1 conditioning image for each sample, and the data has none"),
        ("QwenImageInpaintPipeline", "conditioning_images: photos",
         "has no input for conditioning images, and the data has 1 for each sample"),
        ("QwenImageEditPipeline", "conditioning_images: photos", None),
        ("QwenImageEditPlusPipeline", "conditioning_images: [photos, photos]", None),
        ("QwenImagePipeline", "conditioning_images: [photos, photos]", None),
        ("QwenImagePipeline", "holdout: 0", None),
    ],
)  # fmt: skip
def test_a_number_that_a_local_base_does_not_take_is_found(
    pipeline: str, data: str, takes: str | None
) -> None:
    """Its model_index.json says what it takes; no model is loaded."""
    write_edits()
    write_base("qwen_image")
    index = json.loads(Path("qwen_image/model_index.json").read_text(encoding="utf-8"))
    Path("qwen_image/model_index.json").write_text(
        json.dumps(index | {"_class_name": pipeline}), encoding="utf-8"
    )
    text = EDITS.replace("base: nano", "base: qwen_image")
    text = text.replace("images: photos", f"images: photos\n  {data}")
    if takes:
        assert problems(text).what == f"{CONFIG}: line 3: base: qwen_image {takes}"
    else:
        CONFIG.write_text(text, encoding="utf-8")
        assert list(read_checked_runs(CONFIG)) == [str(CONFIG)]


@pytest.mark.parametrize("base", ["nano", "qwen_image"])
def test_crops_of_images_that_captions_depend_on_are_found(base: str) -> None:
    """Before a base is built, too."""
    write_edits()
    write_base("qwen_image")
    index = json.loads(Path("qwen_image/model_index.json").read_text(encoding="utf-8"))
    kind = {"_class_name": "QwenImageEditPlusPipeline"}
    Path("qwen_image/model_index.json").write_text(json.dumps(index | kind), encoding="utf-8")
    text = EDITS.replace("base: nano", f"base: {base}").replace(
        "images: photos",
        "images: photos\n  conditioning_images: photos\n"
        "  aspect_buckets: {alignment: 16, crop: random, crop_variants: 2}",
    )
    assert problems(text).what.endswith(
        f"data.aspect_buckets.crop_variants: 2, and the text encoder of base: {base} sees "
        "conditioning images, of which a caption is encoded with one crop"
    )
    CONFIG.write_text(text.replace("crop_variants: 2", "crop_variants: 1"), encoding="utf-8")
    assert list(read_checked_runs(CONFIG)) == [str(CONFIG)]


def write_edits() -> None:
    """A folder with a conditioning image for the cat alone, and a table with columns of them."""
    Path("before").mkdir()
    Image.new("RGB", (8, 8)).save("before/cat.png")
    Path("edits.csv").write_text(
        "file_name,text,before,more\n"
        'cat.png,a cat,dog.png,"[""dog.png"", ""cat.png""]"\n'
        "dog.png,a dog,cat.png,cat.png\n",
        encoding="utf-8",
    )


def check_base_of(text: str, family: str, phase: str = "") -> list[str]:
    """What is wrong with a file of another family, and values of its second phase."""
    kind = FAMILIES[family].modality
    CONFIG.write_text(
        FILE.replace(BASE, f"family: {family}\n{text}").replace(
            "\n    launch: zero2_offload", phase
        )
        if kind == "image"
        else f"run: flowers\nfamily: {family}\n{text}\ndata: {{source: sums}}\n"
        "train: {max_length: 16}\nphases: [{name: plain, until: 3}]\n",
        encoding="utf-8",
    )
    try:
        read_checked_runs(CONFIG)
    except PipelineError as error:
        return [error.what.partition(": ")[2]]
    return []


def test_a_base_without_its_optional_part_is_taken() -> None:
    """SD3 without T5: the index may still list it, and an empty folder may be left of it."""
    write_base("sd3", without=("text_encoder_3", "tokenizer_3"))
    assert check_base_of("base: sd3", "sd3") == []
    Path("sd3/text_encoder_3").mkdir()
    base._problems_of_base.cache_clear()
    assert check_base_of("base: sd3", "sd3") == []


def test_parts_that_the_family_does_not_use_are_not_asked_for() -> None:
    """As build_base, which sets them to null in the index."""
    write_base("sd3", extra=("image_processor",))
    assert check_base_of("base: sd3", "sd3") == []


@pytest.mark.parametrize("part", ["transformer", "vae", "tokenizer_2", "scheduler"])
def test_a_part_that_is_needed_is_missed_at_once(part: str) -> None:
    """By build_base's own words."""
    write_base("sd3", without=(part,))
    (found,) = check_base_of("base: sd3", "sd3")
    assert found.startswith(f"line 3: base: sd3: the part {part} is missing; there is ")


def test_a_base_of_another_family_or_without_weights_is_refused() -> None:
    """From names and model_index.json alone."""
    write_base("flux")
    (found,) = check_base_of("base: flux", "sd3")
    assert found == (
        "line 3: base: flux: model_index.json names CLIPTextModel for text_encoder, family sd3 "
        "needs CLIPTextModelWithProjection"
    )
    Path("flux/transformer/model.safetensors").unlink()
    (found,) = check_base_of("base: flux", "flux")
    assert found.startswith("line 3: base: flux: transformer: no safetensors weights; there is ")


def test_a_language_model_needs_no_class_in_its_config() -> None:
    """The family's class is chosen by model_type, and `architectures` may be missing."""
    write_language_model({"model_type": "llama"}, "model.norm.weight")
    assert check_base_of("base: gpt", "causal_lm") == []


@pytest.mark.parametrize(
    "keys",
    [
        r"trainable_parameters: ['transformer\.h\.1']",
        r"frozen_parameters: ['^transformer\.wte']",
        "lora: {target_modules: [c_attn]}",
    ],
)
def test_names_of_a_language_model_are_those_of_its_class(keys: str) -> None:
    """A file that was saved without the head has other names; the class alone knows its own."""
    config = {"model_type": "gpt2", "architectures": ["GPT2Model"]}
    write_language_model(config, "h.1.attn.c_proj.weight", "wte.weight")
    assert check_base_of(f"base: gpt\n{keys}", "causal_lm") == []


def test_names_of_a_single_file_are_not_those_of_its_layout() -> None:
    """`export --to ldm` writes the names of the original layout; training has diffusers'."""
    Path("sdxl").rename("config-of-ldm")
    Path("ldm").mkdir()
    Path("config-of-ldm").rename("ldm/config")
    write_tensors(Path("ldm/model.safetensors"), *(f"{part}input.weight" for part in PARTS))
    assert check_base_of("base: ldm\nfrozen_parameters: [down_blocks]", "sdxl") == []


@pytest.mark.parametrize(
    ("config", "gone", "added", "sentence"),
    [
        ({"model_type": "llama"}, "model.safetensors", None, "no safetensors weights; there is"),
        ({"model_type": "llama"}, "tokenizer_config.json", None,
         "no tokenizer_config.json, so the tokenizer is missing"),
        ({"model_type": "llama"}, None, "adapter_config.json", "holds an adapter"),
        ({"architectures": ["LlamaForCausalLM"]}, None, None,
         "config.json names no model_type"),
        ([], None, None, "/config.json: holds a list, not keys with values"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_whole_language_model_is_refused(
    config: dict[str, object], gone: str | None, added: str | None, sentence: str
) -> None:
    """Without loading anything."""
    write_language_model(config, "model.norm.weight")
    if gone:
        Path("gpt", gone).unlink()
    if added:
        Path("gpt", added).write_text("{}", encoding="utf-8")
    (found,) = check_base_of("base: gpt", "causal_lm")
    at = "" if sentence.startswith("/") else ": "
    assert found.startswith(f"line 3: base: gpt{at}{sentence}")


SD3 = "stabilityai/stable-diffusion-3-medium-diffusers"


@pytest.mark.parametrize("place", ["sd3", SD3, "made"])
@pytest.mark.parametrize(
    ("resolution", "sentence"),
    [
        (1024, None),
        (3072, None),
        (1032, "is no multiple of 16, which the base divides images into"),
        (3088, "is more than the 3072 pixels a side for which the base has positions"),
    ],
)
def test_a_resolution_that_the_base_cannot_take_is_refused(
    place: str, resolution: int, sentence: str | None
) -> None:
    """Of a local base, of a known hub id, and of a base that has been made already."""
    if place != SD3:
        write_base("sd3")
    if place == "made":
        with artifact.publish(Path("results/flowers/base"), "base") as draft:
            shutil.copytree("sd3", draft.folder, dirs_exist_ok=True)
            draft.content = {"base": "made", "revision": None}
    found = check_base_of(
        f"base: {place}\ncache: {{dtype: fp32}}", "sd3", f"\n    resolution: {resolution}"
    )
    wanted = f"line 14: phase offload: resolution {resolution} {sentence}"
    assert found == ([wanted] if sentence else [])


@pytest.mark.parametrize(
    ("base", "width", "sentence"),
    [
        ("sd3", 3072, None),
        ("sd3", 3088, "3088 is more than the 3072 pixels a side for which the base has positions"),
        ("sd3", 1032, "1032 is no multiple of 16, which the base divides images into"),
        ("nano", 64, None),
        ("nano", 72, "72 is more than the 64 pixels a side for which the base has positions"),
    ],
)
def test_a_grid_that_the_base_cannot_draw_is_refused(
    base: str, width: int, sentence: str | None
) -> None:
    """Before a training whose evaluation would fail."""
    write_base("sd3")
    found = check_base_of(
        f"base: {base}\nevaluate: {{sizes: [[{width}, 64]]}}", "sd3", "\n    resolution: 64"
    )
    assert [one.partition(": ")[2] for one in found] == (
        [f"evaluate.sizes: {width}x64: {sentence}"] if sentence else []
    )


@pytest.mark.parametrize(
    ("base", "end", "layers"),
    [("flux", -2, None), ("flux", 57, 57), ("flux", -58, 57), ("nano", 3, None), ("nano", 4, 4)],
)
def test_token_routes_over_layers_that_the_base_does_not_have_are_refused(
    base: str, end: int, layers: int | None
) -> None:
    """Of a local base and of a preset; layers of both kinds count."""
    write_base("flux")
    route = f"{{selection_ratio: 0.5, start_layer_idx: 2, end_layer_idx: {end}}}"
    found = check_base_of(f"base: {base}", "flux", f"\n    tread_config: {{routes: [{route}]}}")
    wanted = f"line 11: phase offload: tread_config.routes.0.end_layer_idx: {end} is no layer of "
    assert [one[: len(wanted)] for one in found] == ([wanted] if layers else [])


def test_all_problems_are_reported_at_once() -> None:
    """Wrong values, and what they name, in one message; each with its line."""
    text = FILE.replace(BASE, "base: nanoo").replace("photos", "fotos")
    text = text.replace(LAUNCH, "launch: {preset: zero2, zero3_init: true}")
    assert [line.split(": ")[:3] for line in problems(text).what.split("\n")] == [
        [str(CONFIG), "line 2", "base"],
        ["       line 4", "data.images", "fotos"],
        ["       line 12", "phase offload", "launch.zero3_init builds the model in parts, but "
         "under preset zero2 every process holds all of it"],
    ]  # fmt: skip
    text = text.replace("resolution: 64", "resolution: big")
    assert [line.split(": ")[-3:-1] for line in problems(text).what.split("\n")] == [
        ["line 6", "train.resolution"], ["       line 2", "base"], ["data.images", "fotos"],
    ]  # fmt: skip


def test_ends_in_epochs_refuse_nothing_that_follows_from_their_length() -> None:
    """How many steps an epoch has is known when the dataset is; other problems are reported."""
    text = FILE.replace("until: 300", "until: 1 epochs\n    save_every: 500")
    text = text.replace("until: 700", "until: 2000\n    lr_warmup_steps: 1500")
    CONFIG.write_text(text, encoding="utf-8")
    assert read_checked_runs(CONFIG)
    text = text.replace(LAUNCH, "launch: {preset: zero2, zero3_init: true}")
    assert "zero3_init builds the model in parts" in problems(text).what


def test_a_run_that_has_its_base_needs_no_place_for_it() -> None:
    """The folder of the base may be another machine's; the run's own copy is there."""
    CONFIG.write_text(FILE.replace(BASE, "base: /models/gone"), encoding="utf-8")
    with artifact.publish(Path("results/flowers/base"), "base") as draft:
        draft.content = {"base": "/models/gone", "revision": None}
    assert read_checked_runs(CONFIG)
    assert "there is no folder /models/lost" in problems(
        FILE.replace(BASE, "base: /models/lost")
    ).what  # fmt: skip


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("report_to: [aim]", "report_to: aim is not installed"),
        ("optimizer: adamw8bit", "phase offload: optimizer adamw8bit needs bitsandbytes"),
    ],
)
def test_what_a_training_needs_is_not_asked_for_once_it_is_over(
    monkeypatch: pytest.MonkeyPatch, value: str, sentence: str
) -> None:
    """Weights that another machine trained are exported and evaluated on this one."""
    present = importlib.util.find_spec
    absent = ("aim", "bitsandbytes")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else present(name)
    )
    text = FILE.replace("  - name: offload", f"  - name: offload\n    {value}")
    text = text.replace("    launch: zero2_offload\n", "    allow: [moments]\n")
    assert sentence in problems(text).what
    with artifact.publish(Path("results/flowers/offload/checkpoint"), "checkpoint"):
        pass
    CONFIG.write_text(text, encoding="utf-8")
    assert read_checked_runs(CONFIG)


@pytest.mark.parametrize(
    ("first", "second", "allow", "loss"),
    [
        ("optimizer: sgd", "optimizer: sgd", "", ""),
        ("optimizer: adam", "optimizer: adamw", "", ""),
        ("optimizer: adamw", "optimizer: sgd", "[moments]", ""),
        ("use_ema: true", "use_ema: false", "", "the state has averaged weights (ema)"),
        ("use_ema: true", "use_ema: false", "[ema]", ""),
        ("launch: {preset: zero2, mixed_precision: fp16}", "launch: zero2", "",
         "the state's fp16 loss scale"),
        ("launch: {preset: zero2, mixed_precision: fp16}", "launch: zero2", "[loss_scale]", ""),
    ],
)  # fmt: skip
def test_a_switch_that_loses_something_is_refused_before_the_first_phase_trains(
    first: str, second: str, allow: str, loss: str
) -> None:
    """By the rule that the training applies when the second phase starts."""
    CONFIG.write_text(
        f"""run: flowers
base: nano
data: {{images: photos}}
train: {{resolution: 64}}
phases:
  - {{name: one, until: 10, {first}}}
  - {{name: two, until: 20, {second}, allow: {allow or []}}}
""",
        encoding="utf-8",
    )
    if not loss:
        assert read_checked_runs(CONFIG)
        return
    assert f"line 7: phase two: {loss}" in problems(CONFIG.read_text(encoding="utf-8")).what
