"""import_checkpoint: what the run's configuration says of an external checkpoint is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.exports import IMPORTING_RUN, assert_slots
from tests.builders.states import HISTORY, RAN_ON
from tests.training.conftest import write_base

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.stages.import_checkpoint import ImportSettings, import_checkpoint
from zerotrain.state.external.fitting import undecayed_names
from zerotrain.state.state import State, write_state

ATTENTION = r"attentions\."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A U-Net whose shapes repeat."""
    folder: Path = tmp_path_factory.mktemp("base") / "base"
    write_base(folder, (9, 15))
    return folder


def saved(folder: Path, base: Path, groups: Any) -> dict[str, dict[str, torch.Tensor]]:
    """A U-Net and its optimizer after a step on gradients that tell every parameter apart, as
    accelerate saves them; the moments by name."""
    model = FAMILY.load_model(base)
    own = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(groups(own), lr=1e-3)
    for number, parameter in enumerate(own.values()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    folder.mkdir()
    model.save_pretrained(folder / "unet")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return {name: optimizer.state[parameter] for name, parameter in own.items()}


def imported(folder: Path, base: Path, state: Path, **changes: Any) -> State:
    """The state of the checkpoint, under the run with these changes."""
    resume = {"folder": str(folder), **changes.pop("resume", {})}
    config = parse_config({**IMPORTING_RUN, "resume_from_checkpoint": resume, **changes}, "c")
    import_checkpoint(ImportSettings.of(config), folder, base, state)
    return State(state)


def attention_last(own: dict[str, Any]) -> Any:
    """Two groups that no convention has."""
    return [
        {"params": [p for n, p in own.items() if "attentions." not in n]},
        {"params": [p for n, p in own.items() if "attentions." in n], "lr": 1e-4},
    ]


def test_the_runs_param_groups_keep_the_moments(base: Path, tmp_path: Path) -> None:
    """`param_groups` of the configuration say who is in which group of the optimizer; without them
    the import is refused before a state appears, and says what decides."""
    moments = saved(tmp_path / "there", base, attention_last)
    with pytest.raises(PipelineError, match="neither shapes nor param_groups tell") as caught:
        imported(tmp_path / "there", base, tmp_path / "state")
    assert "`names` of resume_from_checkpoint does" in str(caught.value)
    assert "allow: [moments]` into the phase on" in str(caught.value)
    assert not (tmp_path / "state").exists()
    groups = [{"parameters": [ATTENTION], "learning_rate": 1e-4}]
    train = {**IMPORTING_RUN["train"], "param_groups": groups}
    state = imported(tmp_path / "there", base, tmp_path / "state", train=train)
    assert_slots(state, moments)
    assert [group["lr"] for group in state.position.param_groups] == [1e-3, 1e-4]


def test_what_a_state_ran_on_travels_through_an_import(base: Path, tmp_path: Path) -> None:
    """Of zerotrain's own; a checkpoint of another program has none."""
    saved(tmp_path / "theirs", base, lambda own: own.values())
    first = imported(tmp_path / "theirs", base, tmp_path / "first")
    assert (first.position.ran_on, first.position.history) == ({}, [])
    position = replace(first.position, ran_on=RAN_ON, history=HISTORY)
    with artifact.publish(tmp_path / "own", "state") as draft:
        write_state(draft.folder, position, first.shapes, first.slots, first.tensor)
    second = imported(tmp_path / "own", base, tmp_path / "second").position
    assert (second.ran_on, second.history) == (RAN_ON, HISTORY)


def test_names_of_a_file_keep_the_moments(base: Path, tmp_path: Path) -> None:
    """A name a line in the optimizer's order; a file that is not there is named."""
    moments = saved(tmp_path / "there", base, attention_last)
    parts = ([n for n in moments if "attentions." not in n],
             [n for n in moments if "attentions." in n])  # fmt: skip
    (tmp_path / "names.txt").write_text("\n".join([*parts[0], *parts[1]]) + "\n")
    names = {"names": str(tmp_path / "names.txt")}
    assert_slots(imported(tmp_path / "there", base, tmp_path / "state", resume=names), moments)
    resume = {"names": str(tmp_path / "absent.txt")}
    with pytest.raises(PipelineError, match=r"resume_from_checkpoint\.names: .*absent\.txt"):
        imported(tmp_path / "there", base, tmp_path / "other", resume=resume)


def test_names_module_is_the_modules_order(base: Path, tmp_path: Path) -> None:
    """Groups that cut the module's order into pieces."""

    def halves(own: dict[str, Any]) -> Any:
        names = list(own)
        return [{"params": [own[n] for n in part]} for part in (names[:40], names[40:])]

    moments = saved(tmp_path / "there", base, halves)
    state = imported(tmp_path / "there", base, tmp_path / "state", resume={"names": "module"})
    assert_slots(state, moments)


def test_spared_names_are_those_of_transformers(base: Path) -> None:
    """HF Trainer's own function, on a model with norms of every kind."""
    from transformers import Trainer

    model = FAMILY.load_model(base)
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    assert undecayed_names(model) == [name for name in names if name not in set(decayed)]
