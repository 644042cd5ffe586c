"""The section `peft`: which methods and keys it takes, and what it says of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tests.builders.runs import make_run

from zerotrain.config.adapters import KEYS, METHODS, OURS, REFUSED
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError

CLASSES = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def default(item: Field[Any]) -> Any:
    """A key's default as JSON has it; None where it has no such form."""
    found = item.default if item.default is not MISSING else None
    if item.default_factory is not MISSING:
        found = item.default_factory()
    if isinstance(found, str) and type(found) is not str:
        found = found.value  # an enumeration
    return found if isinstance(found, bool | int | float | str) else None


def test_every_method_of_peft_is_trained_or_refused() -> None:
    """A new release's methods are seen here first."""
    assert METHODS.keys() | REFUSED.keys() == CLASSES.keys()
    assert not METHODS.keys() & REFUSED.keys()
    assert peft.__version__


def test_keys_are_those_of_pefts_classes(generated: Callable[[Path, str], None]) -> None:
    """config/peft.json holds the keys and defaults of each method's configuration class."""
    known = {
        name: {f.name: default(f) for f in fields(CLASSES[name]) if f.init and f.name not in OURS}
        for name in METHODS
    }
    generated(KEYS, json.dumps(known, indent=1) + "\n")


CHANGES = {
    "linear": "linear layers",
    "any": "linear and convolution layers",
}
PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def filled(page: str, name: str, lines: list[str]) -> str:
    """The page with these lines between the marks of that name."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return before + begin + "".join(f"{line}\n" for line in lines) + end + rest.partition(end)[2]


def test_the_page_lists_every_method(generated: Callable[[Path, str], None]) -> None:
    """docs/adapters.md: what is trained, and the refusals."""
    head = ["| `peft_type` | method | changes |", "|---|---|---|"]
    rows = head + [
        f"| `{name}` | {method.title} | {CHANGES[method.changes]} |"
        for name, method in METHODS.items()
    ]
    refused = [f"- `{name}`: {why}" for name, why in REFUSED.items()]
    generated(PAGE, filled(filled(PAGE.read_text(), "methods", rows), "refused", refused))


def run(**changes: Any) -> dict[str, Any]:
    """A small configuration with these keys."""
    return make_run(data={"images": "x"}) | changes


TEXT = {"family": "causal_lm", "data": {"source": "sums"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft": {"r": 8}}, "peft: names no method: give peft_type, one of C3A"),
        ({"peft": {"peft_type": "LOHAA"}}, "'LOHAA' is no method of peft; did you mean LOHA?"),
        ({"peft": {"peft_type": "adalora"}}, "ADALORA is not trained here: it takes ranks away by"),
        ({"peft": {"peft_type": "XLORA"}}, "XLORA is not trained here: it mixes adapters that"),
        ({"peft": {"peft_type": "VERA"}}, "projections that lie outside of them, which ZeRO-3"),
        ({"peft": {"peft_type": "LORA"}}, "it has a section of its own, `lora`"),
        (
            {"peft": {"peft_type": "LOHA", "rank": 8}},
            "rank is no key of LOHA; its keys are rank_pattern",
        ),
        (
            {"peft": {"peft_type": "LOHA", "r": "8"}},
            "r of LOHA is a number, 8 by default, and not '8'",
        ),
        ({"peft": {"peft_type": "LOHA", "r": True}}, "and not True"),
        ({"peft": {"peft_type": "LOHA", "modules_to_save": ["x"]}}, "trainable_parameters"),
        ({"peft": {"peft_type": "LOHA", "alhpa": 8}}, "no key of LOHA; did you mean alpha?"),
        ({"peft": {"peft_type": "LOHA", "target_modules": []}}, "target_modules names no layer"),
        ({"peft": {"peft_type": "LOHA"}, "lora": {}}, "give lora or peft, not both"),
        ({"base_model_precision": "nf4"}, "trains next to them, and the section lora is missing"),
        ({"base_model_precision": "nf4", "peft": {"peft_type": "LOHA"}}, "section lora is missing"),
        ({"base_model_exclude_modules": ["a"], "lora": {}}, "and it quantizes none"),
        ({"trainable_parameters": ["a"], "lora": {}}, "trainable_parameters chooses among the"),
        ({"trainable_parameters": ["("]}, "is no regular expression"),
        ({"peft": {"peft_type": "PROMPT_TUNING"}}, "it trains tokens before a text, and no layer"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(
    changes: dict[str, Any], said: str
) -> None:
    """When the configuration is read, before anything runs."""
    with pytest.raises(PipelineError) as refused:
        parse_config(run(**changes), "test")
    assert said in refused.value.what


def test_a_method_is_named_in_any_case_and_keeps_what_is_given() -> None:
    """peft's own defaults are not written out: they are peft's."""
    found = parse_config(run(peft={"peft_type": "loha", "r": 4}), "test")
    assert found.peft == found.adapter_values() == {"peft_type": "LOHA", "r": 4}
    assert found.lora is None
