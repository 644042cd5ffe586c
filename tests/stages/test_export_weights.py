"""export_weights on a tiny real U-Net: what it publishes is what was trained, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from safetensors.torch import load_file

from zerotrain import artifact
from zerotrain.artifact import write_json
from zerotrain.checkpoint import KIND as CHECKPOINT
from zerotrain.checkpoint import Fragment, write_position, write_rank
from zerotrain.config import RunConfig, parse_config
from zerotrain.errors import PipelineError
from zerotrain.stages.export_weights import export_weights
from zerotrain.state import MASTER, State, TrainingPosition

SLOTS = [MASTER, "exp_avg", "exp_avg_sq"]
POSITION = TrainingPosition(
    run="tiny",
    phase="plain",
    step=12,
    samples=48,
    optimizer="adamw",
    optimizer_step=12,
    param_groups=[],
    lr_scheduler="constant",
    lr_scheduler_steps=20,
    rng={"scheme": "counter", "seed": 0},
    engine={"preset": "zero2_offload", "zero_stage": 2},
)
Trained = dict[str, torch.Tensor]
EXTRA = {"scheduler/notes.txt": "n", "vae/config.json": "{}", "tokenizer/vocab.json": "[]"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose other parts are small files."""
    folder = tmp_path_factory.mktemp("inputs") / "base"
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=4, in_channels=4, out_channels=4, block_out_channels=(4, 8),
        layers_per_block=1, norm_num_groups=2, cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 6,
    )  # fmt: skip
    with artifact.publish(folder, "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler().save_pretrained(draft.folder / "scheduler")
        for name, text in EXTRA.items():
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


def moments(slot: str, tensor: torch.Tensor) -> torch.Tensor:
    """Made-up moments that differ by slot."""
    return tensor * {MASTER: 1.0, "exp_avg": 0.5, "exp_avg_sq": 0.25}[slot]


class Export:
    """A checkpoint of given parameters, and its export."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.checkpoint, self.base = folder / "checkpoint", base
        self.weights, self.state = folder / "weights", folder / "state"

    def __call__(self, trained: Trained, dtype: str = "fp32") -> Trained:
        """Export these parameters, which lie in two ranks' fragments; the weights as written."""
        with artifact.publish(self.checkpoint, CHECKPOINT) as draft:
            spans = []
            for rank in (0, 1):
                share = [self._fragment(name, trained[name], rank) for name in trained]
                spans.append(write_rank(draft.folder, rank, share))
            shapes = {name: list(tensor.shape) for name, tensor in trained.items()}
            write_position(draft.folder, POSITION, shapes, SLOTS, spans)
            (draft.folder / "records").mkdir()
            (draft.folder / "records" / "training_log.jsonl").write_text("{}\n")
        export_weights(self.config(dtype), self.checkpoint, self.base, self.weights, self.state)
        return load_file(self.weights / "unet" / "diffusion_pytorch_model.safetensors")

    @staticmethod
    def _fragment(name: str, tensor: torch.Tensor, rank: int) -> Fragment:
        start = rank * (tensor.numel() // 2)
        part = slice(start, None if rank else tensor.numel() // 2)
        flat = {slot: moments(slot, tensor).flatten()[part] for slot in SLOTS}
        return Fragment(name, start, flat)

    @staticmethod
    def config(dtype: str) -> RunConfig:
        """A configuration that exports this type."""
        raw = {
            "run": "tiny",
            "base": "nano",
            "data": {"source": "digits"},
            "phases": [{"name": "plain", "until": 12}],
            "export": {"dtype": dtype},
        }
        return parse_config(raw, "test")

    def refusal(self, trained: Trained, dtype: str = "fp32") -> str:
        """The message of a refused export, after which nothing is published."""
        with pytest.raises(PipelineError) as caught:
            self(trained, dtype)
        assert not self.weights.exists()
        assert not self.state.exists()
        assert [p.name for p in self.checkpoint.parent.iterdir()] == ["checkpoint"]
        return str(caught.value)


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
    assert state.artifact.path("records/training_log.jsonl").read_text() == "{}\n"


def test_other_parts_are_linked(export: Export, trained: Trained, base: Path) -> None:
    """The folder is a whole pipeline without a second copy; the base's U-Net is not in it."""
    export(trained)
    found = artifact.read(export.weights, "weights")
    unet = {"unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
    others = {*EXTRA, "model_index.json", "scheduler/scheduler_config.json"}
    assert set(found.files) == unet | others
    for name in others:
        assert found.path(name).samefile(base / name)
    assert not (export.weights / "unet/config.json").samefile(base / "unet/config.json")
    assert found.parents["base"]["identity"] == artifact.read(base, "base").identity
    assert found.made_by["engine"] == POSITION.engine


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
    assert f"the checkpoint {export.checkpoint} is damaged" in text


def test_what_fp16_cannot_hold_is_explained(export: Export, trained: Trained) -> None:
    """70000 is a fine weight, but not in fp16; bf16 and fp32 take it."""
    trained["conv_in.weight"] = change(70000)(trained["conv_in.weight"])
    text = export.refusal(trained, "fp16")
    assert "conv_in.weight: 1 values are not finite in torch.float16" in text
    assert "choose export.dtype fp32 or bf16" in text
    assert export(trained, "bf16")["conv_in.weight"].max() == 70144


def test_a_missing_parameter_is_named(export: Export, trained: Trained) -> None:
    """A checkpoint of another model does not become weights with holes."""
    shape = tuple(trained.pop("conv_out.weight").shape)
    text = export.refusal(trained)
    assert f"conv_out.weight: absent in the trained tensors, {shape} by " in text
    assert "export the weights with the base model that the training started from" in text


def test_a_strange_parameter_is_named(export: Export, trained: Trained) -> None:
    """A name that the model has not, and another shape than the model's."""
    trained["lora.weight"] = torch.ones(2)
    assert "lora.weight: (2,) in the trained tensors, absent by " in export.refusal(trained)
    trained.pop("lora.weight")
    trained["conv_in.bias"] = torch.ones(5)
    assert "conv_in.bias: (5,) in the trained tensors, (4,) by " in export.refusal(trained)


def test_an_empty_parameter_is_named(export: Export, trained: Trained) -> None:
    """A gathered parameter that was not gathered has no elements."""
    trained["conv_in.bias"] = torch.ones(0)
    assert "conv_in.bias: empty tensor of shape [0]" in export.refusal(trained)


def test_what_reads_back_otherwise_is_not_published(
    export: Export, trained: Trained, monkeypatch
) -> None:
    """The written file is loaded again and compared before it appears."""
    from zerotrain.families import sdxl

    save = sdxl.save_file

    def damaged(tensors: Trained, path: Path, **options: object) -> None:
        tensors = dict(tensors)
        tensors["conv_in.bias"] = tensors["conv_in.bias"] + 1e-3
        save(tensors, path, **options)

    monkeypatch.setattr(sdxl, "save_file", damaged)
    text = export.refusal(trained)
    assert "conv_in.bias reads back otherwise than it was written" in text


def test_a_refused_export_keeps_the_one_before(export: Export, trained: Trained) -> None:
    """Good weights are not lost to a bad checkpoint."""
    export(trained)
    before = artifact.read(export.weights, "weights").identity
    trained["conv_in.bias"] = change(float("nan"))(trained["conv_in.bias"])
    with pytest.raises(PipelineError):
        export(trained)
    assert artifact.read(export.weights, "weights").identity == before
