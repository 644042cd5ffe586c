"""The prompt text of Stanford Alpaca, which its script wraps around a question.

Taori et al., "Stanford Alpaca" (2023), https://github.com/tatsu-lab/stanford_alpaca: the answer
follows immediately. Scripts of openMind and many others use the same text.
"""

from __future__ import annotations

REQUEST = "Write a response that appropriately completes the request."
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    f"context. {REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    f"Below is an instruction that describes a task. {REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def alpaca_text(instruction: str, given: str = "") -> str:
    """Return the prompt for an instruction, with its input if given."""
    text = WITH_INPUT if given else WITHOUT_INPUT
    return text.format(instruction=instruction, input=given)
