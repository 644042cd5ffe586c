"""Stable Diffusion 1, a U-Net that is given a caption by one CLIP encoder; with toy_spec.py."""

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel

from zerotrain.config.families import FAMILIES
from zerotrain.models.families import nano
from zerotrain.models.families.ddpm import DenoisingObjective, NoiseSchedule, read_noise_schedule
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.identity import identity_autoencoder
from zerotrain.models.families.pipelines import PipelineEncoders, latents_of, pipeline_class


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


class Toy(DiffusionFamily):
    def load_encoders(self, base, device, max_sequence_length=None, dtype=torch.float32):
        return ToyEncoders(self.spec.pipeline, base, device, dtype, "unet")

    def objective(self, base, settings=None):
        return ToyObjective(read_noise_schedule(base / "scheduler"))

    def shape_objective(self, config):
        return ToyObjective(NoiseSchedule(torch.ones(1), "epsilon"))

    def build_preset(self, preset, dataset, images, seed, out, **_):
        torch.manual_seed(seed)
        clip = nano.train_tokenizer([sample.caption for sample in dataset.split("train")])
        text, vae = CLIPTextModel(nano.text_config(clip, 64)), identity_autoencoder("AutoencoderKL")
        blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
        widths = {"block_out_channels": [32], "cross_attention_dim": 64}
        unet = UNet2DConditionModel(images[0].width, 3, 3, **blocks, **widths)
        made = pipeline_class(self.spec.pipeline)(
            vae, text, clip, unet, DDIMScheduler(), None, None
        )
        made.save_pretrained(out)


FAMILY = Toy(FAMILIES["toy"])
