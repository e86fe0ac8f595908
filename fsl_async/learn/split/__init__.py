"""The torch rooms of federated split learning: cuts, halves, auxiliary models and the mathematics of the methods.

Nothing here knows a network, a clock or a thread. A role's shell (or `lockstep.Lockstep`) carries what crosses the cut.
"""
