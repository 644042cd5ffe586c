"""Checkpoints of given parameters, and their export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.builders.models import make_trained
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.stages.export_weights import ExportSettings, export_weights
from zerotrain.state.checkpoint import KIND as CHECKPOINT
from zerotrain.state.checkpoint import Fragment, write_position, write_rank
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.state.state import State
from zerotrain.training.checkpointing.conditions import manifest_content

SLOTS = [MASTER, "exp_avg", "exp_avg_sq"]
POSITION = make_position(
    run="tiny", lr_scheduler_steps=20, engine={"preset": "zero2_offload", "zero_stage": 2}
)
Trained = dict[str, torch.Tensor]


def moments(slot: str, tensor: torch.Tensor) -> torch.Tensor:
    """Made-up moments that differ by slot."""
    return {
        MASTER: tensor, "exp_avg": 0.5 * tensor, "exp_avg_sq": tensor**2, EMA_SLOT: 0.9 * tensor
    }[slot]  # fmt: skip


class Export:
    """A checkpoint of given parameters, and its export."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.position = POSITION
        self.checkpoint, self.base = folder / "checkpoint", base
        self.weights, self.state = folder / "weights", folder / "state"
        self.moments = moments
        self.settings: dict[str, Any] = {}
        self.slots = SLOTS

    def __call__(self, trained: Trained, dtype: str = "fp32") -> Trained:
        """Export these parameters, which lie in two ranks' fragments; the weights as written."""
        folder = self.export(trained, dtype)
        return load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")

    def export(self, trained: Trained | None = None, dtype: str = "fp32") -> Path:
        """The weights folder of these parameters; by default of some far from the base's."""
        config = self.config(dtype)
        if trained is None:
            trained = make_trained(config.family, self.base, config.adapter_values())
        self.save(trained)
        settings = ExportSettings.of(config)
        export_weights(settings, self.checkpoint, self.base, self.weights, self.state)
        return self.weights

    def save(self, trained: Trained) -> None:
        """Publish the checkpoint."""
        with artifact.publish(self.checkpoint, CHECKPOINT) as draft:
            spans = []
            for rank in (0, 1):
                share = [self._fragment(name, trained[name], rank) for name in trained]
                spans.append(write_rank(draft.folder, rank, share))
            shapes = {name: list(tensor.shape) for name, tensor in trained.items()}
            write_position(draft.folder, self.position, shapes, self.slots, spans)
            draft.content = manifest_content(self.settings.get("train", {}))
            (draft.folder / "records").mkdir()
            (draft.folder / "records" / "metrics.jsonl").write_text("{}\n")

    def _fragment(self, name: str, tensor: torch.Tensor, rank: int) -> Fragment:
        start = rank * (tensor.numel() // 2)
        part = slice(start, None if rank else tensor.numel() // 2)
        flat = {slot: self.moments(slot, tensor).flatten()[part] for slot in self.slots}
        return Fragment(name, start, flat)

    def config(self, dtype: str) -> RunConfig:
        """A configuration that exports this type."""
        raw = {
            "run": "tiny",
            "base": "nano",
            "data": {"source": "digits"},
            "phases": [{"name": "plain", "until": 12}],
            "export": {"dtype": dtype},
            **self.settings,
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


IMPORTING_RUN = {
    "run": "tiny", "base": "nano", "data": {"images": "photos"},
    "train": {"global_batch_size": 4}, "phases": [{"name": "on", "until": 10}],
}  # fmt: skip


def assert_slots(state: State, moments: Any) -> None:
    """Each parameter has its own."""
    assert sorted(state.slots) == ["exp_avg", "exp_avg_sq", "master"]
    for name, entry in moments.items():
        assert torch.equal(state.tensor(name, "exp_avg"), entry["exp_avg"]), name
