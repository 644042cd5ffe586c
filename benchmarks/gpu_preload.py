"""What the process imports, and looks up, of which gpu.py's measurements are forks."""

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (imports torch's compiler)

import zerotrain.artifact.sources
import zerotrain.cache.encoding
import zerotrain.export.export
import zerotrain.launch.planner.prediction
import zerotrain.launch.planner.tracing
import zerotrain.models.families.causal_lm
import zerotrain.models.families.qwen_image
import zerotrain.models.families.sd3
import zerotrain.models.families.sdxl
import zerotrain.stages.prepare_dataset
import zerotrain.training.engines.torch_engine
import zerotrain.training.engines.zero_engine
import zerotrain.training.rank
import zerotrain.training.reporting.event_files

zerotrain.artifact.sources.training_digest("sdxl")  # reads most of the package
gc.freeze()  # or each fork copies all pages as it collects
