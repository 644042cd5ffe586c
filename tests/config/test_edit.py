"""Cutting a phase in a configuration's text: the whole text, before and after."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.config.edit import Split, split_phase, undo_split

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
    # A phase's launch, and the new one's.
    "{preset: torch, mixed_precision: bf16}": "{preset: zero2, mixed_precision: bf16}",
    "{mixed_precision: bf16}": "{mixed_precision: bf16, preset: zero2}",
    "{preset: zero3_nvme, offload_path: /nvme, num_processes: 2}": (
        "{preset: zero2, num_processes: 2}"
    ),
    "\n      preset: torch # plain\n      num_cpu_threads_per_process: 2": (
        "\n      preset: zero2\n      num_cpu_threads_per_process: 2"
    ),
    "": "zero2",
    "~": "zero2",
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_other_launch_values_are_kept(launch: str):
    """Precision, threads and processes go over; a folder for one preset does not."""
    text = "phases:\n  - name: a\n    until: 300\n    launch: LAUNCH\n    resolution: 64\n"
    first = text.replace(" LAUNCH" if launch.startswith("\n") else "LAUNCH", launch)
    assert split(first, "a") == first.replace("300", "250") + (
        "  - name: a-zero2\n    until: 300\n    launch: "
        + LAUNCHES[launch]
        + "\n    resolution: 64\n"
    ).replace("launch: \n", "launch:\n")


def test_a_phase_without_a_launch_gets_one():
    """The run's own `launch` gave it before."""
    text = "launch: {preset: zero1}\nphases: [{name: a, until: 300}]\n"
    assert split(text, "a") == (
        "launch: {preset: zero1}\n"
        "phases: [{name: a, until: 250}, {name: a-zero2, until: 300, launch: zero2}]\n"
    )


def test_a_folder_for_offload_is_written():
    """It makes a mapping of a preset's name."""
    text = "phases:\n  - {name: a, until: 300, launch: torch}\n"
    assert split(text, "a", "zero3_nvme", launch={"offload_path": "/fast disk"}) == (
        "phases:\n  - {name: a, until: 250, launch: torch}\n  - {name: a-zero3_nvme, until: 300, "
        'launch: {preset: zero3_nvme, offload_path: "/fast disk"}}\n'
    )


def test_names_that_readers_take_for_something_else_are_quoted():
    """YAML 1.1 reads `no` as false, 12 as a number."""
    text = "phases:\n  - {name: a, until: 300, launch: torch}\n"
    for name in ("no", "12", "1e5", "yes"):
        assert f'{{name: "{name}", until: 300, launch: zero2}}' in split(text, "a", name=name)


def test_a_phase_that_was_changed_beforehand_gets_its_values_back():
    """Somebody wrote the new launch into the phase before the switch: the cut phase keeps what it
    was trained with, the new one what was written."""
    text = (
        "phases:\n  - name: a\n    until: 300 # end\n"
        "    launch: {preset: zero3_nvme, offload_path: /nvme, mixed_precision: bf16}\n"
    )
    former = {"preset": "torch", "mixed_precision": "no", "num_processes": 2}
    ended = {"global_batch_size": 16}
    assert split(text, "a", "zero3_nvme", ended_launch=former, ended=ended) == (
        "phases:\n  - name: a\n    global_batch_size: 16\n    until: 250 # end\n"
        '    launch: {preset: torch, mixed_precision: "no", num_processes: 2}\n'
        "  - name: a-zero3_nvme\n    until: 300\n"
        "    launch: {preset: zero3_nvme, offload_path: /nvme, mixed_precision: bf16}\n"
    )


def test_what_a_switch_may_lose_is_reported_of_each_switch():
    """`allow` means the start of the phase that is cut, not that of the new one."""
    text = "phases:\n  - {name: a, until: 300, launch: torch, allow: [moments]}\n"
    assert split(text, "a").endswith("  - {name: a-zero2, until: 300, launch: zero2}\n")


@pytest.mark.parametrize("mark", ["&p", "&p # a list", "!!seq", "&p\n# - not yet"])
@pytest.mark.parametrize("indent", ["", "  "])
def test_a_list_with_an_anchor_is_cut_like_another(mark: str, indent: str):
    """The parser lets it begin at the anchor, before its first dash."""
    text = f"phases: {mark}\n{indent}- name: a\n{indent}  until: 300\n"
    assert split(text, "a") == text.replace("300", "250") + (
        f"{indent}- name: a-zero2\n{indent}  until: 300\n{indent}  launch: zero2\n"
    )


