"""The run's configuration: typed, validated, with messages that name file, key, value and fix."""

from zerotrain.config.data import DataConfig
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.models import (
    CacheConfig,
    EvaluateConfig,
    Phase,
    RunConfig,
)
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.training import LoraConfig, ParamGroup, TrainConfig
from zerotrain.config.validation import ValidationConfig

__all__ = [
    "CacheConfig",
    "DataConfig",
    "EvaluateConfig",
    "LaunchConfig",
    "LoraConfig",
    "ParamGroup",
    "Phase",
    "RunConfig",
    "TrainConfig",
    "ValidationConfig",
    "parse_config",
    "read_config",
]
