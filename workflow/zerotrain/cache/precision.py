"""Full float32 precision while encoding, whatever torch would choose for speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32, with 10 of float32's 23 mantissa bits, in convolutions and matrix products.

    cuDNN's convolutions use it by default on Ampere and later. The former settings are restored.
    """
    convolutions = torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cuda.matmul.allow_tf32 = products
