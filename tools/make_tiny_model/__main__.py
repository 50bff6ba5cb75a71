"""`python tools/make_tiny_model`: puts the folder above on the path, so that the files here can be one package."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from make_tiny_model.cli import main

    sys.exit(main())
