"""Data sets on disk, and who trains on which samples. NumPy only.

    base         what every data set is: samples of one shape, labels, counts, a fingerprint
    idx          MNIST-format files, plain or gzip
    cifar        CIFAR-10 and CIFAR-100 binary folders
    npz          NumPy archives
    text         text by position, cut into windows (fsl_async.learn.data.corpus)
    hub          Hugging Face data sets saved to disk (needs pyarrow)
    find         which of them a path is
    partition    IID and Dirichlet, from label counts and a seed
    counter      numbers by counter: the same on every machine

Nothing unpickles. Files are mapped, or read up to a stated limit; what is short, damaged or out of range is one line with file and offset.
"""
