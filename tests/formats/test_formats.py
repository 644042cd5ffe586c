"""Formats: what was trained is what each program's own loader gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import load_file, save_file
from tests.builders.adapters import difference, make_adapted, write_adapter
from tests.builders.images import draw_house
from tests.builders.runs import make_run
from tests.formats.conftest import (
    ADAPTER,
    FORMATS,
    OF_ADAPTERS,
    OF_WHOLE,
    header,
    pipeline_of,
    published,
    tensors_below,
)

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.export.formats import kohya, ldm
from zerotrain.export.formats.opening import open_pipeline
from zerotrain.export.formats.original import UNET, unet_names
from zerotrain.models.adapter_config import METADATA
from zerotrain.models.families.lora import ADAPTER as LORA_FILE
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.stages.build_base import BuildSettings, build_base

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_single_file_in_the_original_layout_gives_the_same_pipeline(whole, tmp_path, dtype):
    """diffusers' from_single_file, offline: every tensor of every part, and the image."""
    convert(whole, "ldm", tmp_path / "out", dtype=dtype)
    loaded = StableDiffusionXLPipeline.from_single_file(
        str(tmp_path / "out" / "model.safetensors"),
        config=str(tmp_path / "out" / "config"),
        local_files_only=True,
        dtype=DTYPES[dtype],
        add_watermarker=False,
    )
    original = StableDiffusionXLPipeline.from_pretrained(
        whole, dtype=DTYPES[dtype], add_watermarker=False
    )
    for part in FAMILY.spec.classes:
        expected = getattr(original, part).state_dict()
        found = getattr(loaded, part).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert {t.dtype for t in found.values()} == {DTYPES[dtype]}
    if dtype == "fp32":
        assert draw_house(loaded) == draw_house(original)


def test_libraries_that_verify_an_export_show_neither_bars_nor_warnings(whole, tmp_path, capsys):
    """diffusers loads the whole pipeline for that, and has much to say."""
    convert(whole, "ldm", tmp_path / "out")
    assert capsys.readouterr().err == ""


def test_the_original_layout_says_what_the_model_predicts(whole, tmp_path):
    """ComfyUI and A1111 look for these names; modelspec for those that sort files."""
    convert(whole, "ldm", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["v_pred"].numel() == 0
    assert "ztsnr" not in tensors
    assert tensors["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (32, 32, 1, 1)
    assert tensors["conditioner.embedders.1.model.text_projection"].shape == (80, 64)
    said = header(tmp_path / "out" / "model.safetensors")
    assert said["modelspec.architecture"] == "stable-diffusion-xl-v1-base"
    assert said["modelspec.prediction_type"] == "v"
    assert said["modelspec.resolution"] == "16x16"


def test_the_real_architecture_has_the_original_names():
    """All 1680 tensors of SDXL's U-Net go there and come back, and some well-known names."""
    parts = json.loads(Path("config/models/sdxl.json").read_text(encoding="utf-8"))["parts"]
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(parts["unet"]["config"])
    name_of = unet_names(unet.config)
    original = {UNET + name_of(name): tensor for name, tensor in unet.state_dict().items()}
    assert len(original) == 1680
    assert {
        UNET + "input_blocks.8.1.transformer_blocks.9.attn2.to_k.weight",
        UNET + "input_blocks.6.0.op.weight",
        UNET + "output_blocks.2.2.conv.weight",
        UNET + "middle_block.1.transformer_blocks.0.attn1.to_q.weight",
        UNET + "label_emb.0.0.weight",
    } <= original.keys()
    back = convert_ldm_unet_checkpoint(dict(original), unet.config)
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape for name, tensor in unet.state_dict().items()
    }


@pytest.mark.parametrize("prefix", ["", "pipe.dit.", "model.diffusion_model."])
def test_a_prefix_is_kept_or_removed(whole, tmp_path, prefix):
    convert(whole, "single_file", tmp_path / "out", prefix=prefix)
    path = tmp_path / "out" / "model.safetensors"
    expected = tensors_below(whole / "unet")
    found = load_file(path)
    assert found.keys() == {prefix + name for name in expected}
    assert all(torch.equal(found[prefix + name], expected[name]) for name in expected)
    if not prefix:
        config = str(whole)
        unet = UNet2DConditionModel.from_single_file(
            str(path), config=config, subfolder="unet", local_files_only=True
        )
        assert difference(unet, FAMILY.load_model(whole)) == 0.0


def test_a_folder_in_shards_is_the_same_model(whole, tmp_path):
    """In another type and several files; parts that were not trained are not copied."""
    convert(whole, "diffusers", tmp_path / "out", dtype="bf16", max_shard_size="1MB")
    files = sorted(path.name for path in (tmp_path / "out" / "unet").glob("*.safetensors"))
    assert len(files) > 2
    assert {t.dtype for t in tensors_below(tmp_path / "out" / "unet").values()} == {torch.bfloat16}
    unet = FAMILY.load_model(tmp_path / "out", torch.bfloat16)
    expected = FAMILY.load_model(whole).bfloat16().state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in unet.state_dict().items())
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "out" / vae).stat().st_ino == (whole / vae).stat().st_ino
    assert artifact.read(tmp_path / "out", "weights").content["dtype"] == "bf16"


