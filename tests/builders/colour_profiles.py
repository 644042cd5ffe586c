"""ICC profiles of a few hundred bytes, by the layout of ICC.1."""

from __future__ import annotations

import struct
from collections.abc import Sequence

SRGB_CURVE = struct.pack(">4sIHH7i", b"para", 0, 4, 0, *(
    round(value * 65536) for value in (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045, 0, 0)
))  # fmt: skip
WHITE = (0.9642, 1.0, 0.8249)
"""D50, the white of the profile connection space."""
SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
"""XYZ of red, green and blue, adapted to D50."""
P3 = ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841))


def gamma(exponent: float) -> bytes:
    """A curve of one exponent."""
    return struct.pack(">4sIIH", b"curv", 0, 1, round(exponent * 256)) + b"\0\0"


def rgb(primaries: Sequence[Sequence[float]], curve: bytes = SRGB_CURVE) -> bytes:
    """The profile of a screen with these primaries."""
    tags = {
        name: _xyz(value) for name, value in zip(("rXYZ", "gXYZ", "bXYZ"), primaries, strict=True)
    }
    return _profile("mntr", "RGB ", "XYZ ", tags | dict.fromkeys(("rTRC", "gTRC", "bTRC"), curve))


def grey(curve: bytes) -> bytes:
    """The profile of greys with this curve."""
    return _profile("mntr", "GRAY", "XYZ ", {"kTRC": curve})


def cmyk(paper: tuple[int, int, int], inked: tuple[int, int, int]) -> bytes:
    """The profile of a press: Lab bytes without ink, and with the most of any."""
    line = bytes(range(256))
    corners = b"".join(bytes(inked if corner else paper) for corner in range(16))
    identity = struct.pack(">9i", *(65536 if n % 4 == 0 else 0 for n in range(9)))
    table = struct.pack(">4sIBBBx", b"mft1", 0, 4, 3, 2) + identity + line * 4 + corners + line * 3
    return _profile("prtr", "CMYK", "Lab ", dict.fromkeys(("A2B0", "A2B1"), table))


def _xyz(value: Sequence[float]) -> bytes:
    return struct.pack(">4sI3i", b"XYZ ", 0, *(round(one * 65536) for one in value))


def _profile(device: str, space: str, connection: str, tags: dict[str, bytes]) -> bytes:
    text = struct.pack(">4sI", b"text", 0) + b"test\0"
    description = struct.pack(">4sII", b"desc", 0, 5) + b"test\0" + bytes(78)
    tags = {"desc": description, "cprt": text, "wtpt": _xyz(WHITE), **tags}
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        table += struct.pack(">4sII", name.encode(), start + len(body), len(value))
        body += value
    words = (device.encode(), space.encode(), connection.encode())
    header = struct.pack(">I4sI4s4s4s", start + len(body), b"lcms", 0x02400000, *words)
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    header += struct.pack(">3i", *(round(one * 65536) for one in WHITE))
    return header.ljust(128, b"\0") + table + body
