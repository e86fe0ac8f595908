"""`fsl-node compare`: real runs side by side, one of each method, with the same data, seed and
first weights.

choices     what a comparison is: runs that have a label, settings and clients (no torch)
split       methods of split learning: their runs, and scores of the joined model
tune        rules of federated LoRA on a base model: their runs (no torch)
records     the records of all sites, tokenized, and those that are held out
alone       scores of tuned models; training without a network, `pooled` and `local`
places      where each node runs, and what lies between them
node        a node of a run, in a process of its own
runner      plays one run: its nodes, and what they report
outcome     from the clients' journals to a curve and a result (pure)
table       the table for people
plot        the picture (matplotlib, extra `plot`)
"""
