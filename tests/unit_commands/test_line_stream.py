"""A node's output must not block it: readers that are slow, stopped, gone or back."""

import json
import os
import pty
import re
import sys
import threading
import time

import pytest

from fsl_async import cli
from fsl_async.commands.output import LineStream, Output, finish_all, write_last
from fsl_async.process import stopper


@pytest.fixture
def pipe():
    """A text stream into a pipe, and the end to read from."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield stream, reading
        end(reading)


@pytest.fixture
def terminal():
    """A text stream into a terminal, and the end to read from."""
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as stream:
        yield stream, reading
        end(reading)


def end(reading):
    """Close the end to read from, and wait for threads that still write to the other.

    On a busy machine one of them wrote into the pipe of the next test, which had the same number.
    """
    os.close(reading)
    for thread in threading.enumerate():
        if thread.name == "output":
            thread.join()


def in_time(what, *given, limit_s=20.0):
    """Call `what`, which may never return, in a thread; None if it returned, else a text."""
    thread = threading.Thread(target=what, args=given, daemon=True)
    thread.start()
    thread.join(limit_s)
    return f"not within {limit_s} s" if thread.is_alive() else None


def until_gone(lines):
    """Wait until the thread that writes queued lines has ended."""
    while lines._thread is not None:
        time.sleep(0.001)


def everything(reading, into):
    """Read until the other end is closed."""
    while data := os.read(reading, 65_536):
        into.append(data)


def test_lines_are_written_at_once_while_the_reader_reads(pipe):
    """In the usual case a line must be written before the call returns, and its thread be gone."""
    stream, reading = pipe
    LineStream(stream).write("schön\n")
    assert os.read(reading, 100).decode() == "schön\n"
    assert not [one for one in threading.enumerate() if one.name == "output"]


def test_a_line_that_gets_no_thread_is_written_with_the_next(pipe, monkeypatch):
    """A process at its limit of threads must go on."""
    stream, reading = pipe
    lines = LineStream(stream)

    def none_left(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", none_left)
        lines.write("first\n")
    lines.write("second\n")
    lines.finish()
    assert os.read(reading, 100) == b"first\nsecond\n"


def test_a_pipe_without_a_reader_does_not_block(pipe):
    """A server with a full pipe as output once blocked in the middle of a round."""
    stream, reading = pipe
    lines = LineStream(stream, limit_bytes=50_000)
    total = 5_000
    for number in range(total):
        lines.write(f"{number} " + "x" * 100 + "\n")
    assert lines.dropped > 1_000
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))
    reader.start()
    until_gone(lines)
    lines.write("again\n")
    stream.close()
    reader.join()
    *kept, notice, last = b"".join(read).decode().splitlines()
    numbers = [int(line.split()[0]) for line in kept]
    assert numbers == sorted(set(numbers))
    assert numbers[:400] == list(range(400))  # those that fit into the limit
    pattern = r"\((\d+) lines were dropped here because they were not read\)"
    dropped = re.fullmatch(pattern, notice)
    assert len(kept) + int(dropped[1]) == total
    assert last == "again"


def test_a_line_longer_than_a_pipe_is_whole(pipe):
    """A large result must be written in pieces, in order, after earlier lines."""
    stream, reading = pipe
    lines = LineStream(stream)
    text = "".join(chr(97 + at % 26) for at in range(200_000))
    lines.write(f"{text}\n")
    lines.write("end\n")
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))
    reader.start()
    lines.finish()
    stream.close()
    reader.join()
    assert b"".join(read).decode() == f"{text}\nend\n"


def test_a_process_ends_without_a_reader(pipe):
    """The wait for the last lines must be limited; a server once did not end at Ctrl-C."""
    stream, reading = pipe
    lines = LineStream(stream)
    lines.write("x" * 100_000)
    assert in_time(lines.finish, 0.01) is None
    assert in_time(write_last, stream, "last line\n") is None
    assert os.read(reading, 100_000) == b"x" * 65_536


def test_a_reader_that_is_gone_is_no_error(pipe):
    """After `| head` has closed the pipe, the node must continue."""
    stream, reading = pipe
    gone, writing = os.pipe()
    os.close(gone)
    os.dup2(writing, stream.fileno())
    os.close(writing)
    lines = LineStream(stream)
    lines.write("to a closed pipe\n")
    lines.write("to /dev/null\n")
    del reading


def test_a_nodes_output_does_not_wait_and_a_commands_does(pipe):
    """`status --json | slow` must print every line; a node must not wait."""
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


@pytest.mark.parametrize("length", [50, 100, 301, 5_000])
def test_a_terminal_without_a_reader_does_not_block(terminal, length):
    """poll(2) is true when one byte fits into a terminal: a node blocked after 350 lines."""
    stream, reading = terminal
    lines = LineStream(stream)

    def write():
        for _ in range(1_000):
            lines.write("x" * length + "\n")

    assert in_time(write) is None
    assert lines._queue
    assert in_time(lines.finish, 0.02) is None
    assert os.get_blocking(stream.fileno())
    assert os.read(reading, 10) == b"x" * 10


def test_a_signal_handler_does_not_wait_for_a_terminal(terminal):
    """The message of the Ctrl-C handler once blocked the node forever."""
    stream, _ = terminal
    before = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        late = in_time(lambda: [stopper._tell("x" * 100_000) for _ in range(3)])
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert late is None


def test_a_slow_reader_does_not_keep_a_process(pipe):
    """A reader that takes a little every 1.9 s must not extend the end by an hour."""
    stream, reading = pipe
    lines, other = LineStream(stream), LineStream(stream)
    lines.write("x" * 4_000_000)
    over = threading.Event()

    def read():
        while not over.wait(0.02):
            os.read(reading, 4_096)

    reader = threading.Thread(target=read)
    reader.start()
    late = in_time(finish_all, 0.1, limit_s=15.0)  # all of it would take at least 20 s
    other.write("of the other stream, inside the partly written line")
    over.set()
    reader.join()
    assert late is None
    os.set_blocking(reading, False)
    assert b"other" not in os.read(reading, 1 << 20)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_comes_after_all_earlier_lines(pipe, monkeypatch, as_json):
    """An error inside a partly written line would make JSON lines unreadable."""
    stream, reading = pipe
    output = Output(as_json=as_json, waits=False, out=stream, err=stream)
    line = "x" * 100_000
    read = []
    reader = threading.Thread(target=everything, args=(reading, read))

    def fail(*_, **__):
        for _ in range(3):
            output.record("line", text=line) if as_json else output.say(line)
        reader.start()
        raise cli.UsageError("wrong")

    monkeypatch.setattr(cli.root, "main", fail)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    code = cli.main(["--json"] if as_json else [])
    stream.close()
    reader.join()
    written = b"".join(read).decode().splitlines()
    assert code == 2
    if as_json:
        written = [json.loads(one) for one in written]
        assert [one.get("text") for one in written] == [line, line, line, None]
        assert written[-1]["error"] == "wrong"
    else:
        assert written == [line, line, line, "error: wrong"]
