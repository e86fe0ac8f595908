"""Readers of common file formats: their samples, and one line for each unusable file."""

import gzip
import zipfile

import numpy as np
import pytest

from fsl_async.errors import DataError
from fsl_async.learn.data import dataset
from fsl_async.learn.data.dataset import check_gaps, open_cifar, open_idx, open_npz, read_idx
from fsl_async.learn.data.facts import open_dataset

IMAGES = np.arange(7 * 4 * 3, dtype=np.uint8).reshape(7, 4, 3)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)
CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def idx_bytes(array):
    code = CODES.get(array.dtype.str.lstrip("|"), CODES.get(array.dtype.str))
    head = bytes([0, 0, code, array.ndim])
    return head + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist(folder, images=IMAGES, labels=LABELS, *, stem="train", pack=bytes, suffix=""):
    folder.mkdir(exist_ok=True)
    pair = (
        folder / f"{stem}-images-idx{images.ndim}-ubyte{suffix}",
        folder / f"{stem}-labels-idx1-ubyte{suffix}",
    )
    for path, array in zip(pair, (images, labels), strict=True):
        path.write_bytes(pack(idx_bytes(array)))
    return pair


def refused(match, call, *args, **how):
    with pytest.raises(DataError, match=match) as caught:
        call(*args, **how)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz")])
def test_mnist_files_plain_and_gzip(tmp_path, pack, suffix):
    """Plain and gzip files must give the same samples, and plain ones must be mapped."""
    mnist(tmp_path / "m", pack=pack, suffix=suffix)
    mnist(tmp_path / "m", IMAGES[:2], LABELS[:2], stem="t10k", pack=pack, suffix=suffix)
    data = open_dataset(tmp_path / "m")
    assert (data.samples, data.sample_shape, data.dtype, data.classes) == (7, (4, 3), np.uint8, 10)
    assert data.labels.tolist() == LABELS.tolist()
    assert data.label_counts() == (0, 2, 1, 1, 1, 1, 0, 0, 0, 1)
    assert len(open_dataset(tmp_path / "m", classes=12).label_counts()) == 12
    assert (data.read([6, 0, 6]) == IMAGES[[6, 0, 6]]).all()
    assert open_dataset(tmp_path / "m", split="test").samples == 2
    path, labels = mnist(tmp_path / "m", pack=pack, suffix=suffix)
    for named in (path, labels):
        assert open_dataset(named).fingerprint == data.fingerprint
    assert isinstance(read_idx(path), np.memmap) == (not suffix)
    with pytest.raises(IndexError):
        data.read([7])
    with pytest.raises(IndexError):
        data.read([-1])


@pytest.mark.parametrize("dtype", sorted(CODES))
def test_every_type_of_an_idx_file_comes_out_in_native_order(tmp_path, dtype):
    """Big-endian floats that reach torch unconverted are an error or noise."""
    values = np.arange(-4, 20).reshape(4, 3, 2).astype(dtype)
    path, _ = mnist(tmp_path / "m", values, LABELS[:4])
    data = open_idx(path)
    assert data.read([1, 3]).dtype == np.dtype(dtype).newbyteorder("=")
    assert data.read([1, 3]).dtype.isnative
    assert (data.read([1, 3]) == values[[1, 3]]).all()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_damaged_idx_files_are_named(tmp_path, pack):
    """After an incomplete copy one line must name the file and what is wrong."""
    whole = idx_bytes(IMAGES)
    path = tmp_path / "a-images-idx3-ubyte"
    cases = {
        b"": "images-idx3-ubyte' .*nothing is no idx head",
        b"PK\3\4": "50 4b 03 04 is no idx head",
        b"\0\0\x07\1": "00 00 07 01 is no idx head",
        whole[:10]: "images-idx3-ubyte' is damaged",
        whole[:-1]: r"cannot reshape array of size 83 into shape \(7,4,3\)",
        whole + b"x": r"cannot reshape array of size 85 into shape \(7,4,3\)",
    }
    for content, text in cases.items():
        path.write_bytes(pack(content))
        refused(text, read_idx, path)
    refused("cannot read data .*No such file", read_idx, tmp_path / "nowhere")


def test_pairs_of_idx_files_must_fit(tmp_path):
    """With the labels of another set a model would train without error and learn nothing."""
    path, labels = mnist(tmp_path / "m", labels=LABELS[:6])
    refused("holds 7 samples, but 6 labels", open_idx, path)
    labels.write_bytes(idx_bytes(LABELS))
    refused(r"sample 5: label 9 is not in 0 \.\.\. 8", open_idx, path, classes=9)
    labels.write_bytes(idx_bytes(IMAGES))
    refused("labels must be integers, one for each sample", open_idx, path)
    labels.write_bytes(idx_bytes((LABELS.astype(int) - 2).astype(">i4")))
    refused("sample 1: label -1 is not in", open_idx, path)
    path.write_bytes(idx_bytes(LABELS))
    refused("samples need at least two dimensions", open_idx, path)
    path.write_bytes(idx_bytes(IMAGES[:, :0]))
    refused("images-idx3-ubyte", open_idx, path)
    labels.unlink()
    refused("the file with its labels is not in the same folder", open_dataset, path)
    refused("has no test files: t10k-images", open_dataset, tmp_path / "m", split="test")


