"""A version's chunks come from memory where they are there, and from the disk otherwise."""

from types import SimpleNamespace

from deltas import delta_of, key

from fsl_async.nodes.ps.serving import DELTAS_AT_ONCE, Serving
from fsl_async.nodes.wire import AT_ONCE, Sink, Source
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_transport import TransportSettings


class Late:
    """A worker that keeps its jobs until `run`."""

    def __init__(self):
        self.jobs = []

    def submit(self, job, done, failed):
        """Keep a job."""
        self.jobs.append((job, done, failed))

    def run(self):
        """Run the jobs that were kept."""
        jobs, self.jobs = self.jobs, []
        for job, done, failed in jobs:
            try:
                found = job()
            except OSError as error:
                failed(error)
            else:
                done(found)


def source(in_memory, on_disk, counted, failures):
    """A source of 20 chunks."""
    worker = Late()
    made = Source(
        20,
        worker,
        on_disk,
        lambda index, frame: counted.append((index, frame)),
        in_memory=in_memory,
        failed=failures.append,
    )
    return made, worker


def test_chunks_in_memory_wait_for_the_worker_now_and_then():
    """Most are there at once; every eighth lets the loop do other work."""
    counted, sent = [], []
    made, worker = source(lambda index: bytes([index]), lambda index: bytes([index]), counted, [])
    for index in range(20):
        made.read(index, sent.append)
        assert len(worker.jobs) == (index % AT_ONCE == AT_ONCE - 1)
        worker.run()
    assert sent == [bytes([index]) for index in range(20)]
    assert counted == list(enumerate(sent))
    assert made.bytes_coded == 20


def test_chunks_that_are_not_in_memory_are_read():
    """A deleted one is None; an error is reported."""
    counted, sent, failures = [], [], []

    def on_disk(index):
        if index == 2:
            raise OSError(5, "Input/output error")
        return b"x" if index else None

    made, worker = source(lambda _: None, on_disk, counted, failures)
    for index in range(3):
        made.read(index, sent.append)
    assert sent == []
    worker.run()
    assert sent == [None, b"x", None]
    assert counted == [(1, b"x")]
    assert [str(error) for error in failures] == [str(OSError(5, "Input/output error"))]


def sink(take, counted=None, problems=None):
    """A sink of one stream, and its worker."""
    worker = Late()
    counted, problems = counted if counted is not None else [], problems or [].append
    return Sink(worker, take, lambda *chunk: counted.append(chunk), problems), worker


def test_a_job_takes_all_chunks_that_have_arrived():
    """At most AT_ONCE of them, in order; each is answered and counted by itself."""
    jobs, counted, answers = [], [], []
    made, worker = sink(lambda first, *frames: jobs.append((first, len(frames))), counted)
    for index in range(AT_ONCE + 3):
        made.write(index, memoryview(bytes([index])), answers.append)
    assert len(worker.jobs) == 1
    worker.run()
    worker.run()
    worker.run()
    assert jobs == [(0, 1), (1, AT_ONCE), (AT_ONCE + 1, 2)]
    assert answers == [True] * (AT_ONCE + 3)
    assert counted == [(index, bytes([index])) for index in range(AT_ONCE + 3)]
    made.write(AT_ONCE + 3, b"x", answers.append)
    worker.run()
    assert jobs[-1] == (AT_ONCE + 3, 1)


def test_a_chunk_that_is_not_taken_ends_its_stream():
    """The error is kept for the report; chunks that arrived after it are answered, not taken."""
    counted, problems, answers = [], [], []

    def take(first, *frames):
        if first:
            raise OSError(28, "No space left on device")

    made, worker = sink(take, counted, problems.append)
    for index in range(AT_ONCE + 3):
        made.write(index, memoryview(b"x"), answers.append)
    assert answers == []
    worker.run()
    worker.run()
    assert answers == [True] + [False] * (AT_ONCE + 2)
    assert worker.jobs == []
    assert counted == [(0, b"x")]
    assert problems == [str(OSError(28, "No space left on device"))]


def evaluated(count, damaged=()):
    """Send deltas of `count` sites to an evaluator.

    Returns the serving, its deltas, the names of the streams that are offered, and the notes.
    """
    worker, offered, notes = Late(), [], []
    deltas = [delta_of(key(f"s{number}")) for number in range(count)]

    def reader(one):
        if one.client in damaged:
            raise OSError(5, "Input/output error")
        return SimpleNamespace(count=1, frame=lambda index: b"")

    context = SimpleNamespace(
        worker=worker,
        store=SimpleNamespace(spool_reader=reader),
        machine=SimpleNamespace(deltas=SimpleNamespace(pending={one.key: one for one in deltas})),
        endpoint=SimpleNamespace(offer=lambda peer, stream, *_: offered.append(stream)),
        say=notes.append,
    )
    serving = Serving(context)
    for one in deltas:
        serving.serve_delta(do.SendDelta("judge", one), 0)
    worker.run()
    return serving, deltas, offered, notes


def test_an_evaluator_gets_all_deltas_a_few_at_a_time():
    """Its endpoint declines streams above a number, which a round of many sites has."""
    assert TransportSettings().max_streams > DELTAS_AT_ONCE
    serving, deltas, offered, _ = evaluated(100)
    assert len(offered) == DELTAS_AT_ONCE
    for number, over in enumerate((serving.sent, serving.failed) * 50):
        over("judge", offered[number])
        over("judge", offered[number])  # a second report of a stream opens none
        serving.ps.worker.run()
        assert len(offered) <= number + 1 + DELTAS_AT_ONCE
    assert offered == [msg.delta_stream(one.key.text) for one in deltas]


def test_deltas_without_a_question_are_not_sent():
    """The round is merged, the session is over, or the spool file cannot be read."""
    serving, deltas, offered, notes = evaluated(DELTAS_AT_ONCE + 3, damaged=("s0", "s1"))
    serving.ps.worker.run()
    assert [len(offered), len(notes)] == [DELTAS_AT_ONCE, 2]
    serving.ps.machine.deltas.pending.clear()
    serving.sent("judge", offered[0])
    serving.ps.worker.run()
    assert len(offered) == DELTAS_AT_ONCE
    serving, deltas, offered, _ = evaluated(DELTAS_AT_ONCE + 3)
    serving.left("judge")
    serving.sent("judge", offered[0])
    serving.ps.worker.run()
    assert len(offered) == DELTAS_AT_ONCE
    serving.serve_delta(do.SendDelta("judge", deltas[-1]), 0)
    serving.ps.worker.run()
    assert offered[-1] == msg.delta_stream(deltas[-1].key.text)
