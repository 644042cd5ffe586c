"""Cutting a phase in a configuration's text: the whole text, before and after."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.graph.switch.edit import Split, split_phase, undo_split

BLOCK = """\
run: flowers   # mine
train: {learning_rate: 1.0e-3}

phases:
  # Plain first.
  - name: plain
    # 3 times through 100 images.
    until:   3 epochs   # counted from the start
    launch: "torch"
    global_batch_size: 0x10 # fits 24 GB
    param_groups:
      - parameters: bias$
        # none of it
        adam_weight_decay: 0

  # Then the large images.
  - {name: large,   until: "5000 samples", launch: torch, resolution: 512} # slow
export:
    dtype: 'bf16'
"""

AFTER_BLOCK = BLOCK.replace("until:   3 epochs   # counted", "until:   250   # counted").replace(
    "        adam_weight_decay: 0\n",
    """\
        adam_weight_decay: 0
  - name: plain-zero2
    until:   3 epochs
    launch: zero2
    global_batch_size: 0x10
    param_groups:
      - parameters: bias$
        # none of it
        adam_weight_decay: 0
""",
)

AFTER_FLOW = BLOCK.replace('until: "5000 samples"', "until: 250").replace(
    "# slow\n",
    '# slow\n  - {name: large-zero2, until: "5000 samples", launch: zero2, resolution: 512}\n',
)


def split(text: str, phase: str, preset: str = "zero2", **more: Any) -> str:
    """The text after a cut at step 250; values next to the preset as they are given."""
    launch = {"preset": preset, **more.pop("launch", {})}
    name = more.pop("name", f"{phase}-{preset}")
    return split_phase(text, Split(phase=phase, step=250, name=name, launch=launch, **more))


def test_block_style_is_kept():
    """Comments, columns, quotes and blank lines stay; the new phase is in block style, with the
    former `until` and the training values as they were written."""
    assert split(BLOCK, "plain") == AFTER_BLOCK


def test_flow_style_is_kept():
    """A phase on one line is followed by a phase on one line; its table's columns stay."""
    assert split(BLOCK, "large") == AFTER_FLOW


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_ends_are_kept(ending: str):
    """Also those of Windows, also without one at the end of the file."""
    for phase, after in (("plain", AFTER_BLOCK), ("large", AFTER_FLOW)):
        assert split(BLOCK.replace("\n", ending), phase) == after.replace("\n", ending)
    text = "phases:\n- name: a\n  until: 300\n  launch: torch".replace("\n", ending)
    added = "\n- name: a-zero2\n  until: 300\n  launch: zero2".replace("\n", ending)
    assert split(text, "a") == text.replace("300", "250") + added


LAUNCHES = {
    # A phase's launch, and the new one's: precision, threads and processes go over, a folder for
    # one preset does not, nor what another preset or precision refuses.
    "{preset: torch, mixed_precision: bf16}": "{preset: zero2, mixed_precision: bf16}",
    "{mixed_precision: bf16}": "{mixed_precision: bf16, preset: zero2}",
    "{preset: zero3_nvme, offload_path: /nvme, num_processes: 2}": (
        "{preset: zero2, num_processes: 2}"
    ),
    "\n      preset: torch # plain\n      num_cpu_threads_per_process: 2": (
        "\n      preset: zero2\n      num_cpu_threads_per_process: 2"
    ),
    "&usual\n      preset: torch\n      num_processes: 1": (
        "\n      preset: zero2\n      num_processes: 1"
    ),
    "": "zero2",
    "~": "zero2",
}
OF_ZERO = "{preset: zero2, num_processes: 2, offload_optimizer: cpu, deepspeed: {log_level: info}}"
IN_BF16 = "{preset: zero2_offload, bf16_optimizer_states: true}"
PRESETS = [
    # A phase's launch, the new preset, and the new phase's launch.
    (OF_ZERO, "torch", "{preset: torch, num_processes: 2}"),
    (
        OF_ZERO, "zero3_offload",
        "{preset: zero3_offload, num_processes: 2, deepspeed: {log_level: info}}",
    ),
    (IN_BF16, "torch", "{preset: torch}"),
    (IN_BF16, "zero2", "{preset: zero2}"),
    (IN_BF16, "zero3_nvme", "{preset: zero3_nvme}"),
    (IN_BF16, "zero3_offload", "{preset: zero3_offload, bf16_optimizer_states: true}"),
    *((before, "zero2", after) for before, after in LAUNCHES.items()),
]  # fmt: skip


