"""Convert a model file for serving, in a process of its own: the libraries for it are large.

Run as ``python -m tools.doctor.convert PARENT MODEL``; an error is one line on stderr.
"""

import sys

from shared.engine.model_files import resolve_model
from shared.errors import DiptychError
from tools.parent import follow_parent


def main() -> int:
    """Return 0, or 2 with ``error: ...`` on stderr."""
    if not follow_parent(int(sys.argv[1])):
        return 1
    try:
        resolve_model(sys.argv[2])
    except DiptychError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
