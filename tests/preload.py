"""What the fork server imports once, so that its forks need not."""

import sys

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.training import tied_family

import zerotrain.families
import zerotrain.families.sd3
import zerotrain.families.sdxl
import zerotrain.training.rank
import zerotrain.training.torch_engine
import zerotrain.training.zero_engine

sys.modules["zerotrain.families.tied"] = tied_family
zerotrain.families.FAMILIES["tied"] = zerotrain.families.FAMILIES["sdxl"]
CPUAdamBuilder().load()
# DeepSpeed asks for processors that are fast at it; every one computes it.
get_accelerator().is_fp16_supported = lambda: True
