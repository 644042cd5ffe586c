"""Rows of the table: the flags of diffusers' scripts that train SDXL, SD3, Flux and Qwen-Image.

Their defaults are those of examples/dreambooth; examples/text_to_image has others where named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerotrain.importing.keys import Key, by_name, honoured, left_out, no_op, refused
from zerotrain.importing.keys_programs import EVALUATION, HUB, OWN_LAYOUT, TRACKERS

OPTIMIZER = "belongs to another optimizer: train.optimizer_args has its arguments"
PRIOR = "belongs to with_prior_preservation"
CROP = "each image has the corner of its own crop"
BIAS = "belongs to timestep_bias_strategy"

DIFFUSERS = by_name(
    [
        honoured("pretrained_model_name_or_path", "text", "base"),
        honoured("revision", "text", "revision"),
        left_out("variant", "text", "the base's main files are read"),
        refused("pretrained_vae_model_name_or_path", "text", "the base's own autoencoder encodes"),
        honoured("instance_data_dir", "text", "data.images"),
        honoured("train_data_dir", "text", "data.images"),
        left_out("dataset_name", "text", "name the images yourself: data.images"),
        no_op("dataset_config_name", "text", "belongs to dataset_name"),
        no_op("image_column", "text", "metadata.csv has file_name or image"),
        no_op("caption_column", "text", "metadata.csv has text or prompt"),
        no_op("cache_dir", "text", "the hub's own cache is used"),
        left_out(
            "instance_prompt",
            "text",
            "captions are files: write it into NAME.txt beside each image",
        ),
        honoured("repeats", "whole", "data.repeats", 1),
        left_out("max_train_samples", "whole", "every image of the folder is trained on"),
        refused("with_prior_preservation", "flag", "the loss is that of the images alone", False),
        no_op("class_data_dir", "text", PRIOR),
        no_op("class_prompt", "text", PRIOR),
        no_op("num_class_images", "whole", PRIOR),
        no_op("prior_loss_weight", "number", PRIOR),
        no_op("prior_generation_precision", "text", PRIOR),
        honoured("proportion_empty_prompts", "number", "train.caption_dropout_probability", 0.0),
        honoured("max_sequence_length", "whole", "cache.max_sequence_length"),
        honoured("resolution", "whole", "train.resolution", 512),
        left_out("center_crop", "flag", "images are always cut at their centre", True),
        no_op("crops_coords_top_left_h", "whole", CROP),
        no_op("crops_coords_top_left_w", "whole", CROP),
        refused("random_flip", "flag", "images are encoded once, as they are", False),
        honoured("train_batch_size", "whole", "train.global_batch_size", 4),
        no_op("sample_batch_size", "whole", EVALUATION),
        honoured("gradient_accumulation_steps", "whole", "train.gradient_accumulation_steps", 1),
        honoured("gradient_checkpointing", "flag", "train.gradient_checkpointing", False),
        honoured("num_train_epochs", "whole", "phases.until", 1),
        honoured("max_train_steps", "whole", "phases.until"),
        honoured("checkpointing_steps", "whole", "train.save_every", 500),
        honoured("checkpoints_total_limit", "whole", "train.keep"),
        honoured("resume_from_checkpoint", "text", "resume_from_checkpoint"),
        honoured("output_dir", "text", "run", reason=OWN_LAYOUT),
        honoured("seed", "whole", "seed"),
        honoured("learning_rate", "number", "train.learning_rate", 1e-4),
        refused("scale_lr", "flag", "learning_rate is what is trained with: multiply it", False),
        honoured("lr_scheduler", "text", "train.lr_scheduler", "constant"),
        honoured("lr_warmup_steps", "whole", "train.lr_warmup_steps", 500),
        honoured("lr_num_cycles", "whole", "train.lr_scheduler_args", 1),
        honoured("lr_power", "number", "train.lr_scheduler_args", 1.0),
        honoured("optimizer", "text", "train.optimizer", "AdamW"),
        left_out(
            "use_8bit_adam",
            "flag",
            "set train.optimizer: adamw8bit",
            False,
        ),
        honoured("adam_beta1", "number", "train.adam_beta1", 0.9),
        honoured("adam_beta2", "number", "train.adam_beta2", 0.999),
        honoured("adam_epsilon", "number", "train.adam_epsilon", 1e-8),
        honoured("adam_weight_decay", "number", "train.adam_weight_decay", 1e-4),
        honoured("max_grad_norm", "number", "train.max_grad_norm", 1.0),
        no_op("prodigy_beta3", "number", OPTIMIZER),
        no_op("prodigy_decouple", "flag", OPTIMIZER),
        no_op("prodigy_use_bias_correction", "flag", OPTIMIZER),
        no_op("prodigy_safeguard_warmup", "flag", OPTIMIZER),
        honoured("rank", "whole", "lora.rank", 4),
        honoured("lora_alpha", "number", "lora.alpha", 4.0),
        honoured("lora_dropout", "number", "lora.dropout", 0.0),
        honoured("lora_layers", "text", "lora.target_modules"),
        refused("lora_blocks", "text", "name the layers of those blocks in lora_layers"),
        honoured("use_dora", "flag", "lora.use_dora", False),
        no_op("output_kohya_format", "flag", "`zerotrain export --to kohya` writes it"),
        refused("train_text_encoder", "flag", "text encoders are not trained", False),
        refused("train_text_encoder_ti", "flag", "text encoders are not trained", False),
        no_op("text_encoder_lr", "number", "text encoders are not trained"),
        no_op("adam_weight_decay_text_encoder", "number", "text encoders are not trained"),
        honoured("weighting_scheme", "text", "train.weighting_scheme"),
        honoured("logit_mean", "number", "train.logit_mean", 0.0),
        honoured("logit_std", "number", "train.logit_std", 1.0),
        honoured("mode_scale", "number", "train.mode_scale", 1.29),
        left_out("precondition_outputs", "flag", "the loss is of the velocity itself", True),
        honoured("guidance_scale", "number", "train.flux_guidance_value", 3.5),
        honoured("prediction_type", "text", "prediction_type"),
        honoured("snr_gamma", "number", "train.snr_gamma"),
        honoured("noise_offset", "number", "train.noise_offset", 0.0),
        refused("do_edm_style_training", "flag", "the base's own noise schedule is used", False),
        refused("timestep_bias_strategy", "text", "timesteps are drawn without a bias", "none"),
        no_op("timestep_bias_multiplier", "number", BIAS),
        no_op("timestep_bias_begin", "whole", BIAS),
        no_op("timestep_bias_end", "whole", BIAS),
        no_op("timestep_bias_portion", "number", BIAS),
        honoured("mixed_precision", "text", "launch.mixed_precision"),
        honoured("dataloader_num_workers", "whole", "data.num_workers", 0),
        no_op("cache_latents", "flag", "the cache stage does it always"),
        no_op("offload", "flag", "the encoders are not loaded while a phase trains"),
        no_op("upcast_before_saving", "flag", "export.dtype says it"),
        no_op("enable_xformers_memory_efficient_attention", "flag", "torch's attention is as lean"),
        no_op("enable_npu_flash_attention", "flag", "torch's attention is as lean"),
        honoured("allow_tf32", "flag", "launch.allow_tf32", False),
        honoured("use_ema", "flag", "train.use_ema", False),
        no_op("foreach_ema", "flag", "the average's numbers are the same"),
        left_out("push_to_hub", "flag", HUB, False),
        no_op("hub_token", "text", HUB),
        no_op("hub_model_id", "text", HUB),
        honoured("report_to", "text", "train.report_to"),
        no_op("logging_dir", "text", TRACKERS),
        no_op("validation_prompt", "text", EVALUATION),
        no_op("validation_epochs", "whole", EVALUATION),
        no_op("num_validation_images", "whole", EVALUATION),
        no_op("final_validation_prompt", "text", EVALUATION),
        no_op("local_rank", "whole", "the launcher says it"),
    ]
)
"""examples/dreambooth/train_dreambooth*.py and examples/text_to_image/train_text_to_image*.py."""


def _with(**defaults: Any) -> dict[str, Key]:
    own = {name: replace(DIFFUSERS[name], default=value) for name, value in defaults.items()}
    return DIFFUSERS | own


# Of both the alpha was the rank until a release of 2025 gave the first a lora_alpha of 4.
DREAMBOOTH_LORA_SDXL = _with(resolution=1024, lora_alpha=None)
"""The same with the defaults of train_dreambooth_lora_sdxl.py."""
TEXT_TO_IMAGE = _with(
    resolution=1024,
    lora_alpha=None,
    train_batch_size=16,
    num_train_epochs=100,
    adam_weight_decay=1e-2,
)
"""The same with the defaults of examples/text_to_image."""

_JOINT = (
    "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0",
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
_FFS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
LORA_LAYERS = {
    "sdxl": ["to_k", "to_q", "to_v", "to_out.0"],
    "sd3": list(_JOINT),
    "flux": [*_JOINT, *_FFS],
    "qwen_image": ["to_k", "to_q", "to_v", "to_out.0"],
}
"""What lora_layers is where it is not given."""

SEQUENCE_LENGTHS = {"sd3": 77, "flux": 512, "qwen_image": 512}
"""What max_sequence_length is where it is not given."""
