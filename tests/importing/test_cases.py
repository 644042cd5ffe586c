"""The peers' own configurations and commands, by their facts: what is imported, and why not."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.import_cases import GOLDEN, PEERS, Peer, golden_text, read_facts, run


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.program)
def test_every_case_has_its_golden_outcome(
    peer: Peer, generated: Callable[[Path, str], None]
) -> None:
    """Our values, or every cause; `make import-cases` holds its count to the same file."""
    outcomes = {case.path: run(case) for case in read_facts(peer)}
    generated(GOLDEN / peer.file, golden_text(outcomes))


PAGE = Path(__file__).parents[2] / "docs" / "importing.md"
GROUPS = {
    "inputs": ("conditioning", "extra_inputs", "cond_image", "kontext, which", "zero_cond_t"),
    "parameters": ("trainable_models", "controlnet", "flux_lora_target", "lora_base_model"),
    "text": ("train_text_encoder",),
    "flip": ("random_flip",),
    "schedule": ("EDM noise schedule",),
    "method": ("tread_config", "task", "loss", "distill"),
    "model": ("is of no family",),
    "adapter": ("preset_lora", "lora_checkpoint", "init_lora"),
    "several": ("trainings are as many runs",),
    "precision": ("fp8", "quantiz"),
}
"""Parts of the causes, by what is missing here; the first group that fits counts."""
TITLES = {
    "inputs": "the model reads inputs that are not offered (ControlNet, IP-Adapter, layers, masks)",
    "several": "two trainings in one script",
    "parameters": "another model next to the denoiser is trained (ControlNet, IP-Adapter)",
    "text": "text encoders are trained",
    "flip": "images are flipped at random",
    "schedule": "the base has an EDM noise schedule",
    "method": "another training method",
    "model": "an architecture that is not offered",
    "adapter": "another adapter is fused into the base first",
    "precision": "weights are kept in fewer bits",
    "other": "other causes",
}


def group_of(cause: str) -> str:
    """What is missing here, by the first part of a group in the cause."""
    found = (name for name, parts in GROUPS.items() if any(part in cause for part in parts))
    return next(found, "other")


def test_the_page_has_the_counts_by_cause(generated: Callable[[Path, str], None]) -> None:
    """Of the golden files."""
    lines = ["| Program | Imported | Not imported, by cause |", "|---|---|---|"]
    for peer in PEERS:
        cases = json.loads((GOLDEN / peer.file).read_text())
        taken = sum("values" in case for case in cases.values())
        causes: Counter[str] = Counter()
        for case in cases.values():
            causes.update({group_of(cause) for cause in case.get("causes", ())})
        ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
        said = "; ".join(f"{TITLES[name]}: {count}" for name, count in ranked)
        lines.append(f"| {peer.program} `{peer.commit[:8]}` | {taken} of {len(cases)} | {said} |")
    begin, end = "<!-- cases: begin -->", "<!-- cases: end -->"
    page = PAGE.read_text()
    inside = f"{begin}\n" + "\n".join(lines) + f"\n{end}"
    generated(PAGE, re.sub(f"{begin}.*{end}", lambda _: inside, page, flags=re.S))
