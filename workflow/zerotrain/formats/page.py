"""The table of docs/exporting.md, from the formats themselves."""

from __future__ import annotations

from zerotrain.formats import FORMATS

HEAD = "| `--to` | of | what is written | who opens it |\n|---|---|---|---|"
OF = {True: "LoRA", False: "whole model", None: "either"}
MODELS = {"image": "images: ", "text": "text: ", None: ""}


def table() -> str:
    """The table in Markdown."""
    rows = [
        f"| `{name}` | {MODELS[form.modality]}{OF[form.adapter]} | {form.files} | {form.opens} |"
        for name, form in FORMATS.items()
    ]
    return "\n".join([HEAD, *rows])