@pytest.mark.slow
def test_merged_weights_are_those_that_the_library_merges(lora, trained, tmp_path):
    """Bit by bit what diffusers' fuse_lora leaves; the model's answer stays, to rounding."""
    convert(lora, "merged", tmp_path / "out")
    fused = FAMILY.load_trained(lora)
    fused.fuse_lora()
    fused.unload_lora()
    unet = FAMILY.load_model(tmp_path / "out").eval()
    expected = fused.state_dict()
    assert unet.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in unet.state_dict().items())
    assert difference(unet, fused) == 0.0
    assert difference(unet, trained) < 1e-5
    assert difference(unet, FAMILY.load_model(lora).eval()) > 0.01
    assert not (tmp_path / "out" / LORA_FILE).exists()


def test_merged_weights_are_the_base_of_another_run(lora, tmp_path):
    """As of DiffSynth-Studio's differential training, which is imported so."""
    convert(lora, "merged", tmp_path / "merged", dtype="bf16")
    raw = make_run(run="second", base=str(tmp_path / "merged"), data={"images": "-"}, lora={})
    build_base(BuildSettings.of(parse_config(raw, "test")), None, tmp_path / "base")
    assert artifact.read(tmp_path / "base", "base").content["base"] == raw["base"]
    found = FAMILY.load_model(tmp_path / "base").state_dict()
    fused = FAMILY.load_model(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, fused[name]) for name, tensor in found.items())


