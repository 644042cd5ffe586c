"""What of a model is trained: patterns of its own parameters, groups of them, a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from zerotrain.config.section import Section, Whole
from zerotrain.errors import PipelineError


def _pattern(value: str) -> str:
    import regex  # takes as long as half of the configuration's models

    try:
        regex.compile(value)
    except regex.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression that is searched for in parameter names."""


class ParamGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    parameters: list[Pattern] = Field(
        min_length=1,
        description="Regular expressions; a parameter whose name contains one belongs here.",
    )
    learning_rate: float | None = Field(
        None, ge=0, description="Peak of the schedule for these; default: the phase's."
    )
    adam_weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of these; default: the phase's."
    )


class LoraConfig(Section):
    """Train a low-rank adapter and leave the model as it is. Without this section all is trained.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021),
    https://arxiv.org/abs/2106.09685.
    """

    rank: Whole = Field(16, ge=1, description="Rank of the two factors.")
    alpha: float | None = Field(
        None, gt=0, description="The adapter's effect is scaled by alpha / rank; default: rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the first factor.")
    target_modules: list[str] | Literal["all-linear"] | None = Field(
        None,
        description="Ends of the names of the layers that get an adapter, or `all-linear`; "
        "default: the projections of every attention.",
    )
    use_rslora: bool = Field(
        False, description="Scale by alpha / sqrt(rank), which suits high ranks."
    )
    use_dora: bool = Field(
        False, description="Train the magnitude of each layer's weights next to their direction."
    )
    init_lora_weights: Literal["default", "gaussian", "orthogonal"] = Field(
        "default",
        description="Initial values of the factors; the second is zero, except for orthogonal.",
    )

    fused_layers: bool = Field(
        False,
        description="flux: layers that are one in the original files (query, key and value; in "
        "single blocks `proj_mlp` too) share their first factor, as DiffSynth-Studio and kohya "
        "train them.",
    )

    @field_validator("target_modules")
    @classmethod
    def _some(cls, value: list[str] | str | None) -> list[str] | str | None:
        if value == []:
            raise ValueError("names no layer; leave it out for the attention's projections")
        return value

    @model_validator(mode="after")
    def _can_share(self) -> LoraConfig:
        if not self.fused_layers:
            return self
        if self.dropout:
            raise ValueError(
                f"dropout {self.dropout:g} would drop other values for each of the fused_layers; "
                "set one of them to its default"
            )
        if self.use_dora or self.init_lora_weights == "orthogonal":
            own = "use_dora" if self.use_dora else "init_lora_weights: orthogonal"
            raise ValueError(f"{own} is for layers one by one, and not with fused_layers")
        return self

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _keeps_the_base(cls, value: Any) -> Any:
        if value in ("pissa", "olora", "corda", "eva", "loftq") or str(value).startswith("pissa"):
            raise ValueError(
                f"{value} changes the base's own weights, which stay as they are here, so that an "
                "adapter goes with every copy of the base"
            )
        return "default" if value is True else value

    def values(self) -> dict[str, Any]:
        """Return the section's values, alpha resolved."""
        alpha = self.rank if self.alpha is None else self.alpha
        values = {**self.model_dump(), "alpha": float(alpha)}
        if not self.fused_layers:
            del values["fused_layers"]  # digests and run.yaml are those of before the key
        return values


SECONDS = 1.0
"""Limit of one search. A name has some hundred characters; only a pattern whose repetitions can
share them in exponentially many ways takes longer, and then it can take years."""


def is_frozen(
    name: str, frozen_parameters: Sequence[str], trainable_parameters: Sequence[str]
) -> bool:
    """Return whether a parameter stays as the base has it.

    Args:
        name: The parameter's.
        frozen_parameters: Regular expressions; what contains one stays.
        trainable_parameters: The same; if there are some, what contains none stays, too.
    """
    chosen = not trainable_parameters or _fits(trainable_parameters, name)
    return not chosen or _fits(frozen_parameters, name)


def check_pattern_matches(key: str, pattern: str, names: Sequence[str]) -> None:
    """Check that a pattern matches a name: a typing error would change what is trained, unseen.

    Args:
        key: The configuration's key.
        pattern: A regular expression of it.
        names: Names of all parameters.

    Raises:
        PipelineError: it fits none; some names are shown. Or a search takes too long.
    """
    if not any(matches(pattern, name) for name in names):
        raise PipelineError(
            f"{key}: {pattern!r} is in the name of none of the {len(names)} parameters",
            hint=f"names look like {', '.join(list(names)[:3])}",
        )


def matches(pattern: str, name: str, *, whole: bool = False) -> bool:
    """Return whether a name contains a pattern.

    Args:
        pattern: A regular expression, which may be another person's.
        name: The name of a parameter or of a layer.
        whole: The pattern is to be the whole name.

    Raises:
        PipelineError: the search takes longer than SECONDS.
    """
    import regex  # as in zerotrain.config.trained_part

    search = regex.fullmatch if whole else regex.search
    try:
        return search(pattern, name, timeout=SECONDS) is not None
    except TimeoutError:
        raise PipelineError(
            f"{pattern!r}: looking for it in the name {name!r} takes longer than {SECONDS:g} s",
            hint="a repetition in a repetition, such as (a+)+, tries exponentially many ways; "
            "write it without one",
        ) from None


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)
