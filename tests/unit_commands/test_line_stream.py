"""What a node says must not stop it: pipes that nobody reads, readers that are slow, gone, or back."""

import atexit
import json
import os
import pty
import re
import sys
import threading
import time

import pytest

from fsl_async import cli
from fsl_async.commands import line_stream
from fsl_async.commands.line_stream import LineStream, finish_all, silence_when_full
from fsl_async.commands.output import Output
from fsl_async.process import stopper


@pytest.fixture
def pipe():
    """A text stream into a pipe, and the end to read from."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield stream, reading
    os.close(reading)


@pytest.fixture
def terminal():
    """A text stream into a terminal, and the end to read from."""
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as stream:
        yield stream, reading
    os.close(reading)


def in_time(what, *given, limit_s=20.0):
    """Call something that may never return, in a thread; None where it did, and else what it took to find out."""
    thread = threading.Thread(target=what, args=given, daemon=True)
    thread.start()
    thread.join(limit_s)
    return f"not within {limit_s} s" if thread.is_alive() else None


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
    until_gone(lines)


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


@pytest.mark.parametrize("may_open", [True, False])
@pytest.mark.parametrize("length", [50, 100, 301, 5_000])
def test_a_terminal_that_nobody_reads_stops_nothing(terminal, monkeypatch, length, may_open):
    """poll(2) says of a terminal that one byte fits, of a pipe that 512 do: a node stood still after 350 short lines."""
    if not may_open:  # whose user is another's (su)
        monkeypatch.setattr(line_stream, "open_anew", lambda _: None)
    stream, reading = terminal
    lines = LineStream(stream, patience_s=0.02)

    def say():
        for _ in range(1_000):
            lines.write("x" * length)

    assert in_time(say) is None
    assert lines._waiting
    assert in_time(lines.finish) is None
    assert os.get_blocking(stream.fileno())
    assert os.read(reading, 10) == b"x" * 10


@pytest.mark.parametrize("may_open", [True, False])
def test_a_terminal_that_is_read_late_gets_all_lines_in_order(terminal, monkeypatch, may_open):
    """Ctrl-S, and Ctrl-Q later."""
    if not may_open:
        monkeypatch.setattr(line_stream, "open_anew", lambda _: None)
    stream, reading = terminal
    lines = LineStream(stream)
    said = [f"{number} " + "x" * (number % 700) for number in range(500)]
    assert in_time(lambda: [lines.write(line) for line in said]) is None
    wanted, read = "".join(f"{line}\r\n" for line in said).encode(), b""
    while len(read) < len(wanted):
        read += os.read(reading, 65_536)
    assert read == wanted
    until_gone(lines)


def test_a_signals_word_does_not_wait_for_a_terminal(terminal):
    """The handler of Ctrl-C said what it does, to nobody, and the node went on for ever."""
    stream, _ = terminal
    before = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        told = in_time(lambda: [stopper._tell("x" * 50) for _ in range(500)])
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert told is None


def test_a_killers_word_does_not_wait_for_a_full_pipe(pipe, monkeypatch):
    """The process that two signals end at once wrote to nobody first, and that lasted for ever."""
    stream, _ = pipe
    os.set_blocking(stream.fileno(), False)
    assert os.write(stream.fileno(), b"x" * 10_000_000) < 10_000_000
    os.set_blocking(stream.fileno(), True)
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(stopper, "AT_ONCE_S", 0.01)
    one = stopper.Stopper()
    one.request(exit_code=130)
    killer = stopper._Killer(one, as_json=False, quiet=True)
    before = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        told = in_time(killer._end)
    finally:
        os.dup2(before, 2)
        os.close(before)
        killer.close()
    assert (told, exits) == (None, [130])


def test_a_slow_reader_does_not_keep_a_process(pipe):
    """It took something every 1.9 seconds: that is never 2 seconds without, and lasts for an hour."""
    stream, reading = pipe
    lines, other = LineStream(stream, patience_s=60.0), LineStream(stream)
    lines.write("x" * 4_000_000)
    over = threading.Event()

    def read():
        while not over.wait(0.02):
            os.read(reading, 4_096)

    reader = threading.Thread(target=read)
    reader.start()
    told = in_time(finish_all, 0.1, limit_s=15.0)  # all of it takes 20 s and more
    over.set()
    reader.join()
    assert told is None
    other.write("said by the other stream, inside the line that was written by half")
    assert other.dropped == 1


def test_the_end_is_registered_once(monkeypatch):
    """Each time that lines had to wait, one more function waited for the process's end."""
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    for _ in range(3):
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as stream:
            lines = LineStream(stream)
            lines.write("x" * 100_000)
            reader = threading.Thread(target=everything, args=(reading, []))
            reader.start()
            until_gone(lines)
        reader.join()
        os.close(reading)
    assert registered == []


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_stands_behind_the_lines_before_it(pipe, monkeypatch, as_json):
    """It stood inside a line that was written by half, and no reader of JSON lines could read that."""
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
    said = b"".join(read).decode().splitlines()
    assert code == 2
    if as_json:
        said = [json.loads(one) for one in said]
        assert [one.get("text") for one in said] == [line, line, line, None]
        assert said[-1]["error"] == "wrong"
    else:
        assert said == [line, line, line, "error: wrong"]