@pytest.mark.parametrize(("launch", "preset", "expected"), PRESETS)
def test_other_launch_values_are_kept(launch: str, preset: str, expected: str) -> None:
    """Those that the new phase may have; the phase that is cut keeps all of its own."""
    first = "phases:\n  - name: a\n    until: 300\n    launch: LAUNCH\n    resolution: 64\n"
    first = first.replace(" LAUNCH" if launch.startswith("\n") else "LAUNCH", launch)
    after = f"    launch: {expected}\n".replace(": \n", ":\n")
    name = f"a-{preset}"
    assert split(first, "a", preset) == first.replace("300", "250") + (
        f"  - name: {name}\n    until: 300\n{after}    resolution: 64\n"
    )


FEWER = {"launch": {"num_processes": 4}, "following": {"gradient_accumulation_steps": 2}}
FORMER = {"preset": "torch", "mixed_precision": "no", "num_processes": 2}
LOST = {"following": {"gradient_accumulation_steps": 2, "allow": ["loss_scale"]}}
NVME = {"launch": {"preset": "zero3_nvme", "offload_path": "/fast disk"}}
ZERO2 = {"launch": {"preset": "zero2"}}
ROW = "phases:\n  - {name: a, until: 300, launch: torch}\n"
CUT = ROW.replace("300", "250")
USUAL = (
    "usual: &usual {preset: torch, num_processes: 1}\nphases:\n"
    "  - {name: a, until: 300, launch: torch, resolution: &big 64}\n"
)
OTHER = USUAL.replace("name: a", "name: z") + "  - name: a\n"
CASES = {
    # A text, the split of its phase a into a and b, and the text after it.
    "a launch of the run": (
        "launch: {preset: zero1}\nphases: [{name: a, until: 300}]\n", ZERO2,
        "launch: {preset: zero1}\n"
        "phases: [{name: a, until: 250}, {name: b, until: 300, launch: zero2}]\n",
    ),
    "a folder makes a mapping of a name": (
        ROW, NVME,
        f"{CUT}  - {{name: b, until: 300, "
        'launch: {preset: zero3_nvme, offload_path: "/fast disk"}}\n',
    ),
    "a name that YAML 1.1 takes for a switch": (
        ROW, {**ZERO2, "name": "no"}, f'{CUT}  - {{name: "no", until: 300, launch: zero2}}\n',
    ),
    "a name that is a number": (
        ROW, {**ZERO2, "name": "1e5"}, f'{CUT}  - {{name: "1e5", until: 300, launch: zero2}}\n',
    ),
    "values that were changed before the switch": (
        "phases:\n  - name: a\n    until: 300 # end\n"
        "    launch: {preset: zero3_nvme, offload_path: /nvme, mixed_precision: bf16}\n",
        {
            "launch": {"preset": "zero3_nvme"}, "ended_launch": FORMER,
            "ended": {"global_batch_size": 16},
        },
        "phases:\n  - name: a\n    global_batch_size: 16\n    until: 250 # end\n"
        '    launch: {preset: torch, mixed_precision: "no", num_processes: 2}\n'
        "  - name: b\n    until: 300\n"
        "    launch: {preset: zero3_nvme, offload_path: /nvme, mixed_precision: bf16}\n",
    ),
    "what a switch may lose is said of each": (
        ROW.replace("torch", "torch, allow: [moments]"), ZERO2,
        CUT.replace("torch", "torch, allow: [moments]")
        + "  - {name: b, until: 300, launch: zero2}\n",
    ),
    "a phase with an anchor": (
        "phases:\n  - &first\n    name: a\n    until: 300\n", ZERO2,
        "phases:\n  - &first\n    name: a\n    until: 250\n"
        "  - name: b\n    until: 300\n    launch: zero2\n",
    ),
    "anchors stay where they are": (
        USUAL, ZERO2,
        USUAL.replace("300", "250") + "  - {name: b, until: 300, launch: zero2, resolution: 64}\n",
    ),
    "aliases are copied": (
        f"{OTHER}    until: 400\n    launch: *usual\n    resolution: *big\n", ZERO2,
        f"{OTHER}    until: 250\n    launch: *usual\n    resolution: *big\n"
        "  - name: b\n    until: 400\n    launch: {preset: zero2, num_processes: 1}\n"
        "    resolution: *big\n",
    ),
    "merged keys are copied": (
        "phases:\n  - {name: a, until: 300, <<: {launch: torch}}\n", ZERO2,
        "phases:\n  - {name: a, until: 250, <<: {launch: torch}}\n"
        "  - {launch: zero2, name: b, until: 300, <<: {launch: torch}}\n",
    ),
    "fewer processes under a name": (
        ROW, FEWER,
        f"{CUT}  - {{name: b, until: 300, launch: {{preset: torch, num_processes: 4}}, "
        "gradient_accumulation_steps: 2}\n",
    ),
    "fewer processes in a section": (
        "phases:\n  - name: a\n    until: 300\n    launch:\n      preset: zero2 # two\n"
        "      num_processes: 8\n", FEWER,
        "phases:\n  - name: a\n    until: 250\n    launch:\n      preset: zero2 # two\n"
        "      num_processes: 8\n  - name: b\n    until: 300\n    launch:\n      preset: zero2\n"
        "      num_processes: 4\n    gradient_accumulation_steps: 2\n",
    ),
    "nothing of the launch": (
        "phases: [{name: a, until: 300, gradient_accumulation_steps: 1}]\n",
        {"launch": {}, **LOST},
        "phases: [{name: a, until: 250, gradient_accumulation_steps: 1}, "
        "{name: b, until: 300, gradient_accumulation_steps: 2, allow: [loss_scale]}]\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_text_after_a_split(case: str) -> None:
    """Every character is the user's, except for the end of the phase and the new phase."""
    text, made, after = CASES[case]
    assert split_phase(text, Split(**{"phase": "a", "step": 250, "name": "b", **made})) == after


@pytest.mark.parametrize("mark", ["&p", "&p # a list", "!!seq", "&p\n# - not yet"])
@pytest.mark.parametrize("indent", ["", "  "])
def test_a_list_with_an_anchor_is_cut_like_another(mark: str, indent: str):
    """The parser lets it begin at the anchor, before its first dash."""
    text = f"phases: {mark}\n{indent}- name: a\n{indent}  until: 300\n"
    assert split(text, "a") == text.replace("300", "250") + (
        f"{indent}- name: a-zero2\n{indent}  until: 300\n{indent}  launch: zero2\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "day: 2026-13-45\nphases:\n  - {name: z, until: 300, launch: torch}\n",
        "phases:\n- &first\n name: z\n until: 300\n launch: torch\n",
        "first: &first {name: z, until: 300, launch: torch}\nphases:\n  - *first\n",
    ],
)
def test_what_only_a_person_can_cut_is_refused(text: str):
    """With the values to write."""
    message = refusal(split, text, "z")
    assert message == (
        "ERROR: phase z is written in a way that no program should cut\n"
        "  Hint: do it by hand: give z `until: 250`, and write a phase z-zero2 after it with the "
        "former `until`, `launch: zero2` and the other values of z"
    )


PLAIN = Split(phase="plain", step=250, name="plain-zero2", launch={"preset": "zero2"})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run: flowers   # mine", "run: roses   # mine"),
        ("phases:\n", "phases:\n  # more\n"),
        ('until: "5000 samples", launch: torch', 'until: "9000 samples", launch: zero3'),
        ("export:\n", "# the end\nexport:\n"),
        ("    dtype: 'bf16'\n", ""),
    ],
)
def test_an_undo_keeps_what_was_edited_since(old: str, new: str) -> None:
    """Before and behind the split, in lines that it left alone."""
    now = AFTER_BLOCK.replace(old, new)
    assert now != AFTER_BLOCK
    assert undo_split(BLOCK, AFTER_BLOCK, now, PLAIN) == BLOCK.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    launch: zero2\n", "    launch: zero3\n"),
        ("until:   250 ", "until:   200 "),
        ("  - name: plain-zero2\n", "  - name: mine\n"),
        ("run: flowers", "run: ["),
        # The edit that has lost the split leaves nothing to undo.
        (AFTER_BLOCK, BLOCK.replace("mine", "yours")),
        ("phases:\n", "phases:\n  - {name: first, until: 1, launch: torch}\nold:\n"),
    ],
)
def test_an_undo_of_lines_that_were_edited_is_none(old: str, new: str) -> None:
    """Nor of a text that would mean something else then."""
    now = AFTER_BLOCK.replace(old, new)
    assert now != AFTER_BLOCK
    assert undo_split(BLOCK, AFTER_BLOCK, now, PLAIN) is None
