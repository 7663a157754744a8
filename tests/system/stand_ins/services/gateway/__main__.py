import sys

from services.stand_in import main, serve_http

sys.exit(main(serve_http))
