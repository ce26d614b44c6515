import subprocess
import sys

import pytest

FAULTS_OF_A_SECOND_TOUCH = """
import resource, torch
from megatron_blackmamba.runtime.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(20_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
print(min(faults() for _ in range(40)))  # at last the heap holds a block that fits
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a choice of glibc")
def test_freed_block_is_reused_instead_of_new_pages():
    done = subprocess.run([sys.executable, "-c", FAULTS_OF_A_SECOND_TOUCH], check=True, capture_output=True, text=True)
    faults = int(done.stdout)  # by default 20,000 small pages, or some hundreds where the kernel lends huge ones
    assert faults < 100, f"{faults} page faults for a block of 80 MB, touched before"
