"""What holds for all tests.

Property tests search briefly with every run, for hours with `--hypothesis-profile=nightly`.
"""

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nightly",
    max_examples=5_000,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them; a terminal's size is what the terminal says
    os.environ.pop(name, None)

# A shell that starts us in its background lets us, and whatever we start, ignore these.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
