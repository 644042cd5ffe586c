"""Qwen-Image and Qwen-Image-Edit."""

from zerotrain.config.families import (
    FLOW_MATCHING,
    Conditioning,
    FamilySpec,
    Prompt,
    Titles,
)

SPEC = FamilySpec(
    name="qwen_image",
    example="Qwen/Qwen-Image",
    parts=("processor", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"),
    classes={
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    },
    optional_parts=("processor",),
    text_parts=("text_encoder", "tokenizer", "processor"),
    pipeline="QwenImagePipeline",
    objective=FLOW_MATCHING,
    pixels=True,
    prompt=Prompt("tokenizer", 512, 1024),
    conditioning={
        "QwenImagePipeline": Conditioning(0, None),
        "QwenImageEditPipeline": Conditioning(1, 1, in_prompt=True),
        "QwenImageEditPlusPipeline": Conditioning(1, None, in_prompt=True),
    },
    conditioned_preset="QwenImageEditPlusPipeline",
    no_gradient=r"transformer_blocks\.\d+\.(attn\.to_add_out|txt_mlp)\.",
    patch=2,
    packed=True,
    negative_prompt=True,
    titles=Titles(
        "qwen-image",
        "https://github.com/QwenLM/Qwen-Image",
        "qwen_image",
        "networks.lora_qwen_image",
    ),
)
