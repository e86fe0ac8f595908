"""The native codec exists where it can be built, so that its tests are not skipped unnoticed."""

import os
import shutil

import pytest

from fsl_codecs import available
from fsl_codecs.native import load


def test_a_compiler_means_a_native_codec():
    """With a compiler, a missing extension is a broken build, not a reason to skip."""
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        pytest.skip("no C++ compiler here")
    module, why_not = load()
    assert module is not None, why_not
    assert "scalar" in available()
