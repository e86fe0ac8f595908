"""`fsl-node compare`: methods of split learning side by side, one real run of each with the same
data, seed and first weights.

choices     pure: what is compared, checked
outcome     pure: from what nodes report to curves; when the target is reached; rows
table       the table for people
plot        the picture (matplotlib, extra `plot`)
problem     what is trained: images or text, the parts at each node, batches, the held-out set
nodes       a parameter server and a client, as threads of this process or as processes of their own
places      where each node runs, and what lies between them
processes   a node as a process of its own (no torch)
comparison  one run after the other
tuning      the same for rules of federated LoRA on a base model
"""
