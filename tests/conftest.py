"""What makes equal computations give equal bits, for all tests and the processes they start."""

import os

# By default MKL sums in an order that depends on the processor and on where an array begins, so two
# processes with the same numbers differ in last bits. MKL reads it once, at its start.
os.environ["MKL_CBWR"] = os.environ.get("MKL_CBWR") or "COMPATIBLE"
