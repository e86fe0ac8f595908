"""Put this folder on the path: a script shares the targets, so they are modules beside the
tests.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
