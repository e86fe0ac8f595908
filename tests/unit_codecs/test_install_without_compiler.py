"""An install without a C++ compiler succeeds with NumPy alone, and `fsl-node doctor` reports what
is missing.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LOOK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import fsl_codecs
import numpy as np
print(fsl_codecs.__file__)
print(fsl_codecs.implementation(), *fsl_codecs.available())
values = np.arange(5, dtype=np.float32)
print(*fsl_codecs.decode(fsl_codecs.encode(values, fsl_codecs.CodecSpec("fp32"))))
from fsl_async import cli
cli.main(["doctor", "--json"])
"""


def run(arguments, cwd, **variables):
    """Return the output of a program that must succeed."""
    environment = {key: text for key, text in os.environ.items() if key != "FSL_CODECS_PATH"}
    done = subprocess.run(
        arguments,
        env=environment | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.sweep
def test_without_a_compiler_the_codec_is_numpys(tmp_path):
    """A site without a compiler takes part, and learns how to be faster."""
    pytest.importorskip("scikit_build_core", reason="the build tool of extra dev is not here")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    run([*pip, "--wheel-dir", str(tmp_path), str(REPOSITORY)], tmp_path, CXX="/bin/false")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    # Without `site`, nothing leads to the checkout that this process has imported; its other
    # packages are wanted.
    packages = [path for path in sys.path if path.endswith("-packages")]
    look = [sys.executable, "-S", "-c", LOOK, json.dumps([str(installed), *packages])]
    where, names, values, report = run(look, tmp_path, FSL_KEYS=str(tmp_path)).splitlines()
    assert Path(where).is_relative_to(installed)
    assert names.split() == ["numpy", "numpy"]
    assert values.split() == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    found = {finding["name"]: finding for finding in json.loads(report)["findings"]}["codec"]
    assert found["status"] == "warning"
    assert found["text"].startswith(
        "numpy: the native codec is not built: install a C++17 compiler"
    )
