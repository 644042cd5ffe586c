"""What a refused call says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerotrain.errors import PipelineError


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(PipelineError) as caught:
        call(*arguments, **options)
    return str(caught.value)
