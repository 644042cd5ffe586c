"""The run's configuration: typed, validated, with messages that name file, key, value and fix."""

from zerotrain.config.models import (
    CacheConfig,
    DataConfig,
    EvaluateConfig,
    LaunchConfig,
    Phase,
    RunConfig,
    TrainConfig,
)
from zerotrain.config.read import parse_config, read_config

__all__ = [
    "CacheConfig",
    "DataConfig",
    "EvaluateConfig",
    "LaunchConfig",
    "Phase",
    "RunConfig",
    "TrainConfig",
    "parse_config",
    "read_config",
]
