"""Split learning in torch.

The parts of a cut model at work, and what a client and the split server do with them.

Which computations a method is made of is in `fsl_async.roles.split.methods`. A shell carries what
crosses the cut.
"""
