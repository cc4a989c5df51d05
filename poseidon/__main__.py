"""`poseidon` and `python -m poseidon`. Imports nothing that takes time: see `main`."""

import signal
import sys


def main() -> int:
    """The command line; the exit code. Ctrl-C while that is still being loaded ends it without a word."""
    patient = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # someone has it ignored
    if not patient:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from poseidon.cli.main import main as run

    if not patient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
