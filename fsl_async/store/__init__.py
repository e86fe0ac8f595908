"""The parameter server's durable state in one run directory: ledger, spool, versions, outer step.
NumPy only.
"""
