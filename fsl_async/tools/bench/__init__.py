"""Measurements behind `fsl-node bench`: one file for what runs, and small ones for what it measures with.

They are never timed tests. A row stands beside the machine's own limits and, where there is one, beside a peer, all measured in turns
in the same run; medians are reported with their spread, and the load of the machine.
"""
