"""What the fork server imports and looks up once, so that its forks need not."""

import sys

import cpuinfo
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (imports torch's compiler)
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from tests.training import tied_family, unused_family

import zerotrain.families
import zerotrain.families.sd3
import zerotrain.families.sdxl
import zerotrain.training.rank
import zerotrain.training.torch_engine
import zerotrain.training.zero_engine

sys.modules["zerotrain.families.tied"] = tied_family
sys.modules["zerotrain.families.unused"] = unused_family
zerotrain.families.FAMILIES["tied"] = zerotrain.families.FAMILIES["sdxl"]
zerotrain.families.FAMILIES["unused"] = zerotrain.families.FAMILIES["sdxl"]
CPUAdamBuilder().load()
ShareMemCommBuilder().load()
# DeepSpeed asks for processors that are fast at it; every one computes it.
get_accelerator().is_fp16_supported = lambda: True
PROCESSOR = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: PROCESSOR
