"""What a refused call says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerotrain.errors import PipelineError


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> PipelineError:
    """The error with which a call is refused."""
    with pytest.raises(PipelineError) as caught:
        call(*arguments, **options)
    return caught.value


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message with which a call is refused."""
    return str(refused(call, *arguments, **options))
