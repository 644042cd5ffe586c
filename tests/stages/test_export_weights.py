"""export_weights on a tiny real U-Net: what it publishes is what was trained, or nothing is."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file
from tests.builders.exports import POSITION, SLOTS, Export, Trained, moments
from tests.builders.models import make_unet
from tests.builders.states import HISTORY, RAN_ON
from typer.testing import CliRunner

from zerotrain import artifact, cli
from zerotrain.artifact import write_json
from zerotrain.errors import PipelineError
from zerotrain.export import export as export_module
from zerotrain.export.command import check_replaceable
from zerotrain.export.export import export as export_source
from zerotrain.export.target import WeightsTarget
from zerotrain.models.adapter_config import METADATA
from zerotrain.models.families import adapters
from zerotrain.models.families.lora import ADAPTER, PEFT_ADAPTER, add_adapter
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.state import external as foreign
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.external import describe_omissions
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.state.state import State

EXTRA = {"vae/config.json": "{}", "tokenizer/vocab.json": "[]"}
PRIVATE = "scheduler/notes.txt"
"""A file of a base that no library loads."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose other parts are small files."""
    folder = tmp_path_factory.mktemp("inputs") / "base"
    torch.manual_seed(0)
    unet = make_unet((4, 8), groups=2, text=8, sample_size=4, attention_head_dim=4)
    with artifact.publish(folder, "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler().save_pretrained(draft.folder / "scheduler")
        for name, text in {**EXTRA, PRIVATE: "n"}.items():
            (draft.folder / name).parent.mkdir(exist_ok=True)
            (draft.folder / name).write_text(text)
        write_json(draft.folder / "model_index.json", {"unet": ["diffusers", "x"]})
        (draft.folder / "records").mkdir()
        (draft.folder / "records" / "fit.json").write_text("{}")
    return folder


@pytest.fixture
def trained(base: Path) -> Trained:
    """The base's parameters after some training, by name."""
    loaded = UNet2DConditionModel.from_pretrained(base / "unet").state_dict()
    draw = torch.Generator().manual_seed(1)
    return {name: t + 0.1 * torch.randn(t.shape, generator=draw) for name, t in loaded.items()}


@pytest.fixture
def export(tmp_path: Path, base: Path) -> Export:
    """Exports into a folder of its own."""
    return Export(tmp_path, base)


def test_weights_in_fp32_are_the_master_weights(export: Export, trained: Trained) -> None:
    """Bit for bit, every parameter, and diffusers loads them."""
    written = export(trained)
    assert set(written) == set(trained)
    for name, tensor in trained.items():
        assert written[name].dtype == torch.float32
        assert torch.equal(written[name], tensor)
    loaded = UNet2DConditionModel.from_pretrained(export.weights, subfolder="unet")
    assert torch.equal(loaded.conv_in.weight, trained["conv_in.weight"])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_in_half_precision_are_rounded(
    export: Export, trained: Trained, name: str, dtype: torch.dtype
) -> None:
    """To the nearest value, once, from the master weights; the state stays in fp32."""
    written = export(trained, name)
    for key, tensor in trained.items():
        assert written[key].dtype == dtype
        assert torch.equal(written[key], tensor.to(dtype))
    state = State(export.state)
    assert torch.equal(state.tensor("conv_in.weight", MASTER), trained["conv_in.weight"])
    found = artifact.read(export.weights, "weights")
    assert found.content == {"family": "sdxl", "step": 12, "dtype": name}


def test_averaged_weights_are_what_is_exported(export: Export, trained: Trained) -> None:
    """The state holds both, and `--no-ema` writes the weights that the training continues from."""
    export.slots = [*SLOTS, EMA_SLOT]
    written = export(trained)
    state = State(export.state)
    for name, tensor in trained.items():
        assert torch.equal(written[name], moments(EMA_SLOT, tensor))
        assert torch.equal(state.tensor(name, MASTER), tensor)
        assert torch.equal(state.tensor(name, EMA_SLOT), moments(EMA_SLOT, tensor))
    found = artifact.read(export.weights, "weights")
    assert found.content["ema"] is True
    said = CliRunner().invoke(
        cli.command_line(), ["state", "diff", str(export.state), str(export.weights)]
    )
    assert (said.exit_code, "equal" in said.stdout) == (0, True), said.stdout
    said_left_out = describe_omissions(State(export.state))
    assert said_left_out == ["the averaged weights (ema): DeepSpeed keeps none"]
    other = export.weights.with_name("other")
    base = ("--family", "sdxl", "--base", export.base)
    by_hand(export.checkpoint, "--no-ema", *base, "--output", other)
    plain = load_file(other / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(plain[name], tensor) for name, tensor in trained.items())
    assert "ema" not in artifact.read(other, "weights").content
    with pytest.raises(PipelineError, match="hold the averaged weights alone"):
        by_hand(export.weights, "--no-ema", "--output", other)


@pytest.mark.slow
def test_state_holds_everything_that_the_checkpoint_held(export: Export, trained: Trained) -> None:
    """Position, moments, records; bit for bit."""
    export(trained)
    state = State(export.state)
    assert state.position == POSITION
    assert set(state.names) == set(trained)
    assert sorted(state.slots) == sorted(SLOTS)
    for name, tensor in trained.items():
        for slot in SLOTS:
            assert torch.equal(state.tensor(name, slot), moments(slot, tensor))
    assert state.artifact.path("records/metrics.jsonl").read_text() == "{}\n"


def test_what_it_ran_on_travels_into_state_weights_and_every_form(
    export: Export, trained: Trained, tmp_path: Path
) -> None:
    """Through the rule, by hand, from a state, and into other formats and their README."""
    export.position = replace(POSITION, ran_on=RAN_ON, history=HISTORY[:2])
    export.settings = {"train": {"resolution": 64}}
    export(trained)
    by_hand(export.checkpoint, "--state", tmp_path / "second")
    by_hand(tmp_path / "second", "--state", tmp_path / "third")
    for folder in (export.state, tmp_path / "third"):
        assert State(folder).position == export.position
    by_hand(export.weights, "--to", "single_file", "--output", tmp_path / "file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "write_universal", lambda folder, source: None)
        by_hand(export.checkpoint, "--to", "universal", "--output", tmp_path / "universal")
    for folder, kind in (
        (export.weights, "weights"),
        (tmp_path / "file", "exported"),
        (tmp_path / "universal", "universal"),
    ):
        made_by = artifact.read(folder, kind).made_by
        assert (made_by["ran_on"], made_by["history"]) == (RAN_ON, HISTORY[:2])
    readme = (export.weights / "README.md").read_text()
    assert "- device: NVIDIA H100 80GB HBM3, driver 570.86\n" in readme
    assert "Changed while it trained:\n\n- after step 120: torch 2.12.0 → 2.13.0\n" in readme


def test_the_readme_makes_images_of_the_trained_size(export: Export, trained: Trained) -> None:
    """Not of the base model's own; without one there is none."""
    export.settings = {"train": {"resolution": 64}}
    export(trained)
    readme = (export.weights / "README.md").read_text()
    assert "height=64, width=64" in " ".join(readme.split())
    assert "--resolution 64\n" in readme
    export.settings = {}
    export(trained)
    assert "height" not in (export.weights / "README.md").read_text()


def test_other_parts_are_linked(export: Export, trained: Trained, base: Path) -> None:
    """The folder is a whole pipeline without a second copy; the base's U-Net is not in it."""
    export(trained)
    found = artifact.read(export.weights, "weights")
    unet = {"unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
    others = {*EXTRA, "model_index.json", "scheduler/scheduler_config.json"}
    assert set(found.files) == unet | others | {"README.md"}
    for name in others:
        assert found.path(name).samefile(base / name)
    assert not (export.weights / "unet/config.json").samefile(base / "unet/config.json")
    assert found.parents["base"]["identity"] == artifact.read(base, "base").identity
    assert found.made_by["engine"] == POSITION.engine


def linked_base(base: Path, model: Path, folder: Path, *, at_hub: bool) -> Path:
    """Publish a base of links to a user's own copy of the files, in a folder or a hub's cache."""
    with artifact.publish(folder, "base") as draft:
        for name, entry in artifact.read(base, "base").files.items():
            own = model / "blobs" / entry["sha256"] if at_hub else model / name
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes((base / name).read_bytes())
            (draft.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (draft.folder / name).symlink_to(own)
    return folder


@pytest.mark.parametrize("at_hub", [False, True])
def test_files_of_the_user_get_no_second_name(
    trained: Trained, base: Path, tmp_path: Path, at_hub: bool
) -> None:
    """Overwriting files of weights/ in place, as libraries do, leaves the user's base alone, and
    so does a base that is a folder without a manifest."""
    model = tmp_path / "models--a--b"
    linked = linked_base(base, model, tmp_path / "base", at_hub=at_hub)
    for part in () if at_hub else ("vae", "text_encoder", "text_encoder_2", "tokenizer_2"):
        (model / part).mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (model / part / name).write_text("{}")
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    for export in (Export(tmp_path / "a", linked), Export(tmp_path / "b", model)):
        if export.base == model and at_hub:
            continue  # a cache of blobs is no folder of a model
        export(trained)
        for name in artifact.read(export.weights, "weights").files:
            assert not (export.weights / name).is_symlink()
            (export.weights / name).open("r+b").write(b"overwritten in place")
        assert {path: path.read_bytes() for path in before} == before


def test_phases_of_a_run_share_one_copy_of_the_base(
    trained: Trained, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the next phase link to those of the one before, unless these were changed."""
    monkeypatch.setattr("zerotrain.artifact.publication.reflink", lambda source, target: False)
    monkeypatch.chdir(tmp_path)
    Path("Snakefile").touch()
    linked = linked_base(base, tmp_path / "model", Path("results/tiny/base"), at_hub=False)
    first, second = (Export(Path("results/tiny", name), linked) for name in ("first", "second"))
    first(trained)
    (first.weights / "tokenizer/vocab.json").write_text("{}")  # another text of the same length
    second(trained)
    one, other = (export.weights / "vae/config.json" for export in (first, second))
    assert other.samefile(one)
    assert not other.samefile(linked / "vae/config.json")
    assert (second.weights / "tokenizer/vocab.json").read_text() == EXTRA["tokenizer/vocab.json"]


def test_exporting_again_gives_the_same_folders(export: Export, trained: Trained) -> None:
    """The identity of weights and state is a function of the checkpoint."""
    identities = []
    for _ in range(2):
        export(trained)
        identities.append(
            (
                artifact.read(export.weights, "weights").identity,
                artifact.read(export.state, "state").identity,
            )
        )
    assert identities[0] == identities[1]


def test_the_files_header_leads_back(export: Export, trained: Trained, base: Path) -> None:
    """To run, phase, step and base, wherever the file is carried."""
    export(trained)
    with safe_open(export.weights / "unet" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.metadata() == origin(base)


def origin(base: Path) -> dict[str, str]:
    """What the header of any file of weights says."""
    return {
        "format": "pt",
        "zerotrain.run": "tiny",
        "zerotrain.phase": "plain",
        "zerotrain.step": "12",
        "zerotrain.base": artifact.read(base, "base").identity,
    }


def change(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor with its last element replaced."""

    def act(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return act


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(
    export: Export, trained: Trained, value: float
) -> None:
    """The parameter, how many values, and that an older checkpoint may serve."""
    trained["mid_block.resnets.0.conv1.weight"] = change(value)(
        trained["mid_block.resnets.0.conv1.weight"]
    )
    text = export.refusal(trained)
    assert "mid_block.resnets.0.conv1.weight: 1 values are not finite in torch.float32" in text
    assert "the checkpoint is damaged; take an older one, or train on from it" in text


@pytest.mark.parametrize(
    ("slot", "value", "what"),
    [
        ("exp_avg", float("nan"), "1 values are not finite in torch.float32"),
        ("exp_avg_sq", float("inf"), "1 values are not finite in torch.float32"),
        ("exp_avg_sq", -1e-12, "1 values are negative, a mean of squares"),
    ],
)
def test_a_bad_moment_is_named(
    export: Export, trained: Trained, slot: str, value: float, what: str
) -> None:
    """Parameter and slot; the weights, which are right, are not published without a state."""
    name = "mid_block.resnets.0.conv1.weight"

    def spoilt(which: str, tensor: torch.Tensor) -> torch.Tensor:
        found = moments(which, tensor)
        bad = which == slot and torch.equal(tensor, trained[name])
        return change(value)(found) if bad else found

    export.moments = spoilt
    assert f"{name} ({slot}): {what}" in export.refusal(trained)


def test_what_fp16_cannot_hold_is_explained(export: Export, trained: Trained) -> None:
    """70000 is a fine weight, but not in fp16; bf16 and fp32 take it."""
    trained["conv_in.weight"] = change(70000)(trained["conv_in.weight"])
    text = export.refusal(trained, "fp16")
    assert "conv_in.weight: 1 values are not finite in torch.float16" in text
    assert "choose export.dtype fp32 or bf16" in text
    assert export(trained, "bf16")["conv_in.weight"].max() == 70144


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("conv_out.weight", None, "absent in the trained tensors, (4, 4, 3, 3) by "),
        ("lora.weight", torch.ones(2), "(2,) in the trained tensors, absent by "),
        ("conv_in.bias", torch.ones(5), "(5,) in the trained tensors, (4,) by "),
        ("conv_in.bias", torch.ones(0), "empty tensor of shape [0]"),
    ],
    ids=["missing", "strange", "of another shape", "empty"],
)
def test_parameters_that_are_not_the_models_are_named(
    export: Export, trained: Trained, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    """A checkpoint of another model does not become weights with holes, and a gathered parameter
    that was not gathered has no elements."""
    trained.pop(name, None)
    if tensor is not None:
        trained[name] = tensor
    text = export.refusal(trained)
    assert f"{name}: {said}" in text
    if tensor is None:
        assert "export the weights with the base model that the training started from" in text


def flip(path: Path) -> None:
    """Change one bit of the last tensor."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-2, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def shorten(path: Path) -> None:
    """Cut the last byte off."""
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"weights: up_blocks\S+ reads back with other values than were written"),
        (shorten, r"weights: does not load again: "),
        (Path.unlink, r"weights: does not load again: "),
    ],
)
def test_what_reads_back_otherwise_is_not_published(
    export: Export, trained: Trained, monkeypatch, damage: Callable[[Path], None], message: str
) -> None:
    """The written file is read again, and loaded by diffusers, before it appears."""
    save = FAMILY.save_model

    def damaged(*arguments: Any, **options: Any) -> dict[str, str]:
        known = save(*arguments, **options)
        damage(arguments[4] / "unet" / "diffusion_pytorch_model.safetensors")
        return known

    monkeypatch.setattr(FAMILY, "save_model", damaged)
    text = export.refusal(trained)
    assert re.search(message, text)
    assert "look at the disk and its room; nothing was published" in text


@pytest.mark.parametrize("slot", SLOTS)
def test_a_refused_export_keeps_the_one_before(export: Export, trained: Trained, slot: str) -> None:
    """Good weights and the state are not lost to a bad checkpoint."""
    export(trained)

    def identities() -> tuple[str, str]:
        return (
            artifact.read(export.weights, "weights").identity,
            artifact.read(export.state, "state").identity,
        )

    before = identities()
    export.moments = lambda which, tensor: (
        moments(which, tensor) * (float("nan") if which == slot else 1)
    )
    with pytest.raises(PipelineError):
        export(trained)
    assert identities() == before


def test_frozen_tensors_are_the_bases_own(
    export: Export, trained: Trained, base: Path, tmp_path: Path
) -> None:
    """Bit for bit in the type of the base, rounded in another; a missing one is still refused."""
    frozen = [name for name in trained if name.startswith("down_blocks")]
    own = load_file(base / "unet" / "diffusion_pytorch_model.safetensors")
    shapes = {name: list(t.shape) for name, t in trained.items() if name not in frozen}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        known = FAMILY.save_model(base, shapes, trained.get, dtype, out, frozen=frozen.__contains__)
        assert known == {file: artifact.file_sha256(out / file) for file in known}
        written = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
        assert written.keys() == own.keys()
        for name in own:
            expected = own[name] if name in frozen else trained[name]
            assert torch.equal(written[name], expected.to(dtype))
    with pytest.raises(PipelineError, match=f"{frozen[0]}: absent in the trained tensors"):
        FAMILY.save_model(
            base, shapes, trained.get, dtype, tmp_path, frozen=frozen[1:].__contains__
        )


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        # Regular expressions; one fits nothing that is absent.
        ({"frozen_parameters": ["^down_blocks", r"conv_out\\.bias$"]}, r"(?!down_blocks)"),
        ({"trainable_parameters": ["^down_blocks"], "frozen_parameters": ["bias$"]},
         r"down_blocks.*(?<!bias)$"),
    ],
    ids=["frozen", "chosen"],
)  # fmt: skip
def test_what_is_not_trained_is_the_bases_own(
    export: Export, trained: Trained, base: Path, settings: dict[str, Any], kept: str
) -> None:
    """The configuration names what a checkpoint may lack."""
    own = load_file(base / "unet" / "diffusion_pytorch_model.safetensors")
    export.settings = settings
    found = {name: tensor for name, tensor in trained.items() if re.match(kept, name)}
    written = export(found)
    assert 0 < len(found) < len(own)
    assert all(torch.equal(written[name], found.get(name, own[name])) for name in own)


def test_an_adapter_is_written_next_to_the_base(export: Export, base: Path) -> None:
    """The base's own U-Net is linked, the adapter is what was trained, and both load; its header
    leads back, and has rank and alpha."""
    model = FAMILY.load_model(base)
    lora = {"rank": 2, "alpha": 3.0, "dropout": 0.0, "target_modules": ["to_q", "to_v"]}
    add_adapter(model, seed=0, **lora)
    draw = torch.Generator().manual_seed(2)
    trained = {
        name: torch.randn(parameter.shape, generator=draw)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert trained
    export.settings = {"lora": lora}
    export(trained)
    unet = Path("unet", "diffusion_pytorch_model.safetensors")
    assert (export.weights / unet).samefile(base / unet)
    adapter = load_file(export.weights / ADAPTER)
    assert len(adapter) == len(trained)
    with safe_open(export.weights / ADAPTER, "pt") as file:
        said = file.metadata()
    settings = json.loads(said.pop(METADATA))
    assert said == origin(base)
    assert (settings["unet.r"], settings["unet.lora_alpha"]) == (2, 3.0)
    for name, tensor in trained.items():
        assert torch.equal(adapter["unet." + name.replace(".default.", ".")], tensor)
    assert sorted(State(export.state).names) == sorted(trained)
    trained[min(trained)] = change(float("nan"))(trained[min(trained)])
    with pytest.raises(PipelineError, match="1 values are not finite"):
        export(trained)


def test_an_adapter_of_another_method_leads_back(export: Export, base: Path) -> None:
    """Its file is peft's own, and says in its header what a LoRA's says."""
    export.settings = {"peft": {"peft_type": "LOHA", "r": 2, "target_modules": ["to_q"]}}
    model = adapters.add(FAMILY.load_model(base), export.settings["peft"], 0)
    export({n: p.detach() + 0.1 for n, p in model.named_parameters() if p.requires_grad})
    with safe_open(export.weights / adapters.FOLDER / PEFT_ADAPTER, "pt") as file:
        assert file.metadata() == origin(base)


@pytest.mark.parametrize(
    ("section", "adapter", "file"),
    [
        ("lora", {"rank": 2, "alpha": 3.0, "dropout": 0.0}, ADAPTER),
        (
            "peft",
            {"peft_type": "LOHA", "r": 2, "alpha": 3.0, "init_weights": False},
            f"adapter/{PEFT_ADAPTER}",
        ),
    ],
)
def test_an_adapter_is_checked_without_the_bases_weights(
    export: Export, base: Path, monkeypatch, section: str, adapter: dict[str, Any], file: str
) -> None:
    """They may be more than the host has; a damaged file is refused all the same."""
    adapter = {**adapter, "target_modules": ["to_q", "to_v"]}
    model = adapters.add(FAMILY.load_model(base), adapter, seed=0)
    trained = {n: p.detach() + 1 for n, p in model.named_parameters() if p.requires_grad}
    export.settings = {section: adapter}
    monkeypatch.setattr(type(FAMILY), "load_model", lambda *_: pytest.fail("it was loaded"))
    write = export_module._write_weights

    def damaged(source: Any, target: Any, folder: Path, said: Any) -> dict[str, str]:
        known = write(source, target, folder, said)
        flip(folder / file)
        return known

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write_weights", damaged)
        assert "reads back with other values than were written" in export.refusal(trained)
    export(trained)
    assert sorted(State(export.state).names) == sorted(trained)


def test_tied_tensors_are_filled_from_the_trained_one(
    base: Path, trained: Trained, tmp_path: Path, monkeypatch
) -> None:
    """Two names of one parameter, of which training knows either."""
    # Shapes are equal in the tiny model; a parameter and another become one.
    one, two = "conv_norm_out.weight", "conv_norm_out.bias"

    def tied(*arguments: Any, **options: Any) -> UNet2DConditionModel:
        model = from_config(*arguments, **options)
        model.conv_norm_out.bias = model.conv_norm_out.weight
        return model

    from_config = UNet2DConditionModel.from_config
    monkeypatch.setattr(UNet2DConditionModel, "from_config", tied)
    for kept, left in ((one, two), (two, one)):
        shapes = {name: list(t.shape) for name, t in trained.items() if name != left}
        out = tmp_path / kept
        FAMILY.save_model(base, shapes, trained.__getitem__, torch.float32, out)
        written = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
        assert torch.equal(written[one], trained[kept])
        assert torch.equal(written[two], trained[kept])


def by_hand(*words: object) -> str:
    """Run `zerotrain export`; its output."""
    result = CliRunner().invoke(cli.command_line(), ["export", *map(str, words)])
    if result.exception:
        raise result.exception
    return result.stdout


def test_the_command_does_what_the_rule_does(
    export: Export, trained: Trained, tmp_path: Path, monkeypatch
) -> None:
    """With the run's configuration; the base is the run's own, and the folders are the same."""
    export(trained, "bf16")
    raw = export.config("bf16").model_dump(mode="json", include={"run", "base", "export"})
    raw |= {"data": {"source": "digits"}, "phases": [{"name": "plain", "until": 12}]}
    (tmp_path / "config.yaml").write_text(json.dumps(raw))
    shutil.copytree(export.base, tmp_path / "results" / "tiny" / "base")
    monkeypatch.chdir(tmp_path)
    said = by_hand(
        export.checkpoint, "--config", "config.yaml", "--output", "model", "--state", "kept"
    )
    assert said == "wrote model\nwrote kept\n"
    for name, folder, kind in (
        ("model", export.weights, "weights"),
        ("kept", export.state, "state"),
    ):
        assert artifact.read(Path(name), kind).identity == artifact.read(folder, kind).identity
    assert by_hand("kept", "--config", "config.yaml", "--dtype", "fp32", "--output", "again")
    again = load_file(tmp_path / "again" / "unet" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(again["conv_in.weight"], trained["conv_in.weight"])
    assert set(artifact.read(tmp_path / "again", "weights").parents) == {"state", "base"}


def test_the_base_may_be_any_diffusers_folder(
    export: Export, trained: Trained, base: Path, tmp_path: Path
) -> None:
    """Its needed parts complete the weights, and made_by says where it lay."""
    export.save(trained)
    plain = tmp_path / "plain"
    shutil.copytree(base / "unet", plain / "unet")
    for part in FAMILY.spec.parts:
        (plain / part).mkdir(exist_ok=True)
        if part != "unet":
            (plain / part / "config.json").write_text("{}")
        if part in FAMILY.spec.classes and part != "unet":
            (plain / part / "model.safetensors").write_bytes(b"")
    (plain / "model_index.json").write_text("{}")
    (plain / "picture.png").write_bytes(b"x")
    by_hand(export.checkpoint, "--family", "sdxl", "--base", plain, "--output", export.weights)
    found = artifact.read(export.weights, "weights")
    assert "vae/model.safetensors" in found.files
    assert "picture.png" not in found.files
    assert set(found.parents) == {"checkpoint"}
    assert found.made_by["base"]["path"] == str(plain)
    assert not export.state.exists()


@pytest.mark.soak
def test_memory_is_that_of_one_tensor(tmp_path: Path, export: Export, trained: Trained) -> None:
    """Weights of 200 MB in many tensors, with a state of 600 MB, in less than 60 MB."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=4, in_channels=4, out_channels=4, block_out_channels=(384, 384, 384),
            layers_per_block=4, norm_num_groups=2, cross_attention_dim=8, attention_head_dim=4,
            down_block_types=("DownBlock2D",) * 3, up_block_types=("UpBlock2D",) * 3,
            mid_block_type=None, addition_embed_type="text_time", addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=6 * 4 + 6,
        )  # fmt: skip
    sizes = [parameter.nbytes for parameter in unet.parameters()]
    assert sum(sizes) > 190e6
    assert max(sizes) < 15e6
    large = Export(tmp_path / "large", tmp_path / "large" / "base")
    with artifact.publish(large.base, "base") as draft:
        unet.save_config(draft.folder / "unet")
    large.moments = lambda slot, tensor: tensor
    large.save({name: torch.ones(t.shape) for name, t in unet.state_dict().items()})
    export.save(trained)

    def act(export: Export) -> None:
        target = WeightsTarget(export.weights, export.base, FAMILY, "bf16")
        export_source(Checkpoint(export.checkpoint), export.checkpoint, target, export.state)

    act(export)  # what an export imports is no tensor
    assert anonymous_growth(lambda: act(large)) < 60e6


M_MMAP_THRESHOLD = -3
"""From malloc.h. Once it is set, glibc no longer raises it to the size of what was freed."""


def anonymous_growth(act: Callable[[], None]) -> int:
    """Bytes of anonymous memory that a child process needs beyond its start."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's threads have not come along
            # What the parent has freed and kept would hide what the child takes, and what the child
            # frees and keeps is no tensor: every large block is mapped alone, and unmapped.
            libc = ctypes.CDLL(None)
            libc.malloc_trim(0)
            assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
            start = most = resident()
            done = threading.Event()

            def watch() -> None:
                nonlocal most
                while not done.wait(0.002):
                    libc.malloc_trim(0)  # the child has used and freed blocks that the parent freed
                    most = max(most, resident())

            thread = threading.Thread(target=watch)
            thread.start()
            act()
            done.set()
            thread.join()
            os.write(writing, str(most - start).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading) as stream:
        return int(stream.read())


def resident() -> int:
    """Anonymous resident memory of this process, without mapped files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def test_what_is_needed_is_never_replaced(export: Export, trained: Trained, tmp_path: Path) -> None:
    """A target that holds the checkpoint, or the other target, is refused before anything is
    written; a folder of a user's is refused by the command."""
    export(trained)
    source = Checkpoint(export.checkpoint)
    before = artifact.read(export.state, "state").identity
    inside = tmp_path / "out" / "state"
    for weights, state in ((export.checkpoint, export.state), (tmp_path / "out", inside),
                           (inside, inside)):  # fmt: skip
        target = WeightsTarget(weights, export.base, FAMILY, "fp32")
        with pytest.raises(PipelineError, match="would be replaced whole"):
            export_source(source, export.checkpoint, target, state)
    assert artifact.read(export.state, "state").identity == before
    assert artifact.is_published(export.checkpoint)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious.txt").write_text("mine")
    with pytest.raises(PipelineError, match="was not written by an export"):
        check_replaceable(mine)
    check_replaceable(export.state)
    check_replaceable(tmp_path / "new")
