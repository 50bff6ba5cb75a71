"""`python -m image_rewards`."""

import sys

from image_rewards.cli import main

if __name__ == "__main__":
    sys.exit(main())
