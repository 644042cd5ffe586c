"""FLUX.1: dev, schnell, Kontext, Fill, Redux."""

from zerotrain.config.families import (
    FLOW_MATCHING,
    Conditioning,
    FamilySpec,
    Prompt,
    Titles,
)

_TEXT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
_REDUX = {"image_embedder": "ReduxImageEncoder", "image_encoder": "SiglipVisionModel"}
SPEC = FamilySpec(
    name="flux",
    example="black-forest-labs/FLUX.1-dev",
    parts=("scheduler", *_TEXT, "transformer", "vae"),
    classes={
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
    },
    extra_parts=_REDUX,
    extra_pipeline="FluxPriorReduxPipeline",
    text_parts=(*_TEXT, *_REDUX),
    pipeline="FluxPipeline",
    objective=(*FLOW_MATCHING, "flux_guidance_value"),
    pixels=True,
    prompt=Prompt("tokenizer_2", 512, 512),
    conditioning={
        "FluxPipeline": Conditioning(0, None),
        "FluxKontextPipeline": Conditioning(0, None),
        # The image, and the mask of the area to fill.
        "FluxFillPipeline": Conditioning(2, 2),
        "FluxPriorReduxPipeline": Conditioning(1, 1, in_prompt=True, in_latents=False),
    },
    conditioned_preset="FluxKontextPipeline",
    token_routing=True,
    patch=2,
    packed=True,
    # The inputs of Fill and of control models have more.
    channels=("out_channels", "in_channels"),
    fused_layers=True,
    titles=Titles(
        "flux-1-dev",
        "https://github.com/black-forest-labs/flux",
        "flux1",
        "networks.lora_flux",
        {"not guidance_embeds": "flux-1-schnell"},
    ),
)
