"""Measurements behind `fsl-node bench`: this machine's codec and transport, beside its limits.

codec, codec_rows       `bench codec`: its settings and its run, the rows of one tensor
codec_tensors           tensors of a short training
codec_files             tensors of a safetensors file
limits, timing          the memory's limits; actions in turns, and the core's own speed
transport               `bench transport`: its settings and its run
transport_end           one end of one transfer, a process of its own
transport_task          what such a process is given, and what it counts
tables                  rows as tables for people

They are never timed tests. A row stands beside the machine's own limits, measured in turns in the
same run; medians are reported with their spread, and the load of the machine. Other programs
are measured beside them by benchmarks/codec.py and benchmarks/transport.py.
"""
