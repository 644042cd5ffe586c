"""HF's Trainer without DeepSpeed, on a causal language model: whole, and a LoRA by peft."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from external_programs import (
    BATCH,
    BETAS,
    CLIP,
    DECAY,
    EPSILON,
    LAST_STEP,
    RATE,
    SAVED_STEP,
    Program,
)
from external_programs.deepspeed_engine import record
from external_programs.job import Job, run
from zerotrain.machine import compiled_ops

MODULE, FAMILY = "trainer", "causal_lm"
RANK, ALPHA = 4, 8.0
TARGETS = ["q_proj", "v_proj"]
LORA = {"lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": TARGETS}}
SPARED = {"train": {"no_decay_norm_bias": True}}
PROGRAMS = [
    Program(name="HF Trainer", module=MODULE, family=FAMILY, config=SPARED),
    Program(
        name="HF Trainer, sharded weights",
        module=MODULE,
        family=FAMILY,
        options={"sharded": True},
        config=SPARED,
    ),
    Program(
        name="HF Trainer with a peft LoRA",
        module=MODULE,
        family=FAMILY,
        options={"lora": True},
        config=LORA,
    ),
    Program(
        name="HF Trainer with DeepSpeed stage 2",
        module=MODULE,
        family=FAMILY,
        options={"zero": {"stage": 2}},
        config=SPARED,
        environment=compiled_ops.environment(),
    ),
]


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    import transformers

    model: Any = job.load_model()
    if job.options.get("lora"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    samples = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in map(job.batch, range(LAST_STEP))
        for row in range(BATCH)
    ]

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        """Trainer on the given samples in their order, with their loss."""

        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            loss = job.loss(model, inputs)
            job.record_loss(float(loss))
            return loss

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            if job.options.get("sharded"):
                self.model.save_pretrained(output_dir, max_shard_size="300KB")
            else:
                super()._save(output_dir, state_dict)

    class Record(transformers.TrainerCallback):  # type: ignore[misc]
        """Records what is held after the steps that count."""

        def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
            if state.global_step not in (SAVED_STEP, LAST_STEP):
                return
            if job.options.get("zero"):
                record(job, state.global_step, trainer.deepspeed, model)
            else:
                optimizer = held["optimizer"]
                inner = getattr(optimizer, "optimizer", optimizer)
                own = model.base_model.model if job.options.get("lora") else model
                job.record(state.global_step, own, inner)

    arguments = transformers.TrainingArguments(
        output_dir=str(job.out), max_steps=LAST_STEP, save_steps=SAVED_STEP, report_to=[],
        per_device_train_batch_size=BATCH, learning_rate=RATE, lr_scheduler_type="constant",
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPSILON, weight_decay=DECAY,
        max_grad_norm=CLIP, remove_unused_columns=False, optim="adamw_torch",
        disable_tqdm=True, save_strategy="steps", dataloader_num_workers=0, **zero_options(job),
    )  # fmt: skip
    trainer = InOrder(
        model=model, args=arguments, train_dataset=samples, callbacks=[Record()],
        data_collator=lambda rows: {k: torch.stack([row[k] for row in rows]) for k in rows[0]},
    )  # fmt: skip
    trainer.train()


def zero_options(job: Job) -> dict[str, Any]:
    """Trainer's options with DeepSpeed, whose engine wants the variables of a launcher."""
    if not (zero := job.options.get("zero")):
        return {"use_cpu": True}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": zero, "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return {"deepspeed": config, "ddp_backend": "gloo"}


if __name__ == "__main__":
    run(train)
