"""The process that adds up what groups gained, with torch.distributed; the PS itself has no torch.

    python -m fsl_async.nodes.reduction_helper      frames on standard input and output (`pipes`)

It is a process of its own because a waiting all-reduce cannot be woken, and because gloo may end
its process. The parameter server starts it at the first poll and keeps it (`parent`): importing
torch takes seconds. Each attempt has a child of it (`reduction`), which a fork makes in some
milliseconds, and which is killed in doubt.
"""
