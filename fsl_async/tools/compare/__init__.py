"""`fsl-node compare`: real runs side by side, one of each method, with the same data, seed and
first weights.

choices     what a comparison is: runs that have a label, settings and clients (no torch)
split       methods of split learning: their runs, and scores of the joined model
tune        rules of federated LoRA on a base model: their runs (no torch)
alone       the records of all sites, tokenized; scores of tuned models; training without a
            network, `pooled` and `local`
server      the server of a run, whose versions wait for their scores
runner      a run as a scenario, and what its nodes report
outcome     from the clients' journals to a curve and a result (pure)
table       the table, and the picture (matplotlib, extra `plot`)
"""
