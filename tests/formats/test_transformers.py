"""SD3, Flux and Qwen-Image: their original layouts, and kohya's LoRA, as diffusers reads them."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils, lora_pipeline, single_file_model
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
)
from safetensors.torch import load_file
from tests.builders.images import publish_nano
from tests.families.promises import batch_of, prediction
from tests.formats.conftest import header, published, tensors_below

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.export.formats import Options, kohya, ldm
from zerotrain.export.formats.opening import open_pipeline
from zerotrain.export.formats.original import flux_slot, sd3_slots, to_original_layout
from zerotrain.export.formats.tensors import LazyTensor
from zerotrain.export.formats.weights import Adapter, ExportedWeights, base_name
from zerotrain.export.publish import Origin, model_card
from zerotrain.models.families import load_family
from zerotrain.models.families.lora import add_adapter, save_adapter

FAMILIES = ("sd3", "flux", "qwen_image")
FILL = "FluxFillPipeline"
"""The pipeline of a base of flux with conditioning images."""
NANO_WIDTH = 128
"""Of the nano Flux; diffusers' conversions know 3072 alone."""
TARGETS = {
    "sd3": ("to_q", "to_v", "add_k_proj", "to_add_out", "norm1_context.linear", "proj_out"),
    "flux": ("to_q", "to_v", "add_k_proj", "ff.net.2", "proj_mlp", "norm.linear"),
    "qwen_image": ("to_q", "to_out.0", "add_k_proj", "img_mlp.net.0.proj", "img_mod.1", "img_in"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's nano model as weights, and next to it its base and a LoRA of it."""
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name in known:
            return known[name]
        folder = known[name] = tmp_path_factory.mktemp(name)
        chosen = {"pipeline": name} if name == FILL else {}
        name = "flux" if chosen else name
        publish_nano(name, folder / "base", **chosen)
        published(folder / "base", folder / "whole", family=name)
        lora(folder, name, TARGETS[name])
        return folder

    return make


def lora(folder: Path, name: str, targets: tuple[str, ...], **options: Any) -> Path:
    """Weights of a LoRA whose alpha is not its rank, all of whose factors are random."""
    family = load_family(name)
    settings = {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": targets, **options}
    model = family.load_model(folder / "base")
    add_adapter(model, seed=0, **settings)
    draw = torch.Generator().manual_seed(1)
    tensors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for parameter in tensors.values():
        parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    shapes = {n: list(t.shape) for n, t in tensors.items()}
    out = folder / "adapter"
    shutil.rmtree(out, ignore_errors=True)
    save_adapter(
        family, folder / "base", shapes, tensors.__getitem__, settings, dtype=torch.float32, out=out
    )
    return published(folder / "base", folder / "lora", out, name)


@pytest.fixture
def nano_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' own conversions of Flux with the one number that they have of its width changed,
    and the refusal that stands before them."""
    changes = {
        lora_conversion_utils._convert_kohya_flux_lora_to_diffusers: {
            "[3072, 3072, 3072, 12288]": f"[{NANO_WIDTH}] * 3 + [{4 * NANO_WIDTH}]"
        },
        convert_flux_transformer_checkpoint_to_diffusers: {"= 3072": f"= {NANO_WIDTH}"},
    }
    for function, words in changes.items():
        source = inspect.getsource(function)
        for word, new in words.items():
            assert source.count(word) == 1
            source = source.replace(word, new)
        exec(source, (names := dict(inspect.getmodule(function).__dict__)))
        replaced = names[function.__name__]
        if "kohya" in function.__name__:
            monkeypatch.setattr(lora_pipeline, function.__name__, replaced)
        else:
            classes = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
            flux = classes["FluxTransformer2DModel"] | {"checkpoint_mapping_fn": replaced}
            monkeypatch.setitem(classes, "FluxTransformer2DModel", flux)
    monkeypatch.setattr("zerotrain.export.formats.ldm.FLUX_WIDTH", NANO_WIDTH)
    monkeypatch.setattr("zerotrain.export.formats.kohya.FLUX_WIDTH", NANO_WIDTH)


def answer(name: str, folder: Path, model: torch.nn.Module) -> torch.Tensor:
    """The velocities that a model gives for fixed inputs."""
    family = load_family(name)
    batch = batch_of(family, folder, ["a red house", "a blue house"])
    found: torch.Tensor = prediction(family, folder, model.eval(), batch)
    return found


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_the_real_architectures_have_the_original_names(name):
    """Every tensor of SD3 and Flux goes there, and by diffusers' own conversion comes back."""
    recipe = {"sd3": "sd3-medium", "flux": "flux-dev"}[name]
    config = json.loads(Path(f"config/models/{recipe}.json").read_text(encoding="utf-8"))
    kind = getattr(diffusers, load_family(name).spec.classes["transformer"])
    with torch.device("meta"):
        model = kind.from_config(config["parts"]["transformer"]["config"])
    state = model.state_dict()
    slot_of = sd3_slots(model.config) if name == "sd3" else flux_slot
    stored = {n: held(t) for n, t in state.items()}
    original = {n: t.read() for n, t in to_original_layout(stored, slot_of).items()}
    known = {
        "sd3": {
            "pos_embed": (1, 36864, 1536),
            "joint_blocks.23.context_block.adaLN_modulation.1.weight": (3072, 1536),
            "joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536),
        },
        "flux": {
            "guidance_in.in_layer.weight": (3072, 256),
            "double_blocks.18.txt_attn.norm.key_norm.scale": (128,),
            "single_blocks.37.linear1.weight": (21504, 3072),
        },
    }[name]
    assert {n: tuple(original[n].shape) for n in known} == known
    assert len(original) == {"sd3": 491, "flux": 780}[name]
    back = {
        "sd3": convert_sd3_transformer_checkpoint_to_diffusers,
        "flux": convert_flux_transformer_checkpoint_to_diffusers,
    }[name](dict(original))
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in state.items()}


@pytest.mark.usefixtures("nano_width")
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_the_original_layout_gives_the_same_model(made, tmp_path, name):
    """from_single_file of the real class: equal tensors, equal outputs."""
    whole = made(name) / "whole"
    convert(whole, "ldm", tmp_path / "out")
    loaded = ldm.load_parts(
        load_family(name), tmp_path / "out" / "model.safetensors", whole, torch.float32
    )
    assert set(loaded) == {"sd3": {"transformer", "vae"}, "flux": {"transformer"}}[name]
    for part, model in loaded.items():
        expected = tensors_below(whole / part)
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
    said = header(tmp_path / "out" / "model.safetensors")
    assert said["modelspec.architecture"] == {
        "sd3": "stable-diffusion-3-medium", "flux": "flux-1-schnell"
    }[name]  # fmt: skip
    assert "modelspec.prediction_type" not in said
    family, pipeline = open_pipeline(tmp_path / "out", made(name) / "base", "cpu")
    assert family.name == name
    own = pipeline.transformer.state_dict()
    assert all(torch.equal(t, own[n]) for n, t in loaded["transformer"].state_dict().items())


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("sd3", {}, "stable-diffusion-3-medium"),
        ("sd3", {"qk_norm": "rms_norm"}, "stable-diffusion-3-5-large"),
        (
            "sd3",
            {"qk_norm": "rms_norm", "dual_attention_layers": [0, 1]},
            "stable-diffusion-3-5-medium",
        ),
        ("flux", {"guidance_embeds": True}, "flux-1-dev"),
        ("flux", {"guidance_embeds": False}, "flux-1-schnell"),
        ("qwen_image", {"guidance_embeds": False}, "qwen-image"),
    ],
)
def test_a_header_names_the_base(name, config, expected):
    """As sd-scripts does: of one family by what the transformer has."""
    assert base_name(name, config) == expected


