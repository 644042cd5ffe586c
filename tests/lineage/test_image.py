"""An image is followed to the weights that it went into."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.builders.datasets import edit_samples
from tests.lineage.conftest import trace

from zerotrain import artifact
from zerotrain.artifact.columns import Columns
from zerotrain.cache.layout import Entry, read_index, write_index
from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.run.lineage.trace import IMAGES_OF_ENTRY, _seen_in
from zerotrain.stages.prepare_dataset import prepare_dataset

RUN = "results/cats"


def samples() -> dict[str, str]:
    """Split by file of the dataset as it lies here."""
    return {one.file: one.split for one in read_dataset(Path("results/data/cats")).samples}


def one_of(split: str) -> str:
    """An image of a split."""
    return next(file for file, found in samples().items() if found == split)


def uses(image: str) -> dict[str, Any]:
    """The JSON of an image's trace."""
    code, said = trace("--image", image, "--format", "json")
    found: dict[str, Any] = json.loads(said)
    assert found["known"] == (code == 0)
    return found


def test_an_image_is_known_by_its_content(chain: Path, tmp_path: Path) -> None:
    """Under any name: every weights folder made from it, with phases, steps and epochs."""
    file = one_of("train")
    copied = shutil.copy(f"photos/{file}", tmp_path / "other.ppm")
    found = uses(str(copied))
    assert found["datasets"] == {"results/data/cats": {file: "train"}}
    assert {use["weights"]: use["trained"] for use in found["weights"]} == {
        f"{RUN}/offload/weights": True, f"{RUN}/plain/weights": True, "results/single": True,
    }  # fmt: skip
    phases = found["weights"][0]["phases"]
    assert [(one["name"], one["first_step"], one["last_step"]) for one in phases] == [
        ("plain", 0, 3), ("offload", 3, 7),
    ]  # fmt: skip
    # Two samples a step, three in an epoch.
    assert [one["epochs"] for one in phases] == [2.0, 2.67]
    code, said = trace("--image", str(copied))
    assert code == 0
    assert "phase offload (torch): steps 4 to 7, 2.67 epochs" in said
    assert said.splitlines()[-1] == "3 of 3 weights that know it were trained on it"


def test_an_image_that_was_held_out_is_reported_as_such(chain: Path) -> None:
    """It is known to the weights, and no step was taken on it."""
    found = uses(f"photos/{one_of('holdout')}")
    assert [use["trained"] for use in found["weights"]] == [False] * 3
    said = trace("--image", f"photos/{one_of('holdout')}")[1]
    assert said.splitlines()[-1] == "0 of 3 weights that know it were trained on it"


def test_an_image_of_no_dataset_is_a_sentence(chain: Path) -> None:
    """Exit code 1."""
    Path("other.ppm").write_bytes(b"other")
    code, said = trace("--image", "other.ppm")
    assert code == 1
    assert re.fullmatch(
        r"other.ppm \(sha256 \w{12}\): no dataset under results/ knows this image\n", said
    )


def test_a_dataset_that_has_lost_the_image_hides_nothing(chain: Path) -> None:
    """The cache that weights were trained on knows it, whatever the dataset says by now."""
    file = one_of("train")
    edit_samples(
        Path("results/data/cats"), lambda samples: [one for one in samples if one.file != file]
    )
    found = uses(f"photos/{file}")
    assert found["datasets"] == {}
    assert len(found["weights"]) == 3


def test_weights_whose_chain_is_cut_are_named(chain: Path) -> None:
    """What is unknown is not left out."""
    shutil.rmtree("results/data/cats/cache")
    found = uses(f"photos/{one_of('train')}")
    assert found["weights"] == []
    assert found["untold"] == [
        f"{RUN}/offload/weights", f"{RUN}/plain/weights", "results/single",
    ]  # fmt: skip


def test_a_manifest_that_cannot_be_read_may_be_of_weights(chain: Path) -> None:
    """So it is named."""
    Path(f"{RUN}/plain/weights/manifest.json").write_text("{", encoding="utf-8")
    found = uses(f"photos/{one_of('train')}")
    assert [use["weights"] for use in found["weights"]] == [
        f"{RUN}/offload/weights",
        "results/single",
    ]
    assert found["untold"] == [f"{RUN}/plain/weights"]


