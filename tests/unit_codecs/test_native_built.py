"""That the native codec is there where it could have been built, so that its tests do not skip in
silence.
"""

import os
import shutil

import pytest

from fsl_codecs import available
from fsl_codecs.native import load


def test_a_compiler_means_a_native_codec():
    """An install that could have built the extension and did not is a broken build, not a reason to
    skip its tests.
    """
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        pytest.skip("no C++ compiler here")
    module, why_not = load()
    assert module is not None, why_not
    assert "scalar" in available()