@pytest.mark.usefixtures("nano_width")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_kohya_file_is_the_lora_that_was_trained(made, tmp_path, name):
    """As diffusers loads it, within 1e-5: joined layers, the true alpha, and of SD3 the halves that
    change places."""
    folder = made(name)
    convert(folder / "lora", "kohya", tmp_path / "out")
    _, pipeline = open_pipeline(tmp_path / "out", folder / "base", "cpu")
    family = load_family(name)
    trained = answer(name, folder / "lora", family.load_trained(folder / "lora"))
    base = answer(name, folder / "lora", family.load_model(folder / "base"))
    apart = (answer(name, folder / "lora", pipeline.transformer) - trained).abs().max()
    print(f"{name}: {apart:.1e} of {(base - trained).abs().max():.1e}")
    assert apart <= 1e-5
    assert (base - trained).abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("nano_width")
def test_a_base_of_flux_with_conditioning_images_has_every_format(made, tmp_path):
    """The original layout gives back every tensor; of a LoRA each form answers as the trained
    model does, and diffusers loads both by the class that the folder names."""
    folder = made(FILL)
    convert(folder / "whole", "ldm", tmp_path / "ldm")
    _, opened = open_pipeline(tmp_path / "ldm", folder / "base", "cpu")
    expected = tensors_below(folder / "whole" / "transformer")
    assert opened.transformer.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[n]) for n, t in opened.transformer.state_dict().items())

    trained = conditioned_answer(folder, load_family("flux").load_trained(folder / "lora"))
    assert (trained - conditioned_answer(folder, opened.transformer)).abs().max() > 0.05
    for form in ("kohya", "peft", "diffusers_lora"):
        convert(folder / "lora", form, tmp_path / form)
        _, opened = open_pipeline(tmp_path / form, folder / "base", "cpu")
        apart = (conditioned_answer(folder, opened.transformer) - trained).abs().max()
        assert apart <= 1e-5, form
    whole = diffusers.DiffusionPipeline.from_pretrained(folder / "lora")
    assert type(whole).__name__ == FILL
    whole.load_lora_weights(folder / "lora")
    assert torch.equal(conditioned_answer(folder, whole.transformer), trained)


