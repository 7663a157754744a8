"""``python -m tools`` is the ``diptych`` command."""

from tools.cli import main

main()
