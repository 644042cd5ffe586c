"""What `zerotrain state` says of a training, and of the difference of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.states import make_position
from typer.testing import CliRunner

from zerotrain import artifact, cli
from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint import Fragment, write_position, write_rank
from zerotrain.state.position import MASTER, TrainerState
from zerotrain.state.show import distance
from zerotrain.state.state import KIND, write_state

POSITION = make_position(
    1300,
    phase="offload",
    samples=41600,
    optimizer_step=1299,
    param_groups=[
        {"parameters": ["w"], "lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        {"parameters": ["b", "scale"], "lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8},
    ],
    lr_scheduler="cosine",
    lr_scheduler_steps=7000,
    rng={"scheme": "counter", "seed": 7},
    engine={
        "preset": "zero2_offload", "engine": "deepspeed", "zero_stage": 2, "world_size": 2,
        "offload_optimizer": "cpu", "offload_param": "none", "mixed_precision": "bf16",
        "global_batch_size": 32, "gradient_accumulation_steps": 4,
    },
    loss_scale={"scale": 65536.0, "good_steps": 12},
)  # fmt: skip
SLOTS = [MASTER, "exp_avg", "exp_avg_sq"]
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """The values of every slot."""
    return {
        "b": torch.tensor([3.0, -4.0]),
        "scale": torch.tensor(0.5),
        "w": torch.arange(6.0).reshape(2, 3),
    }


def write(folder: Path, values: Tensors, position: TrainerState = POSITION) -> Path:
    """A state whose moments are the weights' halves and squares."""

    def read(name: str, slot: str) -> torch.Tensor:
        value = values[name]
        return {MASTER: value, "exp_avg": value / 2, "exp_avg_sq": value**2}[slot]

    shapes = {name: list(value.shape) for name, value in values.items()}
    with artifact.publish(folder, KIND) as draft:
        write_state(draft.folder, position, shapes, SLOTS, read)
    return folder


def write_checkpoint(folder: Path, values: Tensors) -> Path:
    """A checkpoint with weights alone."""
    with artifact.publish(folder, "checkpoint") as draft:
        parts = [Fragment(name, 0, {MASTER: value.flatten()}) for name, value in values.items()]
        shapes = {name: list(value.shape) for name, value in values.items()}
        spans = [write_rank(draft.folder, 0, parts)]
        write_position(draft.folder, POSITION, shapes, [MASTER], spans)
    return folder


def write_weights(folder: Path, values: Tensors) -> Path:
    """Exported weights."""
    with artifact.publish(folder, "weights") as draft:
        (draft.folder / "unet").mkdir()
        save_file(values, draft.folder / "unet" / "diffusion_pytorch_model.safetensors")
        save_file({"other": torch.ones(1)}, draft.folder / "vae.safetensors")
        draft.content = {"family": "sdxl", "step": 1300, "dtype": "fp32"}
    return folder


