"""The planner: bytes, seconds and memory of a method before anybody runs it. Pure arithmetic on shapes.

shapes         how large the halves of a model are, and what crosses between them
sizes          bytes that values take in a number format; our accounting and the published one
methods        what each client sends and receives in a round, by category and direction
pretraining    the same for a synchronisation of whole models
link           seconds that bytes take
memory         what a client must hold
report         all of it for one question
"""
