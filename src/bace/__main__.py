"""python -m bace"""

import sys

from bace.cli.main import main

sys.exit(main())
