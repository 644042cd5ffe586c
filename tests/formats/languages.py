"""Exported language models of both families, whole and with an adapter, by the export itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.builders.exports import Export
from tests.families.texts import LORA, batch, build, logits

from zerotrain import artifact
from zerotrain.data.conversation import Message
from zerotrain.models.families import load_family
from zerotrain.models.families.language import LanguageFamily

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
    loha: Path

    @property
    def family(self) -> LanguageFamily:
        return load_family(self.name)  # type: ignore[return-value]

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """What a model says of a batch."""
        return logits(model, batch(self.name, self.base), self.name)


def config_of(name: str, kind: str) -> dict[str, Any]:
    """The run's configuration in addition to phases and export, for weights of this kind."""
    layers = list(LORA[name])
    sections = {
        "lora": {"lora": {**ADAPTER, "target_modules": layers}},
        "loha": {"peft": {"peft_type": "LOHA", "r": 2, "alpha": 6, "target_modules": layers}},
    }
    return {"family": name, "data": {"source": "sums"}, **sections.get(kind, {})}


def publish_base(name: str, folder: Path, called: str = "nano") -> Path:
    """A base model, as build_base publishes it."""
    with artifact.publish(folder, "base") as draft:
        build(name, draft.folder)
        draft.content = {"family": name, "base": called, "revision": None, "commit": None}
    return folder


def exported(name: str, folder: Path) -> Language:
    """Base, and weights of the whole model, of a LoRA, of a LoHa."""
    base = publish_base(name, folder / "base")
    made = {}
    for kind in ("whole", "lora", "loha"):
        export = Export(folder / kind, base)
        export.settings = config_of(name, kind)
        made[kind] = export.export()
    return Language(name, base, **made)
