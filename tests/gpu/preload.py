"""What the processes of GPU tests are forked from: all imports, and nothing that opens the GPU."""

import cpuinfo
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (imports torch's compiler)
import tests.gpu.jobs
import tests.training.conftest  # noqa: F401
from deepspeed.accelerator import get_accelerator

PROCESSOR = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: PROCESSOR
if get_accelerator().device_name() == "cpu":
    # DeepSpeed asks for processors that are fast at it; every one computes it.
    get_accelerator().is_fp16_supported = lambda: True
