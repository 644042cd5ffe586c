"""What libraries print is not on the terminal, and everything else is, in pieces of any size."""

from __future__ import annotations

import sys

import pytest

from zerotrain.machine.child_process import supervise
from zerotrain.machine.output import LOG, TerminalOutput, print_detail

SITE = "/env/lib/python3.11/site-packages"
HIDDEN = (
    "[2026-11-24 09:48:51,288] [WARNING] [real_accelerator.py:213:get_accelerator] Setting "
    "accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.\n",
    "DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\n",
    "\rWriting model shards:   0%|          | 0/1 [00:00<?, ?it/s]\r"
    "Writing model shards: 100%|##########| 1/1 [00:00<00:00, 795.28it/s]\n",
    "Loading pipeline components...:  14%|#4        | 1/7 [00:00<00:01,  5.93it/s]\r",
    "Loading checkpoint shards: 100%|##########| 2/2 [00:00<00:00, 2.1it/s]\r\n",
    f"{SITE}/torch/_inductor/compile_fx.py:194: UserWarning: TensorFloat32 tensor cores for "
    "float32 matrix multiplication available but not enabled.\n  warnings.warn(\n",
    "[rank0]:[W1124 09:48:51.288 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was "
    "not called\n",
    "W1124 09:48:51.288000 4711 torch/distributed/run.py:792] \n",
    "Adam Optimizer #0 is created with AVX2 arithmetic capability.\n",
    "Config: alpha=0.001000, betas=(0.900000, 0.999000), weight_decay=0.01\n",
)
SHOWN = (
    "plain: torch on cpu, steps 0 to 300, global batch 32\n",
    "plain:  10%|#         | 30/300 [00:10<01:30, 3.0 steps/s]\r",
    "plain:  11%|#         | 33/300 [00:11<01:29, 3.0 steps/s]\r\n",
    "ERROR: photos/cat.png: cannot be read\n  Hint: remove it\n",
    "WARNING: 3 images are damaged\n",
    "[1/12] train_phase digits/plain\n",
    "/data/photos: 12 files\n",
    'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nValueError: 3\n',
    "\rmodel.safetensors:  12%|#2        | 1.2G/10G [00:10<01:30, 120MB/s]\r",
    "\n",
    "Mapping done\n",
)


def shown(data: bytes, size: int) -> bytes:
    """What is shown of bytes that come in pieces of a size."""
    terminal = TerminalOutput()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(map(terminal.visible, pieces)) + terminal.rest()


@pytest.mark.parametrize("line", HIDDEN)
def test_library_output_is_hidden(line):
    """Whole, and as it comes from a terminal; the lines about it stay."""
    for text in (line, line.replace("\r\n", "\n").replace("\n", "\r\n")):
        data = b"before\n" + text.encode() + b"after\n"
        assert shown(data, len(data)) == b"before\nafter\n"


def test_library_output_is_hidden_in_pieces():
    """A pipe may hand a line over in parts: what is shown is the same."""
    mixed = "".join(line for pair in zip(SHOWN, HIDDEN, strict=False) for line in pair)
    kept = "".join(SHOWN[: len(HIDDEN)])
    for size in (1, 7, 80, 97, 4096):
        assert shown(mixed.encode(), size) == kept.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
def test_output_of_our_own_is_shown_byte_for_byte(size):
    """In pieces of any size, to the last byte of a line without an end."""
    data = "".join(SHOWN).encode() + b"[no end"
    assert shown(data, size) == data


def test_a_bar_moves_while_it_is_drawn():
    """The start of a line that is none of a library's is shown at once."""
    terminal = TerminalOutput()
    assert terminal.visible(b"\rplain:  10%|") == b"\rplain:  10%|"
    assert terminal.visible(b"# | 30/300") == b"# | 30/300"


def test_library_output_and_details_are_in_the_log(tmp_path, capfd, monkeypatch):
    """The terminal has neither, the log has both; our lines are in both."""
    program = (
        f"print({HIDDEN[0]!r}, end='', flush=True); print('ours', flush=True)\n"
        "from zerotrain.machine.output import print_detail\n"
        "print_detail('a: host memory')"
    )
    log = tmp_path / "logs" / "stage.log"
    monkeypatch.chdir(tmp_path)
    assert supervise([sys.executable, "-c", program], log=log) == 0
    assert capfd.readouterr().err == "ours\n"
    assert sorted(log.read_text().splitlines()) == sorted(
        [HIDDEN[0].rstrip(), "ours", "a: host memory"]
    )


def test_a_detail_is_printed_where_there_is_no_log(tmp_path, capfd, monkeypatch):
    """By hand, without --log; and where the log cannot be written."""
    monkeypatch.delenv(LOG, raising=False)
    print_detail("by hand")
    monkeypatch.setenv(LOG, str(tmp_path))
    print_detail("a folder is no log")
    assert capfd.readouterr().err == "by hand\na folder is no log\n"