def cifar(path, labels, before=b""):
    rows = [
        before + bytes([label]) + bytes((i * 7 + np.arange(3072) % 251).astype(np.uint8))
        for i, label in enumerate(labels)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(rows))
    return rows


def test_cifar_over_several_files_and_with_fine_labels(tmp_path):
    """Samples must come from all files, in the order of their names, with planes in order."""
    folder = tmp_path / "c"
    rows = cifar(folder / "data_batch_1.bin", [0, 9, 2]) + cifar(
        folder / "data_batch_2.bin", [7, 7]
    )
    cifar(folder / "test_batch.bin", [1])
    data = open_dataset(folder)
    assert (data.samples, data.sample_shape, data.classes) == (5, (3, 32, 32), 10)
    assert data.labels.tolist() == [0, 9, 2, 7, 7]
    for order in ([4, 0, 3, 1, 1], []):
        found = data.read(order)
        assert found.shape == (len(order), 3, 32, 32)
        assert [one.tobytes() for one in found] == [rows[i][1:] for i in order]
    assert open_dataset(folder, split="test").labels.tolist() == [1]
    fine = cifar(tmp_path / "f" / "train.bin", [99, 20], before=b"\x13")  # behind the coarse one
    data = open_dataset(tmp_path / "f")
    assert (data.classes, data.labels.tolist()) == (100, [99, 20])
    assert data.read([1])[0].tobytes() == fine[1][2:]


def test_damaged_cifar_folders(tmp_path):
    """The error must name what is wrong, and the pickled version must be refused."""
    folder = tmp_path / "c"
    cifar(folder / "data_batch_1.bin", [0, 1])
    second = folder / "data_batch_2.bin"
    cifar(second, [3, 10, 4])
    refused(r"sample 3: label 10 is not in 0 \.\.\. 9", open_cifar, folder)
    second.write_bytes(bytes(3073 + 100))
    refused("data_batch_2.bin' is damaged .*size 3173 into shape .3073", open_cifar, folder)
    second.write_bytes(b"")
    refused("data_batch_2.bin' is damaged", open_cifar, folder)
    refused("has no test files: test_batch.bin or test.bin", open_cifar, folder, split="test")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "data_batch_1").write_bytes(b"x")
    refused("Python version, which is pickled", open_cifar, tmp_path / "p")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_archives_stored_and_compressed(tmp_path, save, order):
    """Both ways of saving, and both orders of axes, must give the same samples."""
    path = tmp_path / "x.npz"
    values = np.asarray(np.random.default_rng(0).normal(size=(7, 4, 3)).astype(">f4"), order=order)
    save(path, x_train=values, y_train=LABELS[:, None], x_test=values[:2], y_test=LABELS[:2])
    data = open_dataset(path)
    assert (data.samples, data.sample_shape, data.classes) == (7, (4, 3), 10)
    assert data.dtype == np.float32
    assert data.read([5, 0]).flags.c_contiguous
    assert (data.read([5, 0]) == values[[5, 0]]).all()
    assert data.labels.tolist() == LABELS.tolist()
    assert open_dataset(path, split="test").samples == 2


