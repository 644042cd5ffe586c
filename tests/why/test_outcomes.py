"""What becomes of the stages that run."""

from __future__ import annotations

import shutil

from zerotrain.graph.why.causes import find_causes
from zerotrain.graph.why.outcomes import KEPT, Outcomes

SAME_STEPS = "is kept: what it trains is the same"


def foreseen(run) -> dict[str, tuple[str, float | None]]:
    """Work and seconds of each stage that runs."""
    reruns = run.reruns()
    causes = find_causes(reruns.running, nothing_made=False)
    return {one.name: (one.what, one.seconds) for one in Outcomes(reruns, causes)}


def test_what_reads_an_equal_result_is_kept(run):
    """After a removed base, in a second each; the base takes as long as it took."""
    shutil.rmtree("results/tiny/base")
    phases = ("plain", "offload")
    assert foreseen(run) == {
        "build_base tiny": ("", 2.0),
        "cache_latents tiny 64": (KEPT, 1.0),
        "render_launch tiny/offload": (KEPT, 1.0),
        **{f"train_phase tiny/{phase}": (SAME_STEPS, 0.0) for phase in phases},
        **{f"export_weights tiny/{phase}": (KEPT, 1.0) for phase in phases},
        **{f"evaluate tiny/{phase}": (KEPT, 1.0) for phase in phases},
        "report tiny": (KEPT, 1.0),
    }


def test_what_reads_another_result_is_not_kept(run):
    """Another dtype of the weights trains nothing, and has all evaluated again."""
    run.config["export"] = {"dtype": "bf16"}
    phases = ("plain", "offload")
    assert foreseen(run) == {
        "train_phase tiny/offload": (SAME_STEPS, 0.0),
        **{f"export_weights tiny/{phase}": ("", 2.0) for phase in phases},
        **{f"evaluate tiny/{phase}": ("", 2.0) for phase in phases},
        "report tiny": ("", 2.0),
    }


def test_an_edited_value_trains_again_and_what_is_refused_ends_the_plan(run):
    """A launch may only be switched."""
    run.config["phases"][1]["learning_rate"] = 0.002
    again = "trains again from step 300 to 700; its steps up to 700 are set aside"
    assert foreseen(run)["train_phase tiny/offload"][0] == again
    run.config["phases"][0]["launch"] = "zero2"
    refused = foreseen(run)
    assert refused["train_phase tiny/plain"][0].startswith("is refused: its 300 steps have another")
    assert refused["train_phase tiny/offload"] == refused["report tiny"] == ("is not reached", 0.0)
