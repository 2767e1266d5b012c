"""`python -m torchtitan.train` on a machine without a GPU."""

import runpy

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()
runpy.run_module("torchtitan.train", run_name="__main__")
