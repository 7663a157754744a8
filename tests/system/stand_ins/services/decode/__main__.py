import sys

from services.stand_in import main

sys.exit(main())
