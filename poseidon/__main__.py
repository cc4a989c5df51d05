"""`python -m poseidon` is `poseidon`."""

import sys

from poseidon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
