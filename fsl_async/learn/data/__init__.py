"""Data sets on disk, and their division among clients. NumPy only.

    dataset      samples, labels, counts, a fingerprint; MNIST-format files, CIFAR binary folders,
                 NumPy archives
    corpus       text by position, cut into windows
    hub          Hugging Face data sets saved to disk (needs pyarrow)
    sources      texts, of what `--data` of pretraining names
    packing      tokens of texts in windows; a client's position in its data
    tokenizer    bytes, or a Hugging Face tokenizer.json
    partition    IID, Dirichlet and sorted, from label counts and a seed
    counter      counter-based random numbers: the same on every machine
    facts        shape and classes of a run's data

Nothing is unpickled. Plain files are mapped; gzip files and NumPy archives are read into memory. A
short or damaged file, or a label out of range, raises DataError: one line with the file's name.
"""