def say(*words: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    result = CliRunner().invoke(cli.command_line(), list(map(str, words)))
    if isinstance(result.exception, PipelineError):
        raise result.exception
    return result.exit_code, result.stdout


POSITION_ROWS = """\
run/phase               flowers/offload
step                    1,300
samples                 41,600
preset                  zero2_offload
engine                  deepspeed
ZeRO stage              2
offload of optimizer    cpu
offload of parameters   none
world size              2
mixed precision         bf16
global batch size       32
accumulation steps      4
optimizer               adamw, step 1,299
group 0                 1 tensor, betas (0.9, 0.999), eps 1e-08, lr 1e-05,
                        weight_decay 0.01
group 1                 2 tensors, betas (0.9, 0.999), eps 1e-08, lr 2e-05
learning rate           cosine over 7,000 steps
loss scale              65536
"""
MASTER_ROWS = """\
parameters              9 in 3 tensors

slot                              norm       largest      smallest
master                         8.95824             5            -4
"""
MOMENT_ROWS = """\
exp_avg                        4.47912           2.5            -2
exp_avg_sq                     36.2776            25             0
"""
TENSOR_ROWS = """
tensor, shape; norm of          master       exp_avg    exp_avg_sq
b
  2                                  5           2.5       18.3576
scale
  scalar                           0.5          0.25          0.25
w
  2x3                           7.4162        3.7081        31.289
"""


def test_a_state_is_shown(tmp_path: Path) -> None:
    """Where it stands, what made it, what it amounts to; in 80 columns."""
    state = write(tmp_path / "state", tensors())
    expected = POSITION_ROWS + MASTER_ROWS + MOMENT_ROWS
    assert say("state", "show", state) == (0, expected)
    assert say("state", "show", state / "manifest.json") == (0, expected)
    listed = expected + TENSOR_ROWS
    assert say("state", "show", state, "--tensors") == (0, listed)
    assert max(map(len, listed.splitlines())) <= 80


def test_a_checkpoint_and_weights_are_shown(tmp_path: Path) -> None:
    """A checkpoint as a state is; of weights the part that was trained."""
    checkpoint = write_checkpoint(tmp_path / "step-00001300", tensors())
    assert say("state", "show", checkpoint) == (0, POSITION_ROWS + MASTER_ROWS)
    weights = write_weights(tmp_path / "weights", tensors())
    rows = (
        "dtype                   fp32\nfamily                  sdxl\nstep                    1300\n"
    )
    assert say("state", "show", weights) == (0, rows + MASTER_ROWS)


def test_what_it_ran_on_is_shown_and_does_not_make_states_differ(tmp_path: Path) -> None:
    """What changed and where is exact; two states are equal whatever trained them."""
    entry = {"step": 1200, "key": "versions.torch", "old": "2.12.0", "new": "2.13.0"}
    values = {"versions.torch": "2.13.0", "device": "cpu", "threads": 2}
    position = replace(POSITION, ran_on=values, history=[entry])
    one, two = write(tmp_path / "one", tensors(), position), write(tmp_path / "two", tensors())
    code, text = say("state", "show", one)
    assert code == 0
    rows = """\
device                  cpu
threads per process     2
versions                torch 2.13.0
exact                   steps 1,201 to 1,300, since the change after step 1,200:
                        torch 2.12.0 → 2.13.0
changed                 after step 1,200: torch 2.12.0 → 2.13.0
"""
    assert text == POSITION_ROWS + rows + MASTER_ROWS + MOMENT_ROWS
    assert say("state", "diff", one, two) == (
        0,
        "ran_on.device: cpu / absent\nran_on.threads: 2 / absent\n"
        "ran_on.versions.torch: 2.13.0 / absent\n"
        "history: after step 1,200: torch 2.12.0 → 2.13.0 / absent\n9 tensors equal\n",
    )


class Foreign:
    """Another program's checkpoint."""

    position = replace(
        POSITION, run="", phase="", param_groups=[], lr_scheduler="", loss_scale=None
    )
    slots = SLOTS
    frozen = {"first": [3]}  # noqa: RUF012
    tied = {"head": "w"}  # noqa: RUF012
    lost = ["the optimizer's momentum: only Adam's two moments are kept, and nothing else of it"]  # noqa: RUF012

    def __init__(self, values: Tensors) -> None:
        self._values = values
        self.names = list(values)
        self.shapes = {name: list(value.shape) for name, value in values.items()}

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        value = self._values[name]
        return value if slot == MASTER else value**2


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch) -> Path:
    """A folder that no manifest lists, which reads as a checkpoint."""
    import zerotrain.state.external

    folder = tmp_path / "theirs"
    (folder / "global_step1300").mkdir(parents=True)
    (folder / "latest").write_text("global_step1300")
    (folder / "global_step1300" / "model.pt").write_bytes(b"12345")
    trusted: list[bool] = []

    def opened(path: Path, *, trust_pickle: bool) -> Foreign:
        assert path == folder
        trusted.append(trust_pickle)
        return Foreign(tensors())

    monkeypatch.setattr(zerotrain.state.external, "open_external", opened)
    return folder


def test_another_programs_checkpoint_is_shown(foreign: Path) -> None:
    """With what it keeps besides, and what is not read."""
    code, text = say("state", "show", foreign)
    assert code == 0
    assert text.startswith("run/phase               not of zerotrain\n")
    assert (
        """\
optimizer               adamw, step 1,299
parameters              9 in 3 tensors
frozen                  1 tensor
tied                    1 tensor
left out                the optimizer's momentum: only Adam's two moments are
                        kept, and nothing else of it
"""
        in text
    )


def test_a_foreign_checkpoint_becomes_a_state(foreign: Path, tmp_path: Path) -> None:
    """By hand, without a base; the state says where it came from."""
    code, text = say("export", foreign, "--state", tmp_path / "state")
    assert code == 0
    assert text == f"wrote {tmp_path / 'state'}\n"
    made_by = artifact.read(tmp_path / "state", KIND).made_by
    sizes = [["global_step1300/model.pt", 5], ["latest", 15]]
    assert made_by["checkpoint"] == {"path": str(foreign), "files": artifact.digest(sizes)}
    assert say("state", "diff", foreign, tmp_path / "state") == (0, "9 tensors equal\n")


