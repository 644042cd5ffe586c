"""The code that is shown for conditioning images: run, it gives what `zerotrain sample` gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from tests.builders.exports import Export
from tests.builders.images import make_pictures, publish_nano
from tests.formats.commands import code_of, join_lines, run_code

from zerotrain.export.formats.loading_code import SIDE as DEFAULT_SIDE
from zerotrain.export.formats.loading_code import loading_code
from zerotrain.export.options import SampleOptions
from zerotrain.export.sample import sample
from zerotrain.models.base import README
from zerotrain.models.families.conditioning import IMAGE_EMBEDDER, REDUX

SIDE = 32
"""Pixels; the pipelines of editing scale to multiples of it."""
LORA = {"lora": {"rank": 4, "alpha": 6.0, "target_modules": ["to_q", "to_v"]}}
CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "kontext": ("flux", "FluxKontextPipeline", LORA, 1),
    "fill": ("flux", "FluxFillPipeline", {}, 2),
    "redux": ("flux", REDUX, LORA, 1),
    "edit": ("qwen_image", "QwenImageEditPipeline", LORA, 1),
    "edit-plus": ("qwen_image", "QwenImageEditPlusPipeline", {}, 2),
}
"""Family, pipeline, what is trained, and the number of conditioning images."""
PROMPT = "a red house"
Weights = Callable[[str], Path]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Weights of a case, far from the base's and written by the export itself."""
    folder = tmp_path_factory.mktemp("conditioned")

    def make(name: str) -> Path:
        family, pipeline, settings, _ = CASES[name]
        export = Export(folder / name, folder / name / "base")
        if not export.weights.exists():
            publish_nano(family, export.base, side=SIDE, steps=2, pipeline=pipeline)
            export.settings = {"family": family, "train": {"resolution": SIDE}, **settings}
            export.export()
        return export.weights

    return make


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """A wide image and a square one of the size that is sampled, half of which is light."""
    wide = Image.new("RGB", (72, 40))
    wide.paste(make_pictures(40, 1)[0], (16, 0))
    made = [wide, make_pictures(SIDE, 8)[3].rotate(90)]
    files = [tmp_path / name for name in ("input.png", "mask.png")]
    for file, image in zip(files, made, strict=True):
        image.save(file)
    return files


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FluxFillPipeline takes the posterior's mode, where it draws a sample."""
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda posterior, generator=None: posterior.mode()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kontext", "fill", "edit-plus"])
def test_the_code_gives_what_our_own_command_gives(
    weights, inputs, modes, tmp_path, monkeypatch, name
):
    """Pixel for pixel, and not what it gives of another image."""
    family, pipeline, _, count = CASES[name]
    monkeypatch.setattr(  # the code changes them
        pipeline_qwenimage_edit, "calculate_dimensions",
        pipeline_qwenimage_edit.calculate_dimensions,
    )  # fmt: skip
    monkeypatch.setattr(
        pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE
    )
    folder, inside = weights(name), tmp_path / "weights"
    shutil.copytree(folder, inside)
    files = [str(file) for file in inputs[:count]]
    code = loading_code(inside, family, PROMPT, at=".", resolution=SIDE, images=files)
    assert f"{pipeline}.from_pretrained" in join_lines(code)
    assert hasattr(diffusers, pipeline)

    def made(*images: Path) -> bytes:
        (file,) = sample(
            SampleOptions(
                folder, PROMPT, resolution=str(SIDE), image=list(images), out=tmp_path / "samples"
            )
        )
        return Image.open(file).tobytes()

    found = run_code(code, inside, monkeypatch)
    assert found == made(*inputs[:count])
    assert found != made(*[inputs[1]] * count)


@pytest.mark.parametrize("name", ["kontext", "fill", "redux", "edit", "edit-plus"])
def test_the_readme_names_files_for_the_images_and_the_command_has_them(tmp_path, name):
    """At the side that the pipeline has by itself, which is not changed."""
    family, pipeline, _, _ = CASES[name]
    written = "FluxPipeline" if pipeline == REDUX else pipeline
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{written}"}}')
    if pipeline == REDUX:
        (tmp_path / IMAGE_EMBEDDER).mkdir()
    code = loading_code(tmp_path, family, "p", at=".")
    assert f"resize(({DEFAULT_SIDE}, {DEFAULT_SIDE})" in code
    assert 'load_square("input.png")' in code
    assert ('load_square("mask.png")' in code) == (name == "fill")
    assert "max_area" not in code
    assert "edit." not in code.replace("edit.py", "")
    hub = loading_code(tmp_path, family, "p", repo="me/edits")
    assert "zerotrain" not in hub
    assert ("needs torchvision" in hub) == (family == "qwen_image")


def test_what_no_pipeline_of_diffusers_takes_is_reported(tmp_path):
    """Two images of Kontext, and images next to the plain Qwen-Image."""
    for family, pipeline in (("flux", "FluxKontextPipeline"), ("qwen_image", "QwenImagePipeline")):
        (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{pipeline}"}}')
        code = loading_code(tmp_path, family, "p", images=["a.png", "b.png"])
        assert "# diffusers has no pipeline that takes these conditioning images" in code
        assert "load_square" not in code


@pytest.mark.slow
def test_of_redux_an_empty_prompt_is_zeros(weights, inputs, tmp_path, monkeypatch):
    """From the code of the README, by the prompt alone: the image of `sample`, and no other's."""
    folder, inside = weights("redux"), tmp_path / "weights"
    shutil.copytree(folder, inside)
    shutil.copy(inputs[0], inside / "input.png")
    readme = code_of((folder / README).read_text()).replace("a prompt like your captions", "")
    code = loading_code(folder, "flux", "", at=".", resolution=SIDE)
    assert join_lines(readme) == join_lines(code)
    (made,) = sample(
        SampleOptions(folder, "", resolution=str(SIDE), image=inputs[:1], out=tmp_path / "samples")
    )
    assert run_code(code, inside, monkeypatch) == Image.open(made).tobytes()
    text = code.replace("if not prompt:", "if False:")
    assert run_code(text, inside, monkeypatch) != Image.open(made).tobytes()


@pytest.mark.parametrize("method", [False, True], ids=["lora", "adapter"])
def test_code_of_redux_on_the_hub_takes_its_parts_from_there(tmp_path, method):
    """From the repository, or from the copy that an adapter of peft is read from."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / IMAGE_EMBEDDER).mkdir()
    if method:
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").touch()
    code = loading_code(tmp_path, "flux", "p", repo="me/styles", max_sequence_length=300)
    compile(code, "snippet", "exec")
    assert "zerotrain" not in code
    place = "folder" if method else '"me/styles"'
    assert f"from_pretrained({place}, subfolder=part" in code
    assert code.count("max_sequence_length=300") == 1
    assert join_lines(
        'encode("p", load_square("input.png"), max_sequence_length=300)'
    ) in join_lines(code)


@pytest.mark.slow
def test_the_readme_of_weights_is_that_code(weights):
    folder = weights("kontext")
    readme = (folder / README).read_text()
    code = loading_code(folder, "flux", "a prompt like your captions", at=".", resolution=SIDE)
    assert code_of(readme) == code
    line = "zerotrain sample . 'a prompt like your captions' --image input.png --resolution 32\n"
    assert line in readme