def test_a_phase_and_a_launch_with_an_anchor_are_cut_like_others():
    """The new phase's keys stand where those of the other do, wherever the anchor stands."""
    text = (
        "phases:\n  - &first\n    name: a\n    until: 300\n"
        "    launch: &usual\n      preset: torch\n      num_processes: 1\n"
    )
    assert split(text, "a") == text.replace("300", "250") + (
        "  - name: a-zero2\n    until: 300\n"
        "    launch:\n      preset: zero2\n      num_processes: 1\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "day: 2026-13-45\nphases:\n  - {name: z, until: 300, launch: torch}\n",
        "phases:\n- &first\n name: z\n until: 300\n launch: torch\n",
        "phases:\n  - {name: z, <<: {until: 300}, launch: torch}\n",
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


def test_aliases_are_copied_as_they_are():
    """A value that is in another place stays there."""
    text = (
        "usual: &usual {preset: torch, num_processes: 1}\nphases:\n"
        "  - {name: a, until: 300, launch: torch, resolution: &big 64}\n"
        "  - name: b\n    until: 400\n    launch: *usual\n    resolution: *big\n"
    )
    assert split(text, "b") == text.replace("400", "250") + (
        "  - name: b-zero2\n    until: 400\n    launch: {preset: zero2, num_processes: 1}\n"
        "    resolution: *big\n"
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("torch", "{preset: torch, num_processes: 2}"),
        (
            "zero3_offload",
            "{preset: zero3_offload, num_processes: 2, deepspeed: {log_level: info}}",
        ),
    ],
)
def test_another_preset_leaves_offload_behind_and_torch_all_of_zero(
    preset: str, expected: str
) -> None:
    """Else the new phase would be refused, or offload where its preset does not."""
    text = (
        "phases:\n  - {name: a, until: 300, launch: {preset: zero2, num_processes: 2, "
        "offload_optimizer: cpu, deepspeed: {log_level: info}}}\n"
    )
    found = split(text, "a", preset)
    assert f"launch: {expected}}}" in found
    assert "offload_optimizer: cpu" in found.splitlines()[1]


@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3_nvme", "zero3_offload"])
def test_bf16_states_stay_where_the_optimizer_is_in_host_memory(preset: str) -> None:
    """Elsewhere the new phase would be refused for them."""
    text = (
        "phases:\n  - {name: a, until: 300, launch: {preset: zero2_offload, "
        "bf16_optimizer_states: true}}\n"
    )
    found = split(text, "a", preset).splitlines()[2]
    assert ("bf16_optimizer_states: true" in found) == (preset == "zero3_offload")


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


FEWER = {"launch": {"num_processes": 4}, "following": {"gradient_accumulation_steps": 2}}


@pytest.mark.parametrize(
    ("phase", "added"),
    [
        ("launch: zero2", "launch: {preset: zero2, num_processes: 4}"),
        ("launch: {preset: zero2, num_processes: 8}", "launch: {preset: zero2, num_processes: 4}"),
        (
            "launch:\n      preset: zero2 # two\n      num_processes: 8",
            "launch:\n      preset: zero2\n      num_processes: 4",
        ),
    ],
)
def test_the_same_preset_on_fewer_processes(phase: str, added: str) -> None:
    """The new phase has values of its own for launch and training; those of the cut one stay."""
    text = f"phases:\n  - name: a\n    until: 300\n    {phase}\n    resolution: 64\n"
    found = split_phase(text, Split(phase="a", step=250, name="a-x4", **FEWER))
    assert found == text.replace("300", "250") + (
        f"  - name: a-x4\n    until: 300\n    {added}\n    resolution: 64\n"
        "    gradient_accumulation_steps: 2\n"
    )


def test_nothing_of_a_launch_is_written_where_nothing_of_it_changes() -> None:
    """The run's own says it all."""
    text = "phases: [{name: a, until: 300, gradient_accumulation_steps: 1}]\n"
    more = {"following": {"gradient_accumulation_steps": 2, "allow": ["loss_scale"]}}
    assert split_phase(text, Split(phase="a", step=250, name="b", launch={}, **more)) == (
        "phases: [{name: a, until: 250, gradient_accumulation_steps: 1}, "
        "{name: b, until: 300, gradient_accumulation_steps: 2, allow: [loss_scale]}]\n"
    )