def conditioned_answer(folder: Path, model: torch.nn.Module) -> torch.Tensor:
    """The velocities that a Flux gives for fixed inputs with two conditioning images each."""
    family: Any = load_family("flux")
    batch = batch_of(family, folder / "base", ["a red house", "a blue house"])
    pixels = torch.rand(2, 2, 3, 16, 16, generator=torch.Generator().manual_seed(4)) * 2 - 1
    batch |= family.load_encoders(folder / "base", "cpu").encode_conditioning(pixels)
    found: torch.Tensor = prediction(family, folder / "base", model.eval(), batch)
    return found


@pytest.mark.usefixtures("nano_width")
@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("sd3", "lora_unet_joint_blocks_0_x_block_attn_qkv", (384, 12)),
        ("flux", "lora_unet_single_blocks_0_linear1", (896, 16)),
        ("qwen_image", "lora_unet_transformer_blocks_0_attn_to_q", None),
    ],
)
def test_a_kohya_file_says_what_it_is(made, tmp_path, name, layer, shape):
    """Joined layers have one block-diagonal LoRA of as many ranks, and the alpha to it."""
    convert(made(name) / "lora", "kohya", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "lora.safetensors")
    up, alpha = tensors[f"{layer}.lora_up.weight"], tensors[f"{layer}.alpha"]
    if shape:
        assert up.shape == shape
        assert not up[:NANO_WIDTH, 4:].any()
        assert up[:NANO_WIDTH, :4].any()
    assert alpha / up.shape[1] == 1.5
    said = header(tmp_path / "out" / "lora.safetensors")
    assert said["modelspec.architecture"].endswith("/lora")
    assert (
        said["ss_network_module"]
        == {
            "sd3": "networks.lora_sd3",
            "flux": "networks.lora_flux",
            "qwen_image": "networks.lora_qwen_image",
        }[name]
    )
    assert (said["ss_network_dim"], said["ss_network_alpha"]) == ("4", "6.0")
    assert said["zerotrain.weights"] == artifact.read(made(name) / "lora", "weights").identity


def test_what_diffusers_would_not_read_is_refused(made, tmp_path):
    """With the reason; nothing is published."""
    refused = {
        "ldm": ("whole", "128 wide, .* the original layout only at Flux's own width 3072"),
        "kohya": ("lora", "128 wide, .* reads such a layer only at Flux's own width 3072"),
    }
    for form, (source, message) in refused.items():
        with pytest.raises(PipelineError, match=message):
            convert(made("flux") / source, form, tmp_path / "out")
    with pytest.raises(PipelineError, match="qwen_image has no layout of its own") as no:
        convert(made("qwen_image") / "whole", "ldm", tmp_path / "out")
    assert "ComfyUI opens the single_file of qwen_image" in no.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nano_width")
