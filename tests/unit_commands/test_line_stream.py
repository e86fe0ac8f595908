"""What a node says must not stop it: pipes that nobody reads, readers that are slow, gone, or back."""

import os
import re
import threading
import time

import pytest

from fsl_async.commands.line_stream import LineStream, silence_when_full
from fsl_async.commands.output import Output


@pytest.fixture
def pipe():
    """A text stream into a pipe, and the end to read from."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield stream, reading
    os.close(reading)


def until_gone(lines):
    """Wait for the thread that writes what waited."""
    while lines._thread is not None:
        time.sleep(0.001)


def everything(reading, into):
    """Read until the other end is closed."""
    while data := os.read(reading, 65_536):
        into.append(data)


def test_lines_are_written_at_once_while_somebody_reads(pipe):
    """The ordinary case has no thread and no delay: who kills the process after a line finds it."""
    stream, reading = pipe
    LineStream(stream).write("schön")
    assert os.read(reading, 100).decode() == "schön\n"
    assert not [one for one in threading.enumerate() if one.name == "output"]


def test_nobody_reads_and_nothing_stops(pipe):
    """A server whose output is a pipe that nobody empties stood still in the middle of a round."""
    stream, reading = pipe
    lines = LineStream(stream, limit_bytes=50_000)
    total = 5_000
    for number in range(total):
        lines.write(f"{number} " + "x" * 100)
    assert lines.dropped > 1_000
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))
    reader.start()
    until_gone(lines)
    lines.write("again")
    stream.close()
    reader.join()
    *kept, notice, last = b"".join(read).decode().splitlines()
    assert [int(line.split()[0]) for line in kept] == list(range(len(kept)))
    dropped = re.fullmatch(r"\((\d+) lines that nobody read were dropped here\)", notice)
    assert len(kept) + int(dropped[1]) == total
    assert last == "again"


def test_a_line_longer_than_a_pipe_is_whole(pipe):
    """A result may be large: it is written in pieces, in order, behind what came before."""
    stream, reading = pipe
    lines = LineStream(stream)
    text = "".join(chr(97 + at % 26) for at in range(200_000))
    lines.write(text)
    lines.write("end")
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))
    reader.start()
    lines.finish()
    stream.close()
    reader.join()
    assert b"".join(read).decode() == f"{text}\nend\n"


def test_a_process_ends_though_nobody_reads(pipe):
    """The last lines get a moment, not for ever."""
    stream, _ = pipe
    lines = LineStream(stream, patience_s=0.01)
    lines.write("x" * 100_000)
    lines.finish()
    assert lines._thread is None


def test_last_words_do_not_keep_a_process(pipe):
    """An error at the end is written past all that: a server with a full pipe did not end at Ctrl-C."""
    stream, reading = pipe
    lines = LineStream(stream, patience_s=0.01)
    lines.write("x" * 100_000)
    silence_when_full(stream, 0.01)
    stream.write("last words")
    stream.flush()
    lines.finish()
    assert os.read(reading, 10) == b"x" * 10


def test_a_reader_that_is_gone_is_no_error(pipe):
    """`| head` ends a pipe; the node goes on."""
    stream, reading = pipe
    gone, writing = os.pipe()
    os.close(gone)
    os.dup2(writing, stream.fileno())
    os.close(writing)
    lines = LineStream(stream)
    lines.write("to nobody")
    lines.write("to nothing")
    del reading


def test_a_nodes_output_does_not_wait_and_a_commands_does(pipe):
    """`status --json | slow` must say everything; a node must not."""
    stream, reading = pipe
    output = Output(as_json=True, waits=False, out=stream)
    for number in range(3_000):
        output.record("line", number=number, filler="x" * 100)
    patient = Output(as_json=True, out=stream)
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))
    reader.start()
    until_gone(output._out)
    for _ in range(3_000):
        patient.record("line", filler="x" * 100)
    stream.close()
    reader.join()
    assert b"".join(read).count(b"\n") == 6_000
