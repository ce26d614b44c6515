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

if {keep}:
    assert keep_freed_memory()
print(min([faults() for _ in range(5)][2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a choice of glibc")
@pytest.mark.parametrize(("keep", "comes_back"), [(True, True), (False, False)])
def test_a_block_that_was_freed_is_used_again_instead_of_asking_the_kernel_for_new_pages(keep, comes_back):
    script = FAULTS_OF_A_SECOND_TOUCH.format(keep=keep)
    faults = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert (faults < 1000) == comes_back, f"{faults} page faults for a block of 80 MB, touched before"
