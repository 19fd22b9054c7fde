import sys

from cofferdam.cli.main import main

sys.exit(main())
