"""GPUs known to the planner: memory, speed, link to the host, and bf16 support."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerotrain.config.suggestions import nearest
from zerotrain.errors import PipelineError

MIB = 2**20
PCIE = {3: 12.5e9, 4: 25e9, 5: 50e9}
"""Bytes per second each way over 16 lanes, by generation, without the protocol's overhead."""
FILLERS = re.compile(
    r"\b(NVIDIA|AMD|GEFORCE|TESLA|INSTINCT|TENSOR|CORE|GPU|SXM\d?|PCIE|HBM\w*|OAM|\d+ ?GI?B)\b"
)
"""Words of a GPU's full name that do not distinguish it from others in the table."""
SIZE = re.compile(r"\b(\d+) ?GI?B\b")


@dataclass(frozen=True)
class Gpu:
    """GPU according to its data sheet.

    Attributes:
        name: Common name.
        mib: Memory in MiB as its driver shows it, the smallest variant first.
        tflops: Dense 16-bit products with float32 sums, 1e12 operations per second.
        pcie: PCIe generation of its link to the host.
        bf16: Whether it supports bf16.
    """

    name: str
    mib: tuple[int, ...]
    tflops: float
    pcie: int = 4
    bf16: bool = True

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second each way between host and device."""
        return PCIE[self.pcie]

    def memory(self, name: str) -> int:
        """Return the bytes of the variant in the name, such as A100-SXM4-80GB, or the smallest."""
        size = SIZE.search(name.upper())
        wanted = int(size[1]) * 1024 if size else 0
        return MIB * min(self.mib, key=lambda one: abs(one - wanted))


GPUS = (
    Gpu("B200", (183_359,), 2250, pcie=5), Gpu("H200", (143_771,), 989, pcie=5),
    Gpu("H100", (81_559,), 989, pcie=5), Gpu("H800", (81_559,), 989, pcie=5),
    Gpu("H20", (97_871,), 148, pcie=5), Gpu("A100", (40_960, 81_920), 312),
    Gpu("A800", (40_960, 81_920), 312), Gpu("L40S", (46_068,), 362), Gpu("L40", (46_068,), 181),
    Gpu("L4", (23_034,), 121), Gpu("A40", (46_068,), 150), Gpu("A10", (23_028,), 125),
    Gpu("RTX A6000", (49_140,), 155), Gpu("RTX 6000 Ada", (49_140,), 364),
    Gpu("V100", (16_384, 32_768), 125, pcie=3, bf16=False),
    Gpu("T4", (15_360,), 65, pcie=3, bf16=False),
    Gpu("RTX 5090", (32_607,), 210, pcie=5), Gpu("RTX 5080", (16_303,), 113, pcie=5),
    Gpu("RTX 4090", (24_564,), 165), Gpu("RTX 4080 SUPER", (16_376,), 104),
    Gpu("RTX 4080", (16_376,), 97), Gpu("RTX 4070 Ti SUPER", (16_376,), 88),
    Gpu("RTX 4070 Ti", (12_282,), 80), Gpu("RTX 4070", (12_282,), 58),
    Gpu("RTX 3090 Ti", (24_564,), 80), Gpu("RTX 3090", (24_576,), 71),
    Gpu("RTX 3080 Ti", (12_288,), 68), Gpu("RTX 3080", (10_240, 12_288), 59),
    Gpu("RTX 3070", (8_192,), 41), Gpu("RTX 3060", (12_288,), 26),
    Gpu("RTX 2080 Ti", (11_264,), 54, pcie=3, bf16=False),
    Gpu("MI300X", (196_592,), 1307, pcie=5), Gpu("MI250X", (65_520,), 383),
)  # fmt: skip


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name in short or long form; None if it is not listed.

    Args:
        name: The driver's name ("NVIDIA GeForce RTX 4090") or a common one ("4090").
    """
    wanted = _plain(name)
    known = {_plain(gpu.name): gpu for gpu in GPUS}
    short = {key.removeprefix("RTX "): gpu for key, gpu in known.items()}
    return known.get(wanted) or short.get(wanted)


def read_gpu(name: str) -> Gpu:
    """Return the GPU that a user names.

    Raises:
        PipelineError: it is not listed.
    """
    listed = find_gpu(name)
    if listed is None:
        plain = {_plain(gpu.name): gpu.name for gpu in GPUS}
        near = [plain[key] for key in nearest(_plain(name), plain, most=3)]
        known = ", ".join(plain.values())
        raise PipelineError(
            f"--gpu {name}: this GPU is not known",
            hint=(f"did you mean {' or '.join(near)}? " if near else "")
            + "--device-memory '24 GiB' alone plans for any GPU, without the step's time; known: "
            + known,
        )
    return listed


def _plain(name: str) -> str:
    words = re.sub(r"[-_]", " ", name.upper())
    words = FILLERS.sub(" ", re.sub(r"\bRTX(?=\d)", "RTX ", words))
    return " ".join(re.sub(r"\bGENERATION\b", " ", words).split())
