"""Rules of federated LoRA side by side, and beside them one process on all records, and each site
alone.

choices   what is compared, checked; the configuration of a run (no torch)
server    the parameter server, a process of its own that reports its memory (no torch)
client    a site, as a thread of this process or as a process
records   the records of all sites, tokenized, and those that are held out
scores    a version's metrics on held-out records
alone     training without a network: `pooled` and `local`
outcome   results, rows, and the table's cells (pure)
pictures  the picture (matplotlib, extra `plot`)
runs      one run after the other
"""
