"""LoRAs of diffusers, peft and kohya: with their optimizer they continue, alone they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tests.builders.exports import IMPORTING_RUN, assert_slots
from tests.training.conftest import write_base

from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.export.formats.original import SLOTS, layers_by_slot
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.models.trainable import choose_trained, trained_parameters
from zerotrain.stages.import_checkpoint import ImportSettings, import_checkpoint
from zerotrain.state.external import adapter_files, open_external
from zerotrain.state.state import State

LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["to_q", "to_v", "proj_in"]}
DIFFUSERS, PEFT = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
METADATA = {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 4.0})}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A U-Net with attention."""
    folder: Path = tmp_path_factory.mktemp("base") / "base"
    write_base(folder, (9, 15))
    return folder


@pytest.fixture(scope="module")
def trained(base: Path) -> Any:
    """Tensors of a LoRA by our names and by the library's, its optimizer, and the moments."""
    model = choose_trained(FAMILY.load_model(base), LORA, [], 1)
    own = trained_parameters(model)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3)
    for number, parameter in enumerate(own.values()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    tensors = {name: tensor.detach().clone() for name, tensor in own.items()}
    plain = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    return tensors, plain, optimizer, {name: optimizer.state[p] for name, p in own.items()}


def write(folder: Path, form: str, plain: Any, header: Any = None, **config: Any) -> Path:
    """The adapter's file, and peft's configuration next to it."""
    folder.mkdir(exist_ok=True)
    prefix = "unet." if form == DIFFUSERS else "base_model.model."
    save_file({f"{prefix}{n}": t for n, t in plain.items()}, folder / form, metadata=header)
    if form == PEFT:
        values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": False, **config}
        (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder / form


def imported(path: Path, base: Path, state: Path, **lora: Any) -> State:
    """The state of the checkpoint, under a run with this LoRA."""
    config = parse_config({**IMPORTING_RUN, "lora": {**LORA, **lora}}, "c")
    import_checkpoint(ImportSettings.of(config), path, base, state)
    return State(state)


def assert_weights(state: State, tensors: Any) -> None:
    """All tensors under our names, bit by bit."""
    assert set(state.names) == set(tensors)
    assert all(torch.equal(state.tensor(n, "master"), tensor) for n, tensor in tensors.items())


@pytest.mark.parametrize("form", [DIFFUSERS, PEFT])
@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer.pt"])
def test_an_adapter_with_its_optimizer_keeps_its_moments(
    base: Path, trained: Any, tmp_path: Path, form: str, optimizer: str
) -> None:
    """Folders of diffusers' script, of peft with accelerate, and of HF's Trainer with peft."""
    tensors, plain, own, moments = trained
    folder = tmp_path / "checkpoint-1"
    write(folder, form, plain, METADATA)
    torch.save(own.state_dict(), folder / optimizer)
    state = imported(folder, base, tmp_path / "state")
    assert_weights(state, tensors)
    assert_slots(state, moments)
    assert (state.position.step, state.position.optimizer_step) == (1, 1)


@pytest.mark.parametrize("form", [DIFFUSERS, PEFT])
def test_an_adapters_file_alone_is_a_start(
    base: Path, trained: Any, tmp_path: Path, form: str, capsys: Any
) -> None:
    """Weights alone, with a sentence that there are no moments."""
    tensors, plain, *_ = trained
    file = write(tmp_path / "there", form, plain, METADATA)
    state = imported(file, base, tmp_path / "state")
    assert_weights(state, tensors)
    assert state.slots == ["master"]
    said = capsys.readouterr().err
    assert f"left out: {form} holds weights alone: no moments" in said
    assert "recorded: step 0: no file, header, name or optimizer says it" in said
    assert "alpha" not in said


@pytest.mark.parametrize(
    "name", ["step-50.safetensors", "cat-step00000050.safetensors", "checkpoint-50/a.safetensors"]
)
def test_the_step_is_what_a_files_name_says(
    base: Path, trained: Any, tmp_path: Path, name: str
) -> None:
    """Or its folder's: DiffSynth-Studio, kohya, and a file of a trainer's checkpoint."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    save_file({f"unet.{n}": tensor for n, tensor in trained[1].items()}, file, metadata=METADATA)
    assert open_external(file).position.step == 50


def kohya(plain: Any, base: Path, *, original: bool, alpha: float = 4.0) -> dict[str, Any]:
    """The tensors under kohya's names: those of the original model, or of diffusers."""
    config = json.loads((base / "unet" / "config.json").read_text())
    name_of = SLOTS["sdxl"](config)
    found = {}
    for name, tensor in plain.items():
        layer, _, factor = name.partition(".lora_")
        place = name_of(f"{layer}.weight").name.removesuffix(".weight") if original else layer
        stem = "lora_unet_" + place.replace(".", "_")
        found[f"{stem}.lora_{'down' if factor[0] == 'A' else 'up'}.weight"] = tensor
        found[f"{stem}.alpha"] = torch.tensor(alpha)
    return found


@pytest.mark.parametrize("original", [True, False])
def test_kohyas_file_is_a_start(base: Path, trained: Any, tmp_path: Path, original: bool) -> None:
    """Layers are found by both of the names that are in use; alpha is the file's own."""
    tensors, plain, *_ = trained
    file = tmp_path / "cat.safetensors"
    text = {"lora_te1_text_model_encoder_layers_0.lora_down.weight": torch.zeros(2)}
    save_file(kohya(plain, base, original=original) | text, file)
    assert_weights(imported(file, base, tmp_path / "state"), tensors)


def test_a_layer_that_is_several_here_is_cut_into_its_rows() -> None:
    """The original's qkv has one lora_down, and lora_up with the rows of q, k and v."""
    down, up = torch.randn(2, 6), torch.randn(12, 2)
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    held = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    layers = tuple(f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv")
    ours = {
        f"{layer}.lora_{factor}.default.weight": shape
        for layer in layers
        for factor, shape in (("A", [2, 6]), ("B", [4, 2]))
    }
    source = _of(held)
    found = adapter_files.from_kohya(source, ours, {"double_blocks.0.img_attn.qkv": layers})
    assert found.shapes == ours
    shared = {n: s for n, s in ours.items() if ".lora_B." in n or layers[0] in n}
    fused = adapter_files.from_kohya(source, shared, {"double_blocks.0.img_attn.qkv": layers})
    assert fused.shapes == shared  # lora.fused_layers trains that lora_down once
    for number, layer in enumerate(layers):
        assert torch.equal(found.tensor(f"{layer}.lora_A.default.weight", "master"), down)
        rows = up[4 * number : 4 * number + 4]
        assert torch.equal(found.tensor(f"{layer}.lora_B.default.weight", "master"), rows)


def _of(held: dict[str, torch.Tensor]) -> Any:
    from zerotrain.state.external.checkpoint import TorchOptimizer
    from zerotrain.state.external.numbered import open_numbered

    return open_numbered(
        Path("cat.safetensors"), held, TorchOptimizer({}), step=0, samples=0, engine={},
        loss_scale=None,
    )  # fmt: skip


def test_other_layers_than_the_runs_are_refused(base: Path, trained: Any, tmp_path: Path) -> None:
    """Those that are missing in a file of kohya's, and those that are too many."""
    _, plain, *_ = trained
    save_file(kohya(plain, base, original=True), tmp_path / "cat.safetensors")
    with pytest.raises(PipelineError, match=r"has no lora_unet_\w+_to_k\.lora_down\.weight, which"):
        imported(tmp_path / "cat.safetensors", base, tmp_path / "s", target_modules=["to_k"])
    with pytest.raises(PipelineError, match=r"more tensors are of layers that this run does not"):
        imported(tmp_path / "cat.safetensors", base, tmp_path / "s", target_modules=["to_q"])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("form", [DIFFUSERS, PEFT, "kohya"])
def test_another_alpha_is_refused(base: Path, trained: Any, tmp_path: Path, form: str) -> None:
    """The same tensors would have another effect; the sentence has both values."""
    _, plain, *_ = trained
    if form == "kohya":
        file = tmp_path / "cat.safetensors"
        save_file(kohya(plain, base, original=True), file)
    else:
        file = write(tmp_path / "there", form, plain, METADATA)
    with pytest.raises(PipelineError, match=r"its adapter has lora_alpha 4\S*, this run 2\.0"):
        imported(file, base, tmp_path / "state", alpha=2.0)
    assert not (tmp_path / "state").exists()


def test_an_alpha_that_no_file_says_is_reported(
    base: Path, trained: Any, tmp_path: Path, capsys: Any
) -> None:
    """Older diffusers write no metadata: the run's alpha is taken, with a sentence."""
    _, plain, *_ = trained
    imported(write(tmp_path / "there", DIFFUSERS, plain), base, tmp_path / "state")
    assert f"left out: the adapter's alpha: {DIFFUSERS} does not say it" in capsys.readouterr().err


def test_an_adapter_of_the_text_encoder_is_left_out(
    base: Path, trained: Any, tmp_path: Path, capsys: Any
) -> None:
    """diffusers writes both into one file; the denoiser's is read."""
    tensors, plain, *_ = trained
    file = write(tmp_path / "there", DIFFUSERS, plain, METADATA)
    more = {"text_encoder.layers.0.lora_A.weight": torch.zeros(2, 2)}
    save_file(load_file(file) | more, file, metadata=METADATA)
    assert_weights(imported(file, base, tmp_path / "state"), tensors)
    assert "left out: an adapter of a text encoder" in capsys.readouterr().err


def test_what_a_section_of_ours_cannot_say_is_refused(trained: Any, tmp_path: Path) -> None:
    """Values of single layers, and a configuration that is damaged."""
    _, plain, *_ = trained
    write(tmp_path / "there", PEFT, plain, modules_to_save=["conv_in"])
    with pytest.raises(PipelineError, match=r"adapter_config.json: modules_to_save \['conv_in'\]"):
        open_external(tmp_path / "there")
    (tmp_path / "there" / "adapter_config.json").write_text('{"r": 2')
    with pytest.raises(PipelineError, match=r"adapter_config.json: not valid JSON"):
        open_external(tmp_path / "there")


@pytest.mark.parametrize("form", [DIFFUSERS, PEFT])
@pytest.mark.parametrize("optimizer", [False, True])
def test_a_file_with_more_layers_than_the_run_is_refused(
    base: Path, trained: Any, tmp_path: Path, form: str, optimizer: bool
) -> None:
    """They would be lost without a word; the hint has the layers that take all."""
    _, plain, own, _ = trained
    file = write(tmp_path / "there", form, plain, METADATA)
    if optimizer:
        torch.save(own.state_dict(), tmp_path / "there" / "optimizer.bin")
        file = tmp_path / "there"
    with pytest.raises(PipelineError, match="would be lost") as caught:
        imported(file, base, tmp_path / "s", target_modules=["to_q"])
    assert "lora.target_modules: [proj_in, to_q, to_v] trains all" in str(caught.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("end", "hint"),
    [("lora_B.bias", "with biases is not offered"),
     ("lora_magnitude_vector", "lora.use_dora: true")],
)  # fmt: skip
def test_further_tensors_of_a_layer_are_refused(
    base: Path, trained: Any, tmp_path: Path, end: str, hint: str
) -> None:
    """A bias, and DoRA's lengths where the run trains a plain LoRA."""
    _, plain, *_ = trained
    layers = {name.partition(".lora_")[0] for name in plain}
    more = {f"{layer}.{end}": torch.ones(3) for layer in layers}
    file = write(tmp_path / "there", DIFFUSERS, {**plain, **more}, METADATA)
    with pytest.raises(PipelineError, match="would be lost") as caught:
        imported(file, base, tmp_path / "s")
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [("lora_unet_a.dora_scale", "a DoRA"), ("lora_unet_a.hada_w1_a", "a LoHa"),
     ("lycoris_a.lokr_w1", "a LoKr")],
)  # fmt: skip
def test_other_methods_in_kohyas_names_are_named(tmp_path: Path, name: str, what: str) -> None:
    """Until they can be read; and not that a factor of a LoRA is missing."""
    names = ["lora_unet_a.lora_down.weight", "lora_unet_a.lora_up.weight", "lora_unet_a.alpha"]
    file = tmp_path / "cat.safetensors"
    save_file({one: torch.ones(1) for one in [*names, name]}, file)
    with pytest.raises(PipelineError, match=f"{name}: {what} in the names of kohya's"):
        open_external(file)


def test_settings_of_other_methods_are_compared(tmp_path: Path) -> None:
    """With the run's, or the method's defaults: LoHa's alpha scales its tensors."""
    save_file({"a.hada_w1_a": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LOHA", "r": 8, "alpha": 16, "rank_dropout": 0.1, "new": 3}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "init_weights": True}))
    found = open_external(tmp_path)
    assert found.adapter == {"peft_type": "LOHA", "r": 8, "alpha": 16}
    assert "adapter_config.json: new: a setting that is not read" in found.lost
    same = adapter_files.run_settings({"peft_type": "LOHA", "alpha": 16}, is_peft=True)
    adapter_files.check_settings(found.adapter, same, tmp_path)
    default = adapter_files.run_settings({"peft_type": "LOHA"}, is_peft=True)
    with pytest.raises(PipelineError, match="its adapter has alpha 16, this run 8"):
        adapter_files.check_settings(found.adapter, default, tmp_path)


def test_dora_and_older_names() -> None:
    """peft cuts the end of DoRA's names off; older diffusers had lora.down and lora.up, or the LoRA
    in the attention's processor; trainers name adapters and compile parts."""
    names = {
        "base_model.model.q.lora_A.weight": "base_model.model.q.lora_A.default.weight",
        "base_model.model.q.lora_magnitude_vector": "base_model.model.q.lora_magnitude_vector"
        ".default.weight",
        "unet.q.lora.down.weight": "unet.q.lora_A.default.weight",
        "unet.q.lora.up.weight": "unet.q.lora_B.default.weight",
        "a.q.lora_A.default_0.default.weight": "a.q.lora_A.default.weight",
        "a.q.lora_B.my_style.weight": "a.q.lora_B.default.weight",
        "unet.b.attn1.processor.to_q_lora.down.weight": "unet.b.attn1.to_q.lora_A.default.weight",
        "unet.b.attn1.processor.to_out_lora.up.weight": "unet.b.attn1.to_out.0.lora_B"
        ".default.weight",
        "a._orig_mod.k.lora_A.weight": "a.k.lora_A.default.weight",
        "base_model.model.q.hada_w1_a": "base_model.model.q.hada_w1_a.default",
        "base_model.model.q.oft_R.weight": "base_model.model.q.oft_R.default.weight",
    }
    held = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    found, settings, _ = adapter_files.open_adapter(held, Path("absent.safetensors"), {})
    assert {name: float(found[name]) for name in found} == {
        own: float(held[name]) for name, own in names.items()
    }
    assert settings == {}


def test_places_of_sdxl_are_those_of_the_export(base: Path) -> None:
    """Reading a file that `export --to kohya` could have written finds every layer."""
    config = json.loads((base / "unet" / "config.json").read_text())
    names = FAMILY.load_model(base).state_dict()
    layers = [layer for found in layers_by_slot(names, SLOTS["sdxl"](config)).values()
              for layer in found]  # fmt: skip
    assert len(layers) == len(set(layers))
    assert {"conv_in", "mid_block.attentions.0.proj_in"} <= set(layers)


def _odd(tmp_path: Path, tensors: Any, header: Any = None) -> Path:
    file = tmp_path / "cat.safetensors"
    save_file(tensors, file, metadata=header)
    return file


LAYER = {
    "lora_unet_q.lora_down.weight": torch.zeros(2, 4),
    "lora_unet_q.lora_up.weight": torch.zeros(4, 2),
    "lora_unet_q.alpha": torch.tensor(1.0),
}
TEXT = "lora_te1_text_model_encoder_layers_0"


@pytest.mark.parametrize("alpha", [torch.tensor(8.0), torch.ones(2)])
def test_alphas_of_the_text_encoder_are_left_out_with_it(tmp_path: Path, alpha: Any) -> None:
    """Only the denoiser's layers decide whether there is one alpha."""
    text = {f"{TEXT}.lora_down.weight": torch.zeros(2), f"{TEXT}.alpha": alpha}
    assert open_external(_odd(tmp_path, LAYER | text)).adapter == {"lora_alpha": 1.0}
    own = {name.replace("_q.", "_k."): tensor.clone() for name, tensor in LAYER.items()}
    own["lora_unet_k.alpha"] = torch.tensor(8.0)
    found = open_external(_odd(tmp_path, LAYER | text | own))
    assert found.adapter == {"scales": {"lora_unet_q": 0.5, "lora_unet_k": 4.0}}


def test_settings_of_the_text_encoder_are_left_out_with_it(tmp_path: Path) -> None:
    """diffusers notes both models' settings in one header."""
    values = {"unet.r": 2, "unet.lora_alpha": 4, "text_encoder.r": 8, "text_encoder_2.r": 8}
    file = _odd(
        tmp_path,
        {"unet.q.lora_A.weight": torch.zeros(2, 4)},
        {"lora_adapter_metadata": json.dumps(values)},
    )
    assert open_external(file).adapter == {"r": 2, "lora_alpha": 4}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "holds a list, not keys"),
        ("1", "holds a number, not keys"),
        ('"r"', "holds a string, not keys"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested more than 50 deep"),
        ('{"unet.r": NaN}', "NaN is no finite number"),
        ('{"unet.r": [[1]]}', "r"),
    ],
)
def test_a_header_of_another_form_is_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    """Neither a list nor a value is an adapter's settings."""
    file = _odd(tmp_path, {"q.lora_A.weight": torch.zeros(2, 4)}, {"lora_adapter_metadata": text})
    with pytest.raises(PipelineError, match=rf"cat\.safetensors: lora_adapter_metadata: .*{why}"):
        open_external(file)


def test_an_alpha_that_is_no_number_is_one_sentence(tmp_path: Path) -> None:
    """It names the tensor."""
    file = _odd(tmp_path, LAYER | {"lora_unet_q.alpha": torch.ones(2)})
    sentence = r"cat\.safetensors: lora_unet_q\.alpha is a tensor of shape \[2\], no number"
    with pytest.raises(PipelineError, match=sentence):
        open_external(file)


def test_a_factor_without_rows_has_another_shape() -> None:
    """A single number where a matrix belongs: the shape is kept, for the message about it."""
    held = {name: torch.tensor(1.0) for name in LAYER if "lora_" in name and "alpha" not in name}
    ours = {"q.lora_A.default.weight": [1, 1], "q.lora_B.default.weight": [1, 1]}
    found = adapter_files.from_kohya(_of(held), ours, {"q": ("q",)})
    assert found.shapes == {name: [] for name in ours}


def test_a_file_with_a_factor_for_each_layer_starts_one_that_shares_them() -> None:
    """Equal first factors of a stack are one here; others cannot be, and are refused by name."""
    stack = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"]
    ours = {f"{stack[0]}.lora_A.default.weight": [2, 6]}
    ours |= {f"{layer}.lora_B.default.weight": [4, 2] for layer in stack}
    first = torch.randn(2, 6)
    held = {
        f"transformer.{layer}.lora_{factor}.default.weight": value
        for layer in stack
        for factor, value in (("A", first.clone()), ("B", torch.randn(4, 2)))
    }
    found = adapter_files.share_first_factors(_of(held), ours)
    assert {*found.shapes} == {f"transformer.{name}" for name in ours}
    held[f"transformer.{stack[2]}.lora_A.default.weight"][0, 0] += 1
    with pytest.raises(
        PipelineError, match=r"to_v\.lora_A\S* and \S*to_q\.lora_A\S* differ"
    ) as told:
        adapter_files.share_first_factors(_of(held), ours)
    assert "remove lora.fused_layers" in told.value.hint