def test_merged_weights_convert_to_any_other_format(lora, tmp_path):
    """As the refusal of the original layout says."""
    with pytest.raises(PipelineError, match=r"--to ldm: .* holds an adapter") as refused:
        convert(lora, "ldm", tmp_path / "out")
    assert f"zerotrain export {lora} --to merged --output MERGED" in refused.value.hint
    convert(lora, "merged", tmp_path / "merged")
    convert(tmp_path / "merged", "ldm", tmp_path / "out", dtype="fp16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[UNET + "input_blocks.0.0.weight"].dtype == torch.float16


@pytest.mark.parametrize("form", ["diffusers_lora", "kohya"])
def test_a_pipeline_loads_the_lora_that_was_trained(lora, base, trained, tmp_path, form):
    """By load_lora_weights; alpha is not rank, and convolutions are among its layers."""
    convert(lora, form, tmp_path / "out")
    pipeline = pipeline_of(base)
    assert difference(pipeline.unet, trained) > 0.01
    pipeline.load_lora_weights(tmp_path / "out")
    assert difference(pipeline.unet, trained) <= 1e-6
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == [
        {"diffusers_lora": LORA_FILE, "kohya": "lora.safetensors"}[form]
    ]


def test_peft_loads_the_adapter_that_was_trained(lora, base, trained, tmp_path):
    from peft import PeftModel

    convert(lora, "peft", tmp_path / "out")
    model = PeftModel.from_pretrained(FAMILY.load_model(base), str(tmp_path / "out")).eval()
    assert difference(model, trained) <= 1e-6
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (ADAPTER["rank"], ADAPTER["alpha"])
    assert config["target_modules"] == sorted(ADAPTER["target_modules"])


@pytest.mark.parametrize("prefix", ["", "pipe.dit."])
def test_an_adapter_in_a_single_file_keeps_its_alpha(lora, base, trained, tmp_path, prefix):
    convert(lora, "single_file", tmp_path / "out", prefix=prefix)
    unet = FAMILY.load_model(base).eval()
    unet.load_lora_adapter(
        str(tmp_path / "out"),
        weight_name="model.safetensors",
        prefix=prefix.removesuffix(".") or None,
    )
    assert difference(unet, trained) <= 1e-6


RSLORA, PATTERN = {"use_rslora": True}, {"alpha_pattern": {"to_q": 1.0}}


def set_otherwise(lora: Path, base: Path, folder: Path, setting: dict[str, object]) -> Path:
    """Weights of the same LoRA, scaled by other settings."""
    said = json.loads(header(lora / LORA_FILE)[METADATA])
    said |= {f"unet.{key}": value for key, value in setting.items()}
    (folder / "adapter").mkdir()
    changed = folder / "adapter" / LORA_FILE
    save_file(load_file(lora / LORA_FILE), changed, metadata={METADATA: json.dumps(said)})
    return published(base, folder / "weights", folder / "adapter")


@pytest.mark.parametrize(
    ("form", "setting"),
    [("diffusers_lora", PATTERN), ("kohya", RSLORA), ("kohya", PATTERN), ("single_file", RSLORA)],
)
def test_layers_are_scaled_as_peft_scales_them(lora, base, tmp_path, form, setting):
    """By rsLoRA alpha / sqrt(rank), by a pattern each layer in its own way."""
    source = set_otherwise(lora, base, tmp_path, setting)
    expected = FAMILY.load_trained(source)
    assert difference(expected, FAMILY.load_trained(lora)) > 0.001
    if form == "kohya" and "alpha_pattern" in setting:
        with pytest.raises(PipelineError, match=r"several alphas, 1 to 6, and diffusers would"):
            convert(source, form, tmp_path / "out")
        return
    convert(source, form, tmp_path / "out")
    _, pipeline = open_pipeline(tmp_path / "out", base, "cpu")
    assert difference(pipeline.unet.eval(), expected) <= 1e-6


@pytest.mark.parametrize("setting", [RSLORA, PATTERN], ids=lambda one: next(iter(one)))
def test_a_single_file_is_right_without_its_header(lora, base, tmp_path, setting):
    """DiffSynth-Studio adds lora_B @ lora_A to a layer's weight as they are, and reads no alpha."""
    source = set_otherwise(lora, base, tmp_path, setting)
    convert(source, "single_file", tmp_path / "out")
    convert(source, "merged", tmp_path / "merged")
    factors = load_file(tmp_path / "out" / "model.safetensors")
    before, after = (tensors_below(folder / "unet") for folder in (base, tmp_path / "merged"))
    layers = [n.removesuffix(".lora_B.weight") for n in factors if n.endswith(".lora_B.weight")]
    for layer in layers:
        first, second = (factors[f"{layer}.lora_{letter}.weight"] for letter in "AB")
        added = (second.flatten(1) @ first.flatten(1)).view_as(before[f"{layer}.weight"])
        torch.testing.assert_close(before[f"{layer}.weight"] + added, after[f"{layer}.weight"])
    assert len(layers) > 20


@pytest.fixture(scope="module")
def dora(base, tmp_path_factory) -> Path:
    """Weights of a DoRA, whose magnitudes were trained too."""
    folder = tmp_path_factory.mktemp("dora")
    unet = make_adapted(base, **ADAPTER, use_dora=True)
    for name, parameter in unet.named_parameters():
        if ".lora_magnitude_vector." in name:
            parameter.data *= torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter)
    write_adapter(base, unet, folder / "adapter", **ADAPTER, use_dora=True)
    return published(base, folder / "dora", folder / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diffusers", "diffusers_lora", "single_file", "peft", "merged"])
def test_a_dora_is_the_one_that_was_trained_in_each_format(dora, lora, base, tmp_path, form):
    """Its magnitudes included."""
    convert(dora, form, tmp_path / "out")
    whole = FORMATS[form].pipeline
    _, pipeline = open_pipeline(tmp_path / "out", None if whole else base, "cpu")
    trained = FAMILY.load_trained(dora)
    apart = difference(pipeline.unet.eval(), trained)
    print(f"{form}: {apart:.1e}")
    assert apart <= 1e-6
    assert difference(trained, FAMILY.load_trained(lora)) > 0.01


def test_a_dora_is_refused_where_it_would_be_another(dora, tmp_path):
    """ComfyUI's weight_decompose divides by the base's norm, peft by that of the sum."""
    with pytest.raises(PipelineError, match="DoRA there is another function: ComfyUI") as refused:
        convert(dora, "kohya", tmp_path / "out")
    assert "--to merged" in refused.value.hint


def test_a_kohya_file_says_what_it_is(lora, tmp_path):
    """sgm's names, each layer's alpha, and the keys by which programs sort and show files."""
    convert(lora, "kohya", tmp_path / "out", dtype="fp16")
    tensors = load_file(tmp_path / "out" / "lora.safetensors")
    layer = "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q"
    assert tensors[f"{layer}.lora_down.weight"].shape == (4, 96)
    assert tensors[f"{layer}.lora_up.weight"].dtype == torch.float16
    assert tensors[f"{layer}.alpha"] == 6.0
    assert "lora_unet_middle_block_0_in_layers_2.lora_down.weight" in tensors
    said = header(tmp_path / "out" / "lora.safetensors")
    assert said["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert (said["ss_network_dim"], said["ss_network_alpha"]) == ("4", "6.0")
    assert said["modelspec.title"] == "houses, step 12"


@pytest.mark.parametrize("form", FORMATS)
def test_files_lead_back_to_the_run_and_are_the_same_again(whole, lora, base, tmp_path, form):
    """Byte for byte, with the digests of the weights and of their base in the header."""
    source = lora if FORMATS[form].adapter else whole
    for name in ("one", "two"):
        convert(source, form, tmp_path / name)
    files = {
        p.relative_to(tmp_path / "one")
        for p in (tmp_path / "one").rglob("*.*")
        if p.name != "manifest.json" and p.is_file()
    }
    assert files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    kind = "weights" if FORMATS[form].pipeline else "exported"
    published = artifact.read(tmp_path / "one", kind)
    assert published.parents["weights"]["path"] == str(source)
    own = tmp_path / "one" / ("unet" if FORMATS[form].pipeline else "")
    said = header(next(iter(own.glob("*.safetensors"))))
    assert said["zerotrain.weights"] == artifact.read(source, "weights").identity
    assert said["zerotrain.base"] == artifact.read(base, "base").identity
    assert (said["zerotrain.run"], said["zerotrain.step"]) == ("houses", "12")


@pytest.mark.parametrize("form", [n for n in FORMATS if FORMATS[n].adapter is not False])
def test_an_adapter_that_does_nothing_is_refused(lora, base, tmp_path, form):
    """Whatever wrote it, and nothing is published."""
    for name, change in {"does nothing": torch.zeros_like, "is empty": None}.items():
        folder = tmp_path / name.replace(" ", "-")
        tensors = load_file(lora / LORA_FILE)
        kept = {n: change(t) for n, t in tensors.items()} if change else {}
        folder.mkdir()
        save_file(kept, folder / LORA_FILE, metadata=header(lora / LORA_FILE))
        source = published(base, tmp_path / f"weights-{folder.name}", folder)
        with pytest.raises(PipelineError, match=f"the adapter {name}"):
            convert(source, form, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", OF_ADAPTERS)
def test_a_whole_model_has_no_format_of_adapters(whole, tmp_path, form):
    with pytest.raises(PipelineError, match=f"--to {form}: .* holds a whole model, no") as refused:
        convert(whole, form, tmp_path / "out")
    assert refused.value.hint == "choose one of " + ", ".join(OF_WHOLE)


def test_a_family_without_a_table_of_names_is_refused(whole, lora, tmp_path, monkeypatch):
    """With those that have one, and the formats that need none."""
    monkeypatch.setattr(ldm, "LAYOUTS", {"other": None})
    monkeypatch.setattr(kohya, "SLOTS", {"other": None})
    for source, form, instead in ((whole, "ldm", "single_file"), (lora, "kohya", "peft")):
        with pytest.raises(PipelineError, match=f"--to {form}: .*sdxl (has no|are not)") as no:
            convert(source, form, tmp_path / "out")
        assert "other" in no.value.hint
        assert instead in no.value.hint


@pytest.mark.parametrize(
    ("of", "to", "given", "message"),
    [
        ("whole", "ldm", {"max_shard_size": "1GB"}, "--max-shard-size: ldm is one file"),
        ("lora", "diffusers", {"max_shard_size": "1GB"}, "--max-shard-size: the adapter is one"),
        ("whole", "diffusers", {"max_shard_size": "5gigs"}, "--max-shard-size: '5gigs' is no size"),
        ("lora", "merged", {"max_shard_size": "0GB"}, "--max-shard-size: '0GB' is no size"),
        ("whole", "diffusers", {"max_shard_size": "0.0001KB"}, "'0.0001KB' is no size"),
        ("whole", "diffusers", {"prefix": "x."}, "--prefix: the names of diffusers are its own"),
        ("whole", "single_file", {"prefix": "pipe.dit"}, "--prefix: 'pipe.dit' ends in no dot"),
    ],
)
def test_options_that_a_format_cannot_have_are_refused(request, tmp_path, of, to, given, message):
    """Before anything is written."""
    with pytest.raises(PipelineError, match=message):
        convert(request.getfixturevalue(of), to, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["diffusers", "single_file", "ldm"])
def test_values_too_large_for_a_type_are_named(base, tmp_path, form):
    """fp16 ends at 65504; bf16 takes them."""
    source = published(base, tmp_path / "weights")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["conv_in.bias"][:2] = 70000.0
    listed = json.loads((source / "manifest.json").read_text())
    save_file(tensors, path)
    listed["files"]["unet/diffusion_pytorch_model.safetensors"] = {
        "sha256": artifact.file_sha256(path),
        "bytes": path.stat().st_size,
    }
    (source / "manifest.json").write_text(json.dumps(listed))
    name = "input_blocks.0.0.bias" if form == "ldm" else "conv_in.bias"
    with pytest.raises(PipelineError, match=f"{name}: 2 values are not finite in torch.float16"):
        convert(source, form, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    convert(source, form, tmp_path / "out", dtype="bf16")


def test_a_wrong_name_would_be_found_before_anything_is_published(
    whole, lora, tmp_path, monkeypatch
):
    """The real loader is asked: a tensor left out, an alpha that is not the true one."""
    layout = dict(ldm.LAYOUTS)["sdxl"]

    def wrong(weights):
        tensors = layout.tensors(weights)
        name = UNET + "out.2.bias"
        tensors[UNET + "out.3.bias"] = tensors.pop(name)
        return tensors

    monkeypatch.setattr(ldm, "LAYOUTS", {"sdxl": replace(layout, tensors=wrong)})
    with pytest.raises(PipelineError):
        convert(whole, "ldm", tmp_path / "out")
    monkeypatch.setattr(
        "zerotrain.export.formats.kohya._alpha",
        lambda weights, layer: 4.0,
    )
    with pytest.raises(PipelineError, match=r"is scaled by 1 instead of 1\.5"):
        convert(lora, "kohya", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_encoders_of_one_width_cannot_be_distinguished(base, tmp_path):
    """from_single_file would load the first one twice."""
    source = published(base, tmp_path / "weights")
    path = source / "text_encoder_2" / "config.json"
    config = json.loads(path.read_text()) | {"hidden_size": 48}
    path.write_text(json.dumps(config))
    listed = json.loads((source / "manifest.json").read_text())
    listed["files"]["text_encoder_2/config.json"] = {
        "sha256": artifact.file_sha256(path),
        "bytes": path.stat().st_size,
    }
    (source / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(PipelineError, match=r"both text encoders of .* are 48 wide"):
        convert(source, "ldm", tmp_path / "out")