def test_npz_archives_that_cannot_be_used(tmp_path):
    """Pickles, wrong names, shapes and labels, and damage must be refused in one line."""
    path = tmp_path / "x.npz"

    def saved(**arrays):
        np.savez(path, **arrays)
        return path

    refused("Object arrays cannot be loaded", open_npz, saved(x=np.array([{}]), y=[1]))
    refused("holds a, b; for train it needs one of: x_train and y_train", open_npz, saved(a=1, b=2))
    refused("holds 7 samples, but 2 labels", open_npz, saved(x=IMAGES, y=LABELS[:2]))
    refused("must be integers, .* not float64", open_npz, saved(x=IMAGES, y=np.ones(7)))
    refused("not uint8 \\(7, 2\\)", open_npz, saved(x=IMAGES, y=np.stack([LABELS] * 2, 1)))
    refused("holds <U1 .*, not numbers", open_npz, saved(x=np.array(["a"] * 7), y=LABELS))
    refused("sample 5: label 9 is not in", open_npz, saved(x=IMAGES, y=LABELS), classes=6)
    refused("holds x, y; for test", open_npz, saved(x=IMAGES, y=LABELS), split="test")
    refused("holds no samples", open_npz, saved(x=IMAGES[:0], y=LABELS[:0]))
    whole = saved(x=IMAGES, y=LABELS).read_bytes()
    path.write_bytes(whole[:-30])
    refused("x.npz' is damaged", open_npz, path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"nonsense")
        archive.writestr("y.npy", b"nonsense")
    refused("x.npz' ", open_npz, path)
    content = zipfile.ZipFile(saved(x=IMAGES, y=LABELS)).read("x.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content[:-5])
        archive.writestr("y.npy", b"")
    refused("x.npz' is damaged", open_npz, path)
    np.savez_compressed(path, x=np.zeros((7, 999)), y=LABELS)
    damaged = bytearray(path.read_bytes())
    damaged[60:70] = b"\xff" * 10
    path.write_bytes(damaged)
    refused("x.npz' is damaged", open_npz, path)
    refused("cannot read data", open_npz, tmp_path / "nowhere.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_named(tmp_path, monkeypatch, save, bad):
    """One NaN among a million samples would make the model NaN days later."""
    monkeypatch.setattr(dataset, "_PIECE_VALUES", 25)  # two samples per piece
    path = tmp_path / "x.npz"
    values = np.zeros((7, 4, 3), np.float32)
    save(path, x=values, y=LABELS)
    assert open_npz(path).samples == 7
    values[5, 2, 1] = bad
    for each in (values, np.asfortranarray(values), values.astype(np.float16)):
        save(path, x=each, y=LABELS)
        refused(rf"x\.npz', sample \[5, 2, 1\]: the value is {bad}", open_npz, path)
    path, _ = mnist(tmp_path / "m", values.astype(">f4"))
    refused(rf"sample \[5, 2, 1\]: the value is {bad}", open_idx, path)


def test_a_wrong_label_does_not_make_hundreds_of_classes(tmp_path):
    """Where the number of classes is inferred, a class without samples must be an error."""
    mnist(tmp_path / "m", IMAGES[:4], np.array([1, 0, 200, 2], np.uint8))
    data = open_dataset(tmp_path / "m")
    refused("sample 2 has label 200, and no sample has label 3: .* data.classes", check_gaps, data)
    check_gaps(open_dataset(tmp_path / "m", classes=201))
    mnist(tmp_path / "m", IMAGES[:4], np.array([1, 2, 1, 2], np.uint8))
    refused("sample 0 has label 1, and no .* label 0", check_gaps, open_dataset(tmp_path / "m"))
    mnist(tmp_path / "m", IMAGES[:4], np.array([1, 0, 1, 2], np.uint8))
    check_gaps(open_dataset(tmp_path / "m"))


def archive(path, descr, shape, values=b"", pack=zipfile.ZIP_STORED):
    """Write an .npz of the array that such a head describes, valid or not, and two labels."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(path, "w", pack) as made:
        made.writestr("x.npy", head + values)
        with made.open("y.npy", "w") as file:
            np.save(file, np.zeros(2, np.int64))
    return path


@pytest.mark.parametrize("what", ["negative", "packed", "width", "encrypted", "lzma"])
def test_archives_without_a_readable_array(tmp_path, what):
    """Each of these once ended as "a bug" instead of one line."""
    path, noise = tmp_path / "x.npz", np.random.default_rng(0).bytes(12_000)
    match what:
        case "negative":
            archive(path, "<f4", (-2, -3), bytes(24))
        case "packed":
            archive(path, "<f4", (-2, -3), bytes(24), zipfile.ZIP_DEFLATED)
        case "width":
            archive(path, "<U0", (2,))
        case "encrypted":
            found = bytearray(archive(path, "<f4", (2, 3), bytes(24)).read_bytes())
            for place in (6, found.index(b"PK\x01\x02") + 8):
                found[place] |= 1
            path.write_bytes(found)
        case "lzma":
            found = bytearray(archive(path, "<f4", (2, 1500), noise, zipfile.ZIP_LZMA).read_bytes())
            found[60:110] = b"\xff" * 50
            path.write_bytes(found)
    refused(r"x\.npz' ", open_npz, path)


def test_missing_paths_and_wrong_splits(tmp_path):
    """A wrong path is a new user's first mistake, so its error must be clear."""
    refused("cannot read data .*nowhere", open_dataset, tmp_path / "nowhere")
    refused("split 'all': use train or test", open_dataset, tmp_path, split="all")
    refused("holds none of MNIST files", open_dataset, tmp_path)


def test_the_fingerprint_depends_on_order_classes_and_labels(tmp_path):
    """Sites with other data, or another order, would train on each other's samples."""
    found = set()
    for number, (order, classes) in enumerate(
        [(range(7), 10), (range(7)[::-1], 10), (range(7), 11)]
    ):
        path, _ = mnist(tmp_path / str(number), IMAGES, LABELS[list(order)])
        found.add(open_idx(path, classes=classes).fingerprint)
    assert len(found) == 3
