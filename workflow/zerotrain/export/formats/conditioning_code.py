"""Python code that gives conditioning images to a pipeline of diffusers; see loading_code.

The pipelines scale images themselves, to about 1024 x 1024 pixels. The code crops and scales them
as in training, and keeps the pipeline from scaling them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.models.families.conditioning import REDUX, read_pipeline

SIDE = 1024
"""Side in pixels that the pipelines scale to, and default side of their images."""
FILES: Mapping[str, tuple[str, ...]] = {
    "FluxKontextPipeline": ("input.png",),
    "FluxFillPipeline": ("input.png", "mask.png"),
    REDUX: ("input.png",),
    "QwenImageEditPipeline": ("input.png",),
    "QwenImageEditPlusPipeline": ("input.png",),
}
"""Names of the files in the code, for the pipelines that are shown with conditioning images."""
EDIT = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
SQUARE = """

def load_square(file):  # cut and scaled as in training
    image = load_image(file)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize(({side}, {side}), Resampling.LANCZOS, box=box)


"""
NONE_OF_DIFFUSERS = """\
# diffusers has no pipeline that takes these conditioning images; `zerotrain sample` takes them
"""
# FluxPriorReduxPipeline reads 512 tokens of any prompt, and an empty prompt as text. Its feature
# extractor is not in the folder, and scales images with torchvision in transformers 5.
REDUX_ENCODING = """\
def load(model, part):
    return model.from_pretrained({source}, subfolder=part, dtype=dtype).to(device)


@torch.no_grad()
def encode(prompt, image, **options):  # as in training: tokens of the text, then of the image
    encoder = load(SiglipVisionModel, "image_encoder")
    embedder = load(ReduxImageEncoder, "image_embedder")
    scaled = image.resize((encoder.config.image_size,) * 2, Resampling.BICUBIC)
    pixels = torch.tensor(numpy.array(scaled)[None]).movedim(-1, 1) / 127.5 - 1
    tokens = embedder(encoder(pixels.to(device, dtype)).last_hidden_state).image_embeds
    text, pooled, _ = pipeline.encode_prompt(prompt, **options)
    if not prompt:  # an empty prompt is zeros
        text, pooled = torch.zeros_like(text), torch.zeros_like(pooled)
    embeds = torch.cat([text, tokens], dim=1)
    return {{"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}}


"""
REDUX_IMPORTS = (
    "import numpy",
    "from PIL.Image import Resampling",
    "from diffusers import FluxPipeline, ReduxImageEncoder",
    "from diffusers.utils import load_image",
    "from transformers import SiglipVisionModel",
)
HUB_EDIT = """\
# The processor needs torchvision. diffusers 0.42 with transformers 5 gives tokens of images the
# positions of text; the training did not: https://github.com/huggingface/diffusers/issues/14194
"""
POSTERIOR = """\
# diffusers samples the latents of the masked image; the training took the posterior's mode
"""


@dataclass(frozen=True)
class ConditioningCode:
    """The parts of the code that conditioning images add.

    Attributes:
        pipeline: Name of the pipeline's class.
        imports: Lines of imports.
        loading: Arguments of from_pretrained.
        before: Lines before the pipeline is loaded.
        after: Lines after it.
        arguments: Arguments of the call.
        encoded: Images that `encode`, which `before` defines, takes after the prompt; its result
            replaces the prompt in the call. None if the call takes the prompt.
    """

    pipeline: str = "DiffusionPipeline"
    imports: tuple[str, ...] = ()
    loading: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    encoded: tuple[str, ...] = ()


def default_files(folder: Path) -> tuple[str, ...]:
    """Return names for a prompt's conditioning images; none for a folder shown without them."""
    index = folder / "model_index.json"
    return FILES.get(read_pipeline(folder) or "", ()) if index.is_file() else ()


def conditioning_code(
    folder: Path, files: Sequence[str], source: str, resolution: int | None, *, hub: bool
) -> ConditioningCode:
    """Return the parts of the code that conditioning images need.

    Args:
        folder: The weights folder.
        files: Their files; none for a prompt without any.
        source: The code's expression for the folder.
        resolution: Side of the image in pixels; None for SIDE.
        hub: Whether readers load the folder from the hub and do not have zerotrain.
    """
    if not files:
        return ConditioningCode()
    named = read_pipeline(folder) or ""
    if named == "FluxPipeline":
        named = (
            "FluxKontextPipeline"  # the same model with one image, which in-context training reads
        )
    if named not in FILES or (len(files) > 1 and named == "FluxKontextPipeline"):
        return ConditioningCode(after=NONE_OF_DIFFUSERS)
    side = resolution or SIDE
    squares = tuple(f"load_square({json.dumps(file, ensure_ascii=False)})" for file in files)
    before, after = SQUARE.format(side=side), ""
    if named == REDUX:
        before += REDUX_ENCODING.format(source=source)
        return ConditioningCode("FluxPipeline", REDUX_IMPORTS, before=before, encoded=squares)
    imports = [
        "from PIL.Image import Resampling",
        f"from diffusers import {named}",
        "from diffusers.utils import load_image",
    ]
    loading: dict[str, str] = {}
    arguments = {"image": squares[0]}
    if named == "FluxFillPipeline":
        arguments["mask_image"] = squares[1]
        before += POSTERIOR
    if named == "FluxKontextPipeline" and side != SIDE:
        arguments |= {"max_area": f"{side}**2", "_auto_resize": "False"}
    if named == "QwenImageEditPlusPipeline":
        arguments["image"] = f"[{', '.join(squares)}]"
    if named in EDIT and side != SIDE:
        module = {EDIT[0]: "pipeline_qwenimage_edit", EDIT[1]: "pipeline_qwenimage_edit_plus"}[
            named
        ]
        imports.append(f"from diffusers.pipelines.qwenimage import {module} as edit")
        before += (
            f"edit.calculate_dimensions = lambda *_: ({side}, {side}, None)\n"
            if named == EDIT[0]
            else f"edit.VAE_IMAGE_SIZE = {side}**2\n"
        )
    if named in EDIT and hub:
        before += HUB_EDIT
    elif named in EDIT:
        imports += [
            "from pathlib import Path",
            "from zerotrain.models.families.qwen_image_encoding import "
            "add_token_types, load_processor",
        ]
        loading["**"] = f'load_processor("{named}", Path({source}))'
        after = "add_token_types(pipeline.text_encoder)\n"
    return ConditioningCode(named, tuple(imports), loading, before, after, arguments)
