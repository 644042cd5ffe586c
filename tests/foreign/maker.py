"""What the forked processes do: train a tiny odd-shaped model and save it as others save theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

STEPS = 3


class Net(nn.Module):
    """Odd sizes, a tied pair, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 3)
        self.last = nn.Linear(3, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(tokens)).tanh()
        return self.head(self.last(self.frozen(hidden) * self.scale.to(hidden.dtype)))


def build() -> Net:
    """The model as every rank starts with it."""
    torch.manual_seed(0)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as trainers make them: decay, and none for biases."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trained if "bias" not in n], "weight_decay": 0.1, "lr": 2e-2},
        {"params": [p for n, p in trained if "bias" in n], "weight_decay": 0.0},
    ]


def engine_config(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration under which tiny models are really partitioned."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
            "sub_group_size": options.get("sub_group_size", 10**9),
        }  # fmt: skip
    if options.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if (precision := options.get("precision")) == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": options.get("scale_power", 8)}
    return config | options.get("config", {})


def start(stage: int, options: dict[str, Any], *, seed: int = 0) -> tuple[Any, Net]:
    """A DeepSpeed engine over the model."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # Some processors are said not to do fp16; on all of them torch does, only slowly.
    get_accelerator().is_fp16_supported = lambda: True
    model = build()
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
    parameters = groups(model)
    if options.get("groups", 2) == 1:
        parameters = [{"params": [p for g in parameters for p in g["params"]]}]
    arguments = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.01}
    optimizer: torch.optim.Optimizer
    if options.get("offload"):
        optimizer = DeepSpeedCPUAdam(parameters, **arguments)
    else:
        optimizer = torch.optim.AdamW(parameters, **arguments)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=engine_config(stage, options)
    )
    return engine, model


def train(engine: Any, steps: int) -> list[float]:
    """Train on batches that depend on the step and the rank alone; the losses."""
    losses = []
    for _ in range(steps):
        source = torch.Generator().manual_seed(10 * engine.global_steps + engine.global_rank)
        tokens = torch.randint(7, (2, 4), generator=source)
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def numbered_live(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every trained parameter's slots in a torch optimizer."""
    state = optimizer.state
    return {
        name: {"master": parameter.detach(), **state[parameter]}
        for name, parameter in model.named_parameters()
        if parameter in state
    }


def live(engine: Any, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Every trained parameter's slots, as DeepSpeed's public functions gather them."""
    if not engine.zero_optimization():
        return numbered_live(engine.optimizer, model)
    if engine.zero_optimization_stage() < 3:
        # With several groups DeepSpeed links the optimizer's slots of the first alone.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: {
            "master": safe_get_full_fp32_param(parameter).clone(),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg").clone(),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone(),
        }
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_universal(loads: list[tuple[Path, int, dict[str, Any]]], output: Path) -> None:
    """Load universal checkpoints into engines of other weights; save what they then hold."""
    found: list[dict[str, Any]] = []
    for folder, stage, options in loads:
        more = {**options, "config": {"checkpoint": {"load_universal": True}}}
        engine, model = start(stage, more, seed=len(found) + 1)
        engine.load_checkpoint(str(folder))
        base = engine.optimizer.optimizer
        found.append(
            {
                "live": live(engine, model),
                "global_steps": engine.global_steps,
                "global_samples": engine.global_samples,
                "steps": [int(state["step"]) for state in base.state.values()],
                "groups": [
                    {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                    for group in base.param_groups
                ],
            }
        )
        train(engine, 2)
        found[-1]["steps_after"] = [int(state["step"]) for state in base.state.values()]
        engine.destroy()
    torch.save(found, output)


def continue_universal(
    loads: list[tuple[Path, int, dict[str, Any]]], steps: int, output: Path
) -> None:
    """Load universal checkpoints into engines of other weights, and train on.

    The output has, for each, what the engine then holds and its param groups, or the error.
    """
    found: list[dict[str, Any]] = []
    for folder, stage, options in loads:
        more = {**options, "config": {"checkpoint": {"load_universal": True}}}
        engine, model = start(stage, more, seed=len(found) + 1)
        engine.load_checkpoint(str(folder))
        try:
            train(engine, steps)
        except RuntimeError as error:
            found.append({"error": str(error)})
        else:
            groups = engine.optimizer.optimizer.param_groups
            rates = [(group["lr"], group["weight_decay"]) for group in groups]
            found.append({"live": live(engine, model), "groups": rates})
        engine.destroy()
    torch.save(found, output)


def train_accelerate(folder: Path, zero: bool) -> None:
    """Train and save as accelerate's users do; with DeepSpeed the tag is pytorch_model."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config = engine_config(2, {}) | {"gradient_accumulation_steps": 1}
    plugin = DeepSpeedPlugin(hf_ds_config=config) if zero else None
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=not zero)
    model = build()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95), eps=1e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(STEPS):
        source = torch.Generator().manual_seed(step)
        tokens = torch.randint(7, (2, 4), generator=source)
        loss = nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / f"checkpoint-{STEPS}"))
    held = live(wrapped, model) if zero else numbered_live(optimizer.optimizer, model)
    torch.save({"live": held}, folder / "expected.pt")


def train_zero(folder: Path, stage: int, options: dict[str, Any]) -> None:
    """Train, save a checkpoint, and save what the engine held and zero_to_fp32 makes of it."""
    engine, model = start(stage, options, seed=options.get("seed", 0))
    losses = train(engine, options.get("steps", STEPS))
    engine.save_checkpoint(str(folder / "checkpoint"))
    held = live(engine, model)
    if engine.global_rank == 0:
        expected = {"live": held, "losses": losses, "fp32": {}}
        if not options.get("beyond_zero_to_fp32"):
            expected["fp32"] = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint"))
        torch.save(expected, folder / "expected.pt")
