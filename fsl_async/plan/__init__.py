"""The planner: bytes, seconds and memory of a method before a run. Pure arithmetic on shapes.

shapes         sizes of the parts of a model, and of the tensors that cross the cut
methods        what each client sends and receives in a round, by category and direction
tuning         the same for rounds of fine-tuning
link           seconds that bytes take
memory         what a client must hold
report         the plan of one method, model, workload and link

Shapes, categories and sizes of number formats are shared with runs: `fsl_async.accounting`.
"""
