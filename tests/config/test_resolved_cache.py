"""The type in which tensors are cached where the configuration does not give one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.runs import make_config

from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS, PRESETS
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import CacheSettings, LaunchSettings


def make_run_of(family: str, base: str, **sections: Any) -> RunConfig:
    """A run of a family on data of its kind."""
    data = {"source": "sums"} if family in LANGUAGE_MODELS else {"images": "photos"}
    return make_config(family=family, base=base, data=data, **sections)


def stored_as(run: RunConfig) -> set[str]:
    """The types by which the cache is made and planned, and the launch is planned."""
    settings = CacheSettings.of(run).cache, LaunchSettings.of(run, "a").resolved_cache
    return {one.dtype for one in (run.resolved_cache, *settings)}


@pytest.mark.parametrize("base", [*PRESETS, "models/own", "owner/name", "a:vae/*,b:unet/*"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_model_of_images_is_cached_in_bf16(family: str, base: str) -> None:
    """A preset and text are in fp32."""
    is_real_of_images = base not in PRESETS and family not in LANGUAGE_MODELS
    assert stored_as(make_run_of(family, base)) == {"bf16" if is_real_of_images else "fp32"}


@pytest.mark.parametrize("base", ["nano", "owner/name"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_given_type_is_taken(base: str, dtype: str) -> None:
    """Whatever the base; null is the default."""
    assert stored_as(make_run_of("sdxl", base, cache={"dtype": dtype})) == {dtype}
    default = stored_as(make_run_of("sdxl", base))
    assert stored_as(make_run_of("sdxl", base, cache={"dtype": None})) == default
