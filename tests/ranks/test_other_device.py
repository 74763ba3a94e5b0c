"""Updates, whole runs and the deep check on a device that is not the CPU, in a process of its own: see other_device.py.

What it can show: no tensor of the CPU meets one of the device, and what comes out is what the CPU makes of it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import TESTS


@pytest.mark.slow
def test_what_must_work_on_any_device_works_on_one_that_is_not_the_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--tb=short"]
    done = subprocess.run(
        [*command, str(TESTS / "other_device_cases.py")], capture_output=True, text=True, timeout=900, cwd=TESTS.parent
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