def test_only_what_counts_is_asked(chain: Path, tmp_path: Path) -> None:
    """A run on another disk, but not what a killed writer left; no copy twice."""
    shutil.copytree(f"{RUN}/plain/weights", f"{RUN}/plain/.weights.new-1")
    Path(RUN).rename(tmp_path / "cats")
    Path(RUN).symlink_to(tmp_path / "cats")
    Path("results/cats/again").symlink_to(tmp_path / "cats")
    found = uses(f"photos/{one_of('train')}")
    assert [use["weights"] for use in found["weights"]] == [
        f"{RUN}/offload/weights", f"{RUN}/plain/weights", "results/single",
    ]  # fmt: skip


def test_equal_images_are_all_named(chain: Path) -> None:
    """Each under its name; and where nothing was trained yet, it is reported."""
    file = one_of("train")
    shutil.copy(f"photos/{file}", "photos/same.ppm")
    Path("photos/same.txt").write_text("the same", encoding="utf-8")
    prepare_dataset(DataConfig(images="photos", holdout=0.5), Path("results/data/more"))
    found = uses("photos/same.ppm")
    assert found["datasets"]["results/data/more"] == {file: "train", "same.ppm": "train"}
    shutil.rmtree(RUN)
    shutil.rmtree("results/single")
    assert trace("--image", "photos/same.ppm")[1].endswith("no weights under results/ know it\n")


def test_weights_fine_tuned_from_own_weights_have_seen_their_images(chain: Path) -> None:
    """Their base leads on to the run before."""
    weights = artifact.read(Path(f"{RUN}/offload/weights"), "weights")
    with artifact.publish(Path("results/dogs/base"), "base") as draft:
        tensors = weights.path("unet/model.safetensors").read_text()
        (draft.folder / "model.safetensors").write_text(tensors)
        draft.content = {"family": "sdxl", "base": f"{RUN}/offload/weights"}
    base = artifact.read(Path("results/dogs/base"), "base")
    parents = {"base": base, "checkpoint": artifact.read(Path("results/dogs/base"), "base")}
    with artifact.publish(Path("results/dogs/w"), "weights", parents=parents) as draft:
        draft.content = {"family": "sdxl", "step": 1}
    (use,) = (
        use
        for use in uses(f"photos/{one_of('train')}")["weights"]
        if use["weights"] == "results/dogs/w"
    )
    assert [phase["name"] for phase in use["phases"]] == ["plain", "offload"]


def test_the_flowchart_leads_from_the_image_to_weights(chain: Path) -> None:
    """An arrow for each step of each way."""
    said = trace("--image", f"photos/{one_of('train')}", "--format", "mermaid")[1]
    assert said.startswith("flowchart LR\n")
    assert len(re.findall(r"^  \w+ --> \w+$", said, re.M)) == 8


def test_a_conditioning_image_is_followed_as_an_image_is(chain: Path) -> None:
    """To the samples that read it: of a dataset, and of a cache whose dataset has changed since."""
    before = Path("before")
    shutil.copytree("photos", before)
    (before / "cat.ppm").write_bytes((before / "cat.ppm").read_bytes() + b"\n")
    data = {"images": "photos", "conditioning_images": "before"}
    prepare_dataset(DataConfig.model_validate(data), Path("results/data/edits"))
    found = uses("before/cat.ppm")
    assert found["datasets"] == {"results/data/edits": {"cat.ppm": "train"}}
    assert found["weights"] == []
    cache = Path("results/data/cats/cache/64")
    index = read_index(cache)
    seen = {"conditioning": "0" * 64, "conditioning_sha256": (found["sha256"],)}
    entries = [
        replace(one, **seen) if one.file == "cat.ppm" else one  # type: ignore[arg-type]
        for one in index.entries
    ]
    write_index(cache, replace(index, entries=entries))
    split = samples()["cat.ppm"]
    used = uses("before/cat.ppm")["weights"]
    assert [use["phases"][0]["samples"] for use in used] == [{"cat.ppm": split}] * 3


def test_an_image_is_found_in_the_columns_of_a_cache() -> None:
    """As an image of the train or the holdout split, or as a conditioning image."""
    image, other, seen = (artifact.digest(name) for name in ("image", "other", "seen"))
    rest: Any = ("caption", "latents", "text", (8, 8), (0, 0), (8, 8))
    entries = [
        Entry("a.png", image, *rest, "train", conditioning_sha256=(other, seen)),
        Entry("b.png", other, *rest, "holdout"),
        Entry("c.png", image, *rest, "train"),
    ]
    columns = Columns.of(Entry, entries)

    def found(sha256: str) -> Any:
        return _seen_in(columns, IMAGES_OF_ENTRY, sha256)

    assert found(image) == {"a.png": "train", "c.png": "train"}
    assert found(other) == {"a.png": "train", "b.png": "holdout"}
    assert found(artifact.digest("none")) == {}