@pytest.mark.parametrize("layer", ["x_embedder", "norm_out.linear"])
def test_layers_of_flux_that_diffusers_leaves_out_are_refused(made, tmp_path, layer):
    """Those before and after the blocks: it drops the one's factors, and the other's alpha."""
    (tmp_path / "flux").mkdir()
    shutil.copytree(made("flux") / "base", tmp_path / "flux" / "base")
    source = lora(tmp_path / "flux", "flux", ("to_q", layer))
    with pytest.raises(PipelineError, match=f"of Flux's {layer} diffusers reads no LoRA"):
        convert(source, "kohya", tmp_path / "out")


def test_the_card_of_a_transformer_says_how_to_load_it(made, tmp_path):
    """The rest of its pipeline comes from the base; the code runs."""
    folder = made("sd3")
    convert(folder / "whole", "ldm", tmp_path / "out")
    convert(folder / "lora", "kohya", tmp_path / "kohya")
    origin = Origin(base="nano")
    card = model_card(artifact.read(tmp_path / "out", "exported"), "me/cats", origin, None, [])
    call = 'hf_hub_download("me/cats", "model.safetensors")'
    code = card.split("```python\n")[1].split("```")[0]
    assert call in code
    scope: dict[str, Any] = {}
    code = code.replace("BASE", str(folder / "base"))
    exec(code.replace(call, repr(str(tmp_path / "out" / "model.safetensors"))), scope)
    expected = tensors_below(folder / "whole" / "transformer")
    found = scope["pipeline"].transformer.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    card = model_card(artifact.read(tmp_path / "kohya", "exported"), "me/cats", origin, None, [])
    assert "diffusers reads no LoRA of SD3 with kohya's names" in card


class RealFlux(ExportedWeights):
    """A LoRA of FLUX.1 dev itself, whose base is known by its shapes alone."""

    def __init__(self, folder: Path) -> None:
        recipe = json.loads(Path("config/models/flux-dev.json").read_text(encoding="utf-8"))[
            "parts"
        ]
        self.configs = {part: recipe[part]["config"] for part in ("transformer", "vae")}
        self.configs["scheduler"] = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
        for part, config in self.configs.items():
            (folder / part).mkdir(parents=True)
            (folder / part / "config.json").write_text(json.dumps(config))
        self.family, self.part, self.folder = load_family("flux"), "transformer", folder
        model = self.family.empty_model(folder)
        draw = torch.Generator().manual_seed(0)
        factors = {}
        for name, module in model.named_modules():
            if name.endswith((".to_q", ".to_k", ".add_v_proj", ".to_out.0", ".proj_mlp")):
                rows, columns = module.weight.shape
                for letter, shape in (("A", (2, columns)), ("B", (rows, 2))):
                    factor = torch.randn(shape, generator=draw)
                    factors[f"{name}.lora_{letter}.weight"] = held(factor)
        targets = ["to_q", "to_k", "add_v_proj", "to_out.0", "proj_mlp"]
        settings = {"r": 2, "lora_alpha": 3.0, "target_modules": targets}
        self.__dict__["trained"] = {n: held(t) for n, t in model.state_dict().items()}
        self.__dict__["adapter"] = Adapter(settings, factors)

    def config(self, part: str) -> dict[str, Any]:
        return self.configs[part]

    def lineage(self) -> dict[str, str]:
        return {"zerotrain.step": "12"}


def held(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


@pytest.mark.slow
def test_diffusers_as_it_is_reads_a_kohya_file_of_the_real_flux(tmp_path):
    """At its own width, all 57 blocks, in bf16; a wrong alpha is found."""
    weights, options = RealFlux(tmp_path / "weights"), Options(torch.bfloat16, None, "")
    kohya.write(weights, options, tmp_path)
    assert len(load_file(tmp_path / "lora.safetensors")) == 3 * (19 * 3 + 38)
    kohya.verify(weights, options, tmp_path)
    weights.scales = {layer: scale / 2 for layer, scale in weights.scales.items()}
    with pytest.raises(PipelineError, match="reads back with other values"):
        kohya.verify(weights, options, tmp_path)
