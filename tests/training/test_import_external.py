"""A training that another program began continues here with nothing lost.

What docs/from-simpletuner.md and docs/from-diffsynth.md say, on folders that accelerate's own
save_state made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builders.processes import run_ranks
from tests.builders.runs import make_run
from tests.training import accelerate_loop
from tests.training.matrix import deviation

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.stages.import_checkpoint import ImportSettings, import_checkpoint
from zerotrain.state.state import State
from zerotrain.training.checkpointing.preflight import check_start

STEPS, SWITCH = 10, 5
CONSTANT = {"lr_scheduler": "constant", "lr_warmup_steps": 0, "lr_scheduler_steps": STEPS}
ZERO2 = {"stage": 2, "overlap_comm": False}
ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "stage3_param_persistence_threshold": 0,
    "sub_group_size": 3001,
}
RUN = make_run(run="tiny", train={"global_batch_size": 4}, phases=[{"name": "on", "until": STEPS}])


@pytest.fixture
def external(training, server):
    """Trains half of the steps by another program; the folder that its save_state left."""

    def train(name: str, zero: dict[str, Any] | None, wrapped: bool = False) -> Path:
        training.phase("there", "torch", SWITCH, **CONSTANT)
        out: Path = training.folder / name
        words = (training.folder / "there/launch", training.base, training.cache, out)
        run_ranks(
            server.Process, accelerate_loop.train, 1, *words, zero, wrapped, output=training.output
        )
        return out

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "zero", "wrapped", "preset"),
    [
        ("checkpoint-5", None, False, "zero2_offload"),  # SimpleTuner without DeepSpeed: on
        ("checkpoint-5", ZERO2, False, "torch"),  # SimpleTuner with DeepSpeed: off
        ("state", ZERO3, True, "torch"),  # a trainer that wraps its model, ZeRO-3 offload: off
    ],
    ids=["simpletuner-on", "simpletuner-off", "wrapped-off"],
)
def test_import_continues_as_if_it_had_been_ours(training, external, folder, zero, wrapped, preset):
    """5 steps there, imported, 5 steps here: the losses are those of 10 steps here, to 1e-5."""
    whole = training.run("whole", "torch", STEPS, **CONSTANT)
    checkpoint = external(folder, zero, wrapped)
    state = training.folder / "imported"
    import_checkpoint(ImportSettings.of(parse_config(RUN, "c")), checkpoint, training.base, state)
    position = State(state).position
    assert (position.step, position.samples, position.optimizer_step) == (5, 20, 5)
    losses = training.run("on", preset, STEPS, state=state, start_step=SWITCH, **CONSTANT)
    apart = deviation(losses, whole[SWITCH:])
    print(f"{folder}, {preset}: largest relative deviation {apart:.1e}")
    assert apart <= 1e-5


def test_import_of_weights_alone_says_what_is_lost(training, tmp_path, capsys):
    """They come over to the bit; that there are no moments only `allow` lets pass."""
    unet = load_file(training.base / "unet" / "diffusion_pytorch_model.safetensors")
    trained = {name: tensor + 1 for name, tensor in unet.items()}  # not what the base has
    file = tmp_path / "step-2000.safetensors"
    save_file({f"pipe.dit.{name}": tensor for name, tensor in trained.items()}, file)
    settings = ImportSettings.of(parse_config(RUN, "c"))
    import_checkpoint(settings, file, training.base, tmp_path / "state")
    state = State(tmp_path / "state")
    assert state.slots == ["master"]
    assert state.position.step == 2000
    made_by = artifact.read(tmp_path / "state", "state").made_by["checkpoint"]
    named = artifact.digest([[file.name, file.stat().st_size]])
    assert made_by == {"path": str(file), "files": named}
    assert set(state.names) == set(trained)
    assert all(torch.equal(state.tensor(name, "master"), trained[name]) for name in trained)
    assert "holds weights alone: no moments" in capsys.readouterr().err
    phase = training.phase("on", "torch", STEPS)
    with pytest.raises(PipelineError, match="the optimizer state would be reset"):
        check_start(state.artifact, phase)
    assert len(check_start(state.artifact, phase.with_values(allow=["moments"]))) == 1


def test_import_of_another_model_is_refused(training, tmp_path):
    """Naming the parameter, and what has to describe the model."""
    unet = load_file(training.base / "unet" / "diffusion_pytorch_model.safetensors")
    removed = sorted(unet)[-1]
    del unet[removed]
    save_file(unet, tmp_path / "other.safetensors")
    settings = ImportSettings.of(parse_config(RUN, "c"))
    with pytest.raises(PipelineError, match=f"has no parameter {removed}") as caught:
        import_checkpoint(settings, tmp_path / "other.safetensors", training.base, tmp_path / "s")
    assert "base, lora and frozen_parameters have to describe the model" in str(caught.value)
    assert not (tmp_path / "s").exists()
