"""The daemon uses the descriptors that it is allowed."""

import subprocess
import sys

import pytest

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from poseidon.daemon import use_descriptors
use_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard", "used"), [(256, 512, 512), (300, 300, 300)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, used: int) -> None:
    program = LIMITED.format(soft=soft, hard=hard)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout) == used
