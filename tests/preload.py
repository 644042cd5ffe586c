"""What the fork server imports and looks up once, so that its forks need not."""

import gc
import sys
from types import ModuleType

import cpuinfo
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (imports torch's compiler)
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from tests.training.odd_families import FAMILIES as ODD

import zerotrain.models.families
import zerotrain.models.families.sd3
import zerotrain.models.families.sdxl
import zerotrain.training.engines.torch_engine
import zerotrain.training.engines.zero_engine
import zerotrain.training.rank
import zerotrain.training.reporting.event_files

for name, family in ODD.items():
    module = ModuleType(f"zerotrain.models.families.{name}")
    module.FAMILY = family
    sys.modules[module.__name__] = module
    zerotrain.models.families.FAMILIES[name] = family.spec
CPUAdamBuilder().load()
ShareMemCommBuilder().load()
# DeepSpeed asks for processors that are fast at it; every one computes it.
get_accelerator().is_fp16_supported = lambda: True
PROCESSOR = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: PROCESSOR
gc.freeze()  # or each fork copies all pages as it collects
