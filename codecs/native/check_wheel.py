"""Check an installed wheel: the native codec is in it, and gives the bytes of the NumPy reference.

    python -P codecs/native/check_wheel.py

cibuildwheel runs it for each wheel (pyproject.toml), `bin/wheel-check` for one built here.
"""

import sys

import numpy as np

import fsl_codecs
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS
from fsl_codecs.frame import CodecSpec

VALUES = 300_000  # more than one chunk


def main() -> None:
    """Compare every native path with NumPy, in every format; exit with the first difference."""
    native = [name for name in fsl_codecs.available() if name != "numpy"]
    if not native:
        sys.exit(f"no native codec in {fsl_codecs.__file__}: {fsl_codecs.dispatch.choice().reason}")
    values = np.random.default_rng(0).standard_normal(VALUES, dtype=np.float32)
    reference = implementation_named("numpy")
    for kind in FORMATS:
        spec = CodecSpec(kind)
        wanted = np.empty(fsl_codecs.bound(values.size, spec), np.uint8)
        size = reference.encode_into(values, wanted, spec)
        decoded = np.empty_like(values)
        reference.decode_into(wanted[:size], decoded)
        for name in native:
            path = implementation_named(name)
            found = np.empty_like(wanted)
            if path.encode_into(values, found, spec) != size or (found != wanted)[:size].any():
                sys.exit(f"{name} codes {kind} otherwise than NumPy")
            read = np.empty_like(values)
            path.decode_into(found[:size], read)
            if read.tobytes() != decoded.tobytes():
                sys.exit(f"{name} decodes {kind} otherwise than NumPy")
    print(f"native codec: {', '.join(native)}; all formats as NumPy ({fsl_codecs.__file__})")


if __name__ == "__main__":
    main()
