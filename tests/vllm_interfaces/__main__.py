"""``python -m tests.vllm_interfaces [WHEEL_OR_FOLDER]...``: list the interfaces in use beside this file."""

import sys
import sysconfig
from pathlib import Path

from tests.vllm_interfaces.listing import write
from tests.vllm_interfaces.sources import Sources

for path in sys.argv[1:] or [sysconfig.get_path("purelib")]:
    print(write(Sources(Path(path))))
