"""The watches for EC2 and for a Slurm job's end, with a stand-in metadata service."""

import socket
import threading
import time

import pytest
from ec2_metadata import Metadata

from fsl_async.process.notices import Notice, SlurmJob
from fsl_async.process.stopper import Stopper
from fsl_async.process.watches import EC2_VARIABLE, SpotWatch, tell, watching

ACTION = b'{"action":"terminate","time":"2099-01-01T00:00:00Z"}'


@pytest.fixture
def metadata():
    server = Metadata()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_token_is_requested_once_and_again_when_it_expires(metadata):
    """IMDSv2 refuses requests without one; one for each poll would double the traffic."""
    watch = SpotWatch(metadata.base)
    assert watch.look() is None
    assert watch.look() is None
    assert metadata.seen == ["PUT", "GET", "GET"]
    metadata.token = "second"
    metadata.announced = ACTION
    assert watch.look().source == "EC2 spot (terminate)"
    assert metadata.seen[3:] == ["GET", "PUT", "GET"]


def test_a_service_that_is_ill_or_not_there_is_no_notice(metadata):
    """A client must not end because its metadata service fails, or because it is not on EC2."""
    watch = SpotWatch(metadata.base)
    metadata.status = 500
    assert watch.look() is None
    assert watch.trouble == "HTTP 500"
    assert SpotWatch("http://127.0.0.1:9").look() is None
    metadata.status, metadata.announced = None, ACTION
    assert watch.look() is not None


@pytest.fixture
def garbler():
    """A server that answers every connection with these bytes, like a proxy or a captive portal."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers = []

    def serve():
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one:
                one.recv(4096)
                one.sendall(answers[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", answers
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: "


@pytest.mark.parametrize("answer", [
    b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000, OK + b"99\r\n\r\nshort",
    OK + b"1\r\n\r\n\xff", OK + b"3\r\n\r\na\nb", b"",
    OK + b"20\r\n\r\n" + b'{"action": ["stop"]}',
])  # fmt: skip
def test_what_is_no_answer_does_not_end_the_watch(garbler, answer):
    """An exception once ended the polling thread, and a later announcement was missed."""
    base, answers = garbler
    answers.append(answer)
    assert SpotWatch(base).look() is None


def test_a_service_that_does_not_answer_is_reported_once(metadata):
    """In a container with a hop limit of 1 it never answers, so there must be a warning."""
    watch, over, warnings = SpotWatch(metadata.base, every_s=0.0), threading.Event(), []
    looks = iter([500, 500, None, None, 503, 503])

    def look():
        metadata.status = next(looks, 0)
        if metadata.status == 0:
            over.set()
        return SpotWatch.look(watch)

    watch.look = look
    watch.follow(lambda _: None, over, warnings.append)
    assert ["HTTP 500" in warnings[0], "HTTP 503" in warnings[1], len(warnings)] == [True, True, 2]


def test_an_announcement_requests_an_end(metadata, monkeypatch):
    """End to end except for the client; Amazon's tools read the same variable for the address."""
    monkeypatch.setenv(EC2_VARIABLE, metadata.base)
    metadata.announced = ACTION
    stopper, asked = Stopper(), threading.Event()
    stopper.subscribe(lambda _: asked.set())
    with watching(stopper, None, None, ec2=True):
        assert asked.wait(10.0)
    assert (stopper.exit_code, stopper.reason) == (64, "EC2 spot (terminate)")
    assert stopper.deadline > time.monotonic() + 3600.0


def test_the_end_of_a_job_requests_an_end():
    """The job ends in a second, so the request comes at once."""
    stopper, asked = Stopper(), threading.Event()
    stopper.subscribe(lambda _: asked.set())
    with watching(stopper, SlurmJob("7", time.time() + 1.0), None, ec2=False):
        assert asked.wait(10.0)
    assert stopper.reason == "Slurm's time limit"
    assert 0.0 < stopper.deadline - time.monotonic() < 1.0


def test_a_job_that_ends_in_thousands_of_years():
    """The wait is limited to the longest possible one and must not raise."""
    with watching(Stopper(), SlurmJob("7", 999_999_999_999.0), None, ec2=False):
        time.sleep(0.05)
        assert "slurm" in [one.name for one in threading.enumerate()]


def test_a_nearer_deadline_calls_back_again_and_a_farther_one_does_not():
    """The stopper keeps the first reason and the earliest deadline."""
    stopper, seen = Stopper(), []
    stopper.subscribe(lambda hard: seen.append((hard, stopper.deadline)))
    tell(stopper, Notice("EC2", 120.0))
    first = stopper.deadline
    tell(stopper, Notice("SIGTERM", 300.0))
    tell(stopper, Notice("SIGTERM"))
    assert seen == [(False, first)]
    tell(stopper, Notice("SIGTERM", 30.0))
    assert len(seen) == 2
    assert stopper.deadline < first
    assert (stopper.reason, stopper.exit_code) == ("EC2", 64)
