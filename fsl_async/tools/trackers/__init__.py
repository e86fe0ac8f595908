"""A run's figures in the programs that people watch training with.

    catalog.py      what is shown: name, unit, labels, and where in a run's state it is;
                    the journal's lines -> points: a step, a time, values by series        pure
    outbox.py       reads a journal and gives trackers what is new; tries again after an error
    tensorboard.py, weights_and_biases.py, mlflow.py       one tracker each
    prometheus.py   the same figures on a page for Prometheus

A reader's process: the node that writes the journal takes no part.
"""
