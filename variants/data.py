"""Not a data set: what `python variants/NAME.py` finds in place of the root's data.py, to say how it is started."""

import sys

sys.exit("start it from the repository's root, as a module:  python -m variants.NAME  (without .py)")
