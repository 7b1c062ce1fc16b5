"""Not a data set: `python variants/NAME.py` finds this instead of the root's data.py; it says how to start NAME."""

import sys
from pathlib import Path

script = Path(sys.argv[0])
print(f"{script.name}: error: start it from the repository's root: python -m variants.{script.stem}", file=sys.stderr)
sys.exit(2)
