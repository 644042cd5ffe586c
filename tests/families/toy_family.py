"""Stable Diffusion 1, a U-Net that is given a caption by one CLIP encoder; with toy_spec.py."""

import torch

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    NoiseSchedule,
    read_noise_schedule,
)
from zerotrain.models.families.pipelines import PipelineEncoders, latents_of
from zerotrain.models.families.small_models import SmallPipeline, clip


class ToyEncoders(PipelineEncoders):
    def encode_images(self, pixels):
        return latents_of(self.vae, pixels)

    @torch.inference_mode()
    def encode_prompts(self, prompts):
        embeds, _ = self.prompt_pipeline.encode_prompt(list(prompts), None, 1, False)
        return {"prompt_embeds": embeds.cpu()}


class ToyObjective(DenoisingObjective):
    def predict(self, model, noisy, timesteps, batch):
        return model(noisy, timesteps, batch["prompt_embeds"], return_dict=False)[0]


def small_parts(spec):
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
    widths = {"block_out_channels": [32], "cross_attention_dim": spec.width}
    channels = dict.fromkeys(("in_channels", "out_channels"), spec.channels)
    text = clip(spec.tokenizers["tokenizer"], spec.width)
    unet = {"sample_size": spec.side // 4, **blocks, **widths, **channels}
    return {"text_encoder": text, "unet": unet}


class Toy(DiffusionFamily):
    small = SmallPipeline(
        tokenizers={"tokenizer": "clip"}, parts=small_parts, scheduler="DDIMScheduler", shifts=False
    )

    def load_encoders(self, base, device, max_sequence_length=None, dtype=torch.float32):
        return ToyEncoders(self.spec.pipeline, base, device, dtype, "unet")

    def objective(self, base, settings=None):
        return ToyObjective(read_noise_schedule(base / "scheduler"))

    def shape_objective(self, config):
        return ToyObjective(NoiseSchedule(torch.ones(1), "epsilon"))


FAMILY = Toy(FAMILIES["toy"])