def test_a_foreign_checkpoint_becomes_universal(foreign: Path, tmp_path: Path, monkeypatch) -> None:
    """Without a base; a tensor that is not finite is refused there too."""
    import zerotrain.state.external

    taken: dict[str, Any] = {}

    def write_universal(folder: Path, source: Any) -> None:
        (folder / "latest_universal").write_text("tag")
        taken.update({name: source.tensor(name, MASTER) for name in source.names})

    monkeypatch.setattr(zerotrain.state.external, "write_universal", write_universal)
    out = tmp_path / "out"
    assert say("export", foreign, "--output", out, "--to", "universal")[0] == 0
    assert torch.equal(taken["w"], tensors()["w"])
    assert artifact.read(out, "universal").content == {"step": 1300}
    bad = {**tensors(), "w": torch.full((2, 3), float("inf"))}
    monkeypatch.setattr(
        zerotrain.state.external, "open_external", lambda path, **options: Foreign(bad)
    )
    with pytest.raises(PipelineError, match=r"w: 6 values are not finite"):
        say("export", foreign, "--output", tmp_path / "two", "--to", "universal")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ((), "nothing to write: neither --output nor --state is given", "add --output FOLDER"),
        (("--output", "o"), "weights need the base model", "--family sdxl --base FOLDER"),
        (("--output", "o", "--to", "onnx"), "--to: 'onnx' is not known", "kohya, universal"),
        (("--state", "s", "--dtype", "int8"), "--dtype: 'int8' is not known", "fp32, bf16, fp16"),
        (
            ("--output", "o", "--family", "sd9"),
            "--family: 'sd9' is not known",
            "did you mean sd3? there are: sdxl",
        ),
    ],
)
def test_what_an_export_lacks_is_reported(
    foreign: Path, words: tuple[str, ...], what: str, hint: str
) -> None:
    """Before the checkpoint is opened."""
    with pytest.raises(PipelineError) as caught:
        say("export", foreign, *words)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_equal_states_are_only_counted(tmp_path: Path) -> None:
    """Whoever made them: another phase and engine are shown, and the exit code is 0."""
    one = write(tmp_path / "one", tensors())
    assert say("state", "diff", one, one) == (0, "9 tensors equal\n")
    engine = {**POSITION.engine, "zero_stage": 3}
    two = write(tmp_path / "two", tensors(), replace(POSITION, phase="plain", engine=engine))
    said = "phase: offload / plain\nengine.zero_stage: 2 / 3\n9 tensors equal\n"
    assert say("state", "diff", one, two) == (0, said)


DIFFERENT = """\
step: 1300 / 1400
param_groups[0].lr: 1e-05 / 3e-05
loss_scale: {'good_steps': 12, 'scale': 65536.0} / None
b (master): shape [2] / [1]
scale (master): not in the second
w (master): differs by 0.25, relative 0.0476
new (master): not in the first
b (exp_avg): shape [2] / [1]
scale (exp_avg): not in the second
w (exp_avg): differs by 0.125, relative 0.0476
new (exp_avg): not in the first
b (exp_avg_sq): shape [2] / [1]
scale (exp_avg_sq): not in the second
w (exp_avg_sq): differs by 2.56, relative 0.093
new (exp_avg_sq): not in the first
0 tensors equal
"""


def test_what_differs_is_listed(tmp_path: Path) -> None:
    """Position first, then each tensor of each slot: absent, of another shape, how far off."""
    other = tensors()
    other["w"][1, 2] = 5.25
    other["b"] = other["b"][:1]
    other["new"] = other.pop("scale")
    groups = [{**POSITION.param_groups[0], "lr": 3e-5}, POSITION.param_groups[1]]
    position = replace(POSITION, step=1400, param_groups=groups, loss_scale=None)
    one = write(tmp_path / "one", tensors())
    two = write(tmp_path / "two", other, position)
    assert say("state", "diff", one, two) == (1, DIFFERENT)


def test_a_tolerance_takes_small_differences(tmp_path: Path) -> None:
    """They are counted apart; larger ones still make the exit code 1."""
    one = write(tmp_path / "one", tensors())
    two = write(tmp_path / "two", {**tensors(), "scale": torch.tensor(0.5625)})
    near = "6 tensors equal, 3 within 0.1\n"
    assert say("state", "diff", one, two, "--tolerance", 0.1) == (0, near)
    code, text = say("state", "diff", one, two, "--tolerance", 0.0625)
    assert code == 1
    assert text == (
        "scale (exp_avg_sq): differs by 0.0664, relative 0.21\n6 tensors equal, 2 within 0.0625\n"
    )


def test_weights_are_compared_with_a_master(tmp_path: Path) -> None:
    """They have neither position nor moments; their type may be another."""
    state = write(tmp_path / "state", tensors())
    half = {name: value.to(torch.bfloat16) for name, value in tensors().items()}
    weights = write_weights(tmp_path / "weights", half)
    assert say("state", "diff", weights, state) == (0, "3 tensors equal\n")


def test_a_missing_slot_is_one_line(tmp_path: Path) -> None:
    """Not one for each tensor."""
    state = write(tmp_path / "state", tensors())
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tensors())
    said = "exp_avg: not in the second\nexp_avg_sq: not in the second\n3 tensors equal\n"
    assert say("state", "diff", state, checkpoint) == (1, said)


def test_values_that_are_not_numbers_have_a_distance() -> None:
    """Infinitely far from any other; equal to themselves."""
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, inf, 1.0])
    assert distance(a, a.clone()) == (0, 0)
    for other in ([1.0, inf, 1.0], [nan, -inf, 1.0], [nan, 1.0, 1.0]):
        assert distance(a, torch.tensor(other)) == (inf, inf)
    assert distance(torch.zeros(3), torch.tensor([0.0, 0.0, -2.0])) == (2, 1)
    assert distance(torch.ones(0), torch.ones(0)) == (0, 0)
