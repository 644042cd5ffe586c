"""Exported language models of both families, whole and with an adapter, by the export itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.families.test_language import logits
from tests.families.texts import LORA, batch, build
from tests.stages.test_export_weights import Export

from zerotrain import artifact
from zerotrain.data.conversation import Message
from zerotrain.families import TextFamily, load_family
from zerotrain.families.lora import add_adapter
from zerotrain.stages.export_weights import export_weights

ADAPTER = {"rank": 4, "alpha": 6.0}
"""alpha is not rank."""
PROMPT = "1+2=?"
MESSAGES = [Message("user", PROMPT)]


class Language(NamedTuple):
    """Folders of one family."""

    name: str
    base: Path
    whole: Path
    lora: Path

    @property
    def family(self) -> TextFamily:
        return load_family(self.name)  # type: ignore[return-value]

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """What a model says of a batch."""
        return logits(model, batch(self.name, self.base), self.name)


def settings(name: str, lora: bool) -> dict[str, Any]:
    """The run's configuration beside phases and export."""
    adapter = {"lora": {**ADAPTER, "target_modules": list(LORA[name])}} if lora else {}
    return {"family": name, "data": {"source": "sums"}, **adapter}


def publish_base(name: str, folder: Path, called: str = "nano") -> Path:
    """A base model, as build_base publishes it."""
    with artifact.publish(folder, "base") as draft:
        build(name, draft.folder)
        draft.content = {"family": name, "base": called, "revision": None, "commit": None}
    return folder


def trained(name: str, base: Path, *, lora: bool) -> dict[str, torch.Tensor]:
    """Parameters far from the base's."""
    model = load_family(name).load_model(base)
    if lora:
        add_adapter(model, seed=0, dropout=0.0, target_modules=LORA[name], **ADAPTER)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    return {
        n: p.detach() + 0.2 * torch.randn(p.shape, generator=draw)
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def exported(name: str, folder: Path) -> Language:
    """Base, weights of the whole model, weights of a LoRA."""
    base = publish_base(name, folder / "base")
    made = {}
    for kind in ("whole", "lora"):
        export = Export(folder / kind, base)
        export.settings = settings(name, kind == "lora")
        export.save(trained(name, base, lora=kind == "lora"))
        config = export.config("fp32")
        export_weights(config, export.checkpoint, base, export.weights, export.state)
        made[kind] = export.weights
    return Language(name, base, **made)
