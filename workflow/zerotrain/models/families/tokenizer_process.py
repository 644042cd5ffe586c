"""Tokenizers of others, each called in a process of its own.

A chat template can loop for ever, and a regular expression of tokenizer.json take years, at any
text; neither has a limit in its library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.machine.confined import Confined

MOST = 4
"""Processes that wait for their next call: a pipeline has up to three tokenizers."""
_PROCESSES: dict[tuple[int, str, str], tuple[Any, Confined]] = {}
"""By tokenizer, chat template and special tokens; the tokenizer is kept, or its id would be
another's."""


def call(tokenizer: Any, work: Callable[..., Any], *given: Any) -> Any:
    """Call a function with a tokenizer, in the tokenizer's process.

    Args:
        tokenizer: A tokenizer of transformers.
        work: A function of a module, which takes it and what is given.
        *given: Values of JSON, as its result is.

    Raises:
        PipelineError: the function does, or takes more time or memory than such a call needs.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    key = (id(tokenizer), template, str(tokenizer.special_tokens_map))
    if key not in _PROCESSES:
        while len(_PROCESSES) >= MOST:
            _PROCESSES.pop(next(iter(_PROCESSES)))[1].close()
        what = "tokenizer or its chat template"
        _PROCESSES[key] = tokenizer, Confined(lambda text: _answer(tokenizer, text), what)
    sent = json.dumps([work.__module__, work.__name__, given])
    found, error = json.loads(_PROCESSES[key][1](sent))
    if error is not None:
        raise PipelineError(error[0], hint=error[1])
    return found


def _answer(tokenizer: Any, sent: str) -> str:
    module, name, given = json.loads(sent)
    try:
        return json.dumps([getattr(sys.modules[module], name)(tokenizer, *given), None])
    except PipelineError as error:
        return json.dumps([None, [error.what, error.hint]])
