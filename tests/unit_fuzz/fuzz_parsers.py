"""Fuzzes every parser that unauthenticated or hostile peers reach. A script.

    python tests/unit_fuzz/fuzz_parsers.py [SECONDS for each target, 50] [TARGET ...]

Seconds are processor time, so that a busy machine tries as much as an idle one: 50 for each of the
twelve targets are ten minutes of a core.

With atheris installed (the extra `fuzz`) coverage guides the mutations: libFuzzer on instrumented
Python, with the mutator below, which works on fields where the input is msgpack. Without atheris
the same mutator works on the seeds at random. Exits with 1 at the first input that raises an error
which no peer may cause, or takes more than SLOW_S; the input is written to fuzz-TARGET.bin.
"""

import importlib.util
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgpack

SLOW_S = 5.0
HANGS_S = 300
"""libFuzzer's own limit, for inputs that never end: it counts wall clock, SLOW_S processor time."""
WALL_FACTOR = 20
"""Wall clock that a target may take, in units of its processor time; a busier machine tries
less.
"""
MAX_BYTES = 1 << 16
JUNK = (
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63,
    -(1 << 63), 0.0, -0.0, 1e308, float("nan"), float("inf"), "", "m", "key", "x" * 300,
    "\ud800".encode("utf-8", "surrogatepass"), "a/1/0/0", "../x", b"", b"\x00" * 8, b"sessions",
    [], {}, [[]], {"m": "fetch/1"}, [0] * 40, {"": {}},
)  # fmt: skip
BYTES = (0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xD4, 0xDC, 0xDD, 0xDF, 0xFF)


def _places(value, found, path=()):
    """Return the path of every place in a tree of lists and maps."""
    found.append(path)
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        _places(one, found, (*path, key))
    return found


def mutated_fields(tree, rng):
    """Replace, repeat, remove, swap or nudge one to three places of the tree, in place; returns
    it.
    """
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(_places(tree, []))
        if not path:
            continue
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        key, old = path[-1], holder[path[-1]]
        kind = rng.randrange(6)
        if kind == 0 and isinstance(old, int) and not isinstance(old, bool):
            holder[key] = max(
                -(1 << 63), min((1 << 64) - 1, old + rng.choice((-1, 1, -2, 7, 1 << 32)))
            )
        elif kind == 1 and isinstance(old, bytes | str) and old:
            at = rng.randrange(len(old))
            holder[key] = (
                old[:at] + old[at + 1 :] if rng.random() < 0.5 else old[:at] + old[at:] * 2
            )
        elif kind == 1 and isinstance(old, bytes):
            holder[key] = mutated_bytes(old, rng)
        elif kind == 2 and isinstance(holder, list):
            holder.insert(key, old)
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, list):
            other = rng.randrange(len(holder))
            holder[key], holder[other] = holder[other], old
        else:
            holder[key] = rng.choice(JUNK)
    return tree


def mutated_bytes(data, rng):
    """Return the bytes with some changed, cut, repeated or added."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice(BYTES)
        elif kind == 2:
            del data[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
        else:
            data[at:at] = bytes(rng.choice(BYTES) for _ in range(rng.choice((1, 2, 9))))
    return bytes(data)


def mutated(data, rng):
    """Mutate by field six times in ten where the input is msgpack, otherwise by byte."""
    if rng.random() < 0.6:
        try:
            tree = msgpack.unpackb(data, strict_map_key=False)
            if isinstance(tree, list):
                return msgpack.packb(mutated_fields(tree, rng))
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
            pass
    return mutated_bytes(data, rng)


def probe(target, data):
    """Run one input; returns the error that it must not cause, or None."""
    begun = time.process_time()
    try:
        target.run(data)
    except target.refuses:
        pass
    except Exception as error:  # noqa: BLE001 - finding these is the purpose
        return error
    took = time.process_time() - begun
    return TimeoutError(f"took {took:.1f} s for {len(data)} bytes") if took > SLOW_S else None


def plain(name, target, seconds, seed=0):
    """Try random mutations of the seeds, one to three deep; returns the number of inputs.

    Raises the first error that no input may cause.
    """
    rng = random.Random(seed)
    pool = target.seeds()
    until = time.process_time() + seconds
    inputs = 0
    for data in pool:
        error = probe(target, data)
        if error is not None:
            _keep(name, data)
            raise error
    while time.process_time() < until or inputs < 20:
        data = rng.choice(pool)
        for _ in range(rng.randint(1, 3)):
            data = mutated(data, rng)[:MAX_BYTES]
        error = probe(target, data)
        inputs += 1
        if error is not None:
            _keep(name, data)
            raise error
    return inputs


def _keep(name, data):
    Path(f"fuzz-{name}.bin").write_bytes(data)


def guided(name, seconds):
    """Run libFuzzer in this process, which it ends."""
    import atheris

    with atheris.instrument_imports(
        include=["fsl_async", "fsl_transport"], enable_loader_override=False
    ):
        from parser_targets import TARGETS
    target = TARGETS[name]

    until = time.process_time() + seconds
    inputs = itertools.count(1)

    def one_input(data):
        error = probe(target, data)
        if error is not None:
            raise error
        count = next(inputs)
        if time.process_time() > until:  # libFuzzer counts wall clock only
            sys.stderr.write(f"number_of_executed_units: {count}\n")
            sys.stderr.flush()
            os._exit(0)

    def mutate(data, max_size, seed):
        rng = random.Random(seed)
        return (
            atheris.Mutate(data, max_size) if rng.random() < 0.3 else mutated(data, rng)[:max_size]
        )

    corpus = Path(sys.argv[4])
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    options = [
        f"-max_total_time={WALL_FACTOR * seconds}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={HANGS_S}",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix=fuzz-{name}-", str(corpus)],
        one_input,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


def _guided_in_process(name, seconds, folder):
    """Run `guided` in a process of its own; returns its exit code."""
    corpus = Path(folder) / name
    corpus.mkdir()
    log = Path(folder) / f"{name}.log"
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, __file__, "--guided", name, str(seconds), str(corpus)],
            stdout=file,
            stderr=file,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    shown = (
        lines[-60:]
        if done.returncode
        else [x for x in lines if "number_of_executed" in x or "peak_rss" in x or " cov: " in x][
            -3:
        ]
    )
    sys.stdout.write("\n".join(f"{name}: {line}" for line in shown) + "\n")
    sys.stdout.flush()
    return done.returncode


def main(arguments):
    """Run the targets that the arguments name; returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parent))
    if arguments[:1] == ["--guided"]:
        sys.argv = [sys.argv[0], *arguments]
        guided(arguments[1], int(arguments[2]))
        return 0
    from parser_targets import TARGETS

    seconds = int(arguments[0]) if arguments else 50
    names = arguments[1:] or list(TARGETS)
    if importlib.util.find_spec("atheris") is not None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            return max(1 if _guided_in_process(name, seconds, folder) else 0 for name in names)
    sys.stdout.write("atheris is not installed: mutations at random, without coverage\n")
    for name in names:
        sys.stdout.write(f"{name}: {plain(name, TARGETS[name], seconds)} inputs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
