"""Datasets of short conversations, and their caches."""

from __future__ import annotations

from pathlib import Path

from tests.families.texts import build

from zerotrain import artifact
from zerotrain.artifact import file_sha256
from zerotrain.cache.reader import TokenCache, read_cache
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.data import dataset_folder
from zerotrain.data.conversation import TEXTS, Message, conversation
from zerotrain.models.base import part_digests
from zerotrain.stages.cache_latents import CacheSettings, cache_latents

TALKS = [
    ("1+2=", "3"),
    ("2+2=", "4"),
    ("who is it?", "it is me"),
    ("what is 3+3=", "6"),
    ("a", "b"),
]


def run_config(family: str = "causal_lm", *, packing: bool = False, **cache: int) -> RunConfig:
    train = {"max_length": 32, **({"packing": True} if packing else {})}
    raw = {
        "run": "r", "family": family, "base": "nano", "data": {"source": "sums"}, "train": train,
        "cache": cache, "phases": [{"name": "one", "until": 1}],
    }  # fmt: skip
    return parse_config(raw, "test")


def publish_dataset(folder: Path, talks=TALKS, *, holdout: int = 1) -> Path:
    """A dataset whose last conversations are held out."""
    samples = []
    for number, (question, answer) in enumerate(talks):
        share = 0.999999 if number >= len(talks) - holdout else 0.0
        messages = [Message("user", question), Message("assistant", answer)]
        samples.append(conversation(f"line {number}", messages, share))
    dataset_folder.publish_dataset(folder, TEXTS, samples, repeats=2)
    return folder


def cached(tmp_path: Path, base: Path, talks=TALKS, **options) -> TokenCache:
    """The cache of conversations; a second call in the same folder continues from the first."""
    dataset = publish_dataset(tmp_path / "data", talks)
    cache_latents(CacheSettings.of(run_config(**options)), 32, dataset, base, tmp_path / "cache")
    found = read_cache(tmp_path / "cache")
    assert isinstance(found, TokenCache)
    return found


def publish_language(family: str, folder: Path) -> Path:
    """Publish a nano language model as a base."""
    with artifact.publish(folder, "base") as draft:
        build(family, draft.folder)
        draft.known = {p.name: file_sha256(p) for p in draft.folder.iterdir()}
        draft.content = {"family": family, "parts": part_digests(draft.known)}
    return folder
