"""The room for what came in and is not written yet: crowds that want more than there is, one after the other, and nobody for ever in vain."""

import itertools

import pytest

from fsl_transport import Conditions, PeerDown, PeerUp, StreamOffered, StreamReceived, StreamSent
from fsl_transport.bulk.chunks import RESUMES_LIMIT
from fsl_transport.bulk.receive_budget import ASKED_IN_VAIN_LIMIT, ReceiveBudget, Reservation
from fsl_transport.session import frames
from fsl_transport.settings import TransportSettings


@pytest.fixture
def memory(mem_world):
    """A world in memory."""
    return mem_world()


def test_what_is_received_and_not_written_is_bounded_over_all_peers(
    memory, new_settings, new_source, new_sink
):
    """The window of each stream alone would allow ten times the budget; all arrive in the end."""
    budget, chunk = 400_000, 50_000
    settings = new_settings(budget_bytes=budget, chunk_limit_bytes=chunk, window_bytes=4 * chunk)
    ps = memory.listener(settings=settings)
    sinks = {}

    def take(event):
        sinks[event.peer] = new_sink(hold=True)
        ps.endpoint.accept(event.peer, event.stream_id, sinks[event.peer])

    ps.on[StreamOffered] = take
    for number in range(20):
        client = memory.dialer(f"c{number}", settings=settings, connect=False)
        client.on[PeerUp] = lambda _, client=client: client.endpoint.offer(
            "", "s", {}, new_source([bytes(chunk)] * 6)
        )
        client.endpoint.connect(dict)
    memory.until(lambda: len(sinks) == 20)
    most = 0
    for _ in range(400):
        memory.run(0.5)
        most = max(most, ps.endpoint.receive_budget.taken_bytes)
        for sink in sinks.values():
            while sink.waiting:
                done, _ = sink.waiting.pop(0)
                done(True)
        if ps.count(StreamReceived) == 20:
            break
    assert ps.count(StreamReceived) == 20
    assert most <= budget
    assert ps.endpoint.receive_budget.taken_bytes == 0


class Crowd:
    """A room of four chunks, which the first client's stream fills; the others find none. Nothing is written before it is released."""

    CHUNK = 50_000

    def __init__(self, world, new_settings, new_source, new_sink, *, others, chunks, **changes):
        self.world = world
        settings = new_settings(
            budget_bytes=4 * self.CHUNK,
            chunk_limit_bytes=self.CHUNK,
            window_bytes=4 * self.CHUNK,
            **changes,
        )
        self.ps = world.listener(settings=settings)
        self.sinks, self.asked = {}, []

        def take(event):
            self.sinks[event.peer] = new_sink(hold=True)
            self.ps.endpoint.accept(event.peer, event.stream_id, self.sinks[event.peer])

        self.ps.on[StreamOffered] = take
        send_op = self.ps.endpoint.send_op

        def watch(peer, op, fields):
            if op == frames.ACCEPT and fields[1]:
                self.asked.append(peer.name)
            send_op(peer, op, fields)

        self.ps.endpoint.send_op = watch
        self.clients = {}
        for name in ("first", *others):
            one = self.clients[name] = world.dialer(name, settings=settings)
            world.until(lambda one=one: one.count(PeerUp))
            count = 4 if name == "first" else chunks
            one.endpoint.offer("", "s", {}, new_source([bytes(self.CHUNK)] * count))
            world.run(0.5)
        assert self.held == self.receive_budget.writing_bytes // self.CHUNK == 4

    @property
    def receive_budget(self):
        """The server's."""
        return self.ps.endpoint.receive_budget

    @property
    def held(self):
        """Chunks that are in the room."""
        return self.ps.endpoint.receive_budget.taken_bytes // self.CHUNK

    def write(self, name, count=1):
        """So many chunks of a stream are written."""
        self.sinks[name].release(count)
        self.world.run(0.5)


@pytest.fixture
def crowd(memory, new_settings, new_source, new_sink):
    return lambda *others, chunks=4, **changes: Crowd(
        memory, new_settings, new_source, new_sink, others=others, chunks=chunks, **changes
    )


def test_what_found_no_room_is_asked_for_one_after_the_other(crowd):
    """All at once, most of it would come in vain again. For the longest waiting the first room is kept."""
    world = crowd("b", "c")
    world.write("first")
    assert (world.asked, world.held) == (["b"], 4), "before half of it is free"
    world.world.run(2)
    assert world.asked == ["b"]
    world.write("first")
    assert world.asked == ["b", "c"]
    for _ in range(12):
        for name in world.sinks:
            world.write(name, len(world.sinks[name].waiting))
    assert [len(sink.got) for sink in world.sinks.values()] == [4, 4, 4]
    assert world.ps.endpoint.receive_budget.waiting == []


def test_who_waits_for_room_is_not_asked_because_it_is_silent(crowd):
    """It would send into a full room, again and again, and its patience would be that of a bad line."""
    world = crowd("b", chunks=1)
    world.world.run(60)
    assert world.asked == []
    (waiting,) = world.ps.endpoint.receive_budget.waiting
    patience = waiting.machine._patience_s, waiting.machine._wait_s
    world.write("first", 4)
    assert world.asked == ["b"]
    assert (waiting.machine._patience_s, waiting.machine._wait_s) == patience
    world.write("b")
    assert world.clients["b"].count(StreamSent) == 1


def test_who_was_asked_and_does_not_answer_keeps_nobody_waiting(crowd):
    """Room is made by who writes; where nobody writes, time asks the next one."""
    calm = {"heartbeat_every_s": 100, "expire_after_s": 300, "stall_s": 100}
    world = crowd(*"bcdefgh", chunks=1, **calm)
    for name in "bcdefg":
        world.world.network.cut(name, "ps")
    world.world.run(2)  # it looks, in vain
    world.sinks["first"].release()
    assert world.asked == ["b", "c", "d", "e", "f"]
    world.world.run(1.5)
    assert len(world.sinks["h"].got) == 1


def test_a_room_full_of_chunks_that_wait_for_earlier_ones_is_no_deadlock(
    memory, new_settings, new_source, new_sink
):
    """Pieces overtake each other: the second chunk of each stream may have taken all the room, and the first of none finds any."""
    chunk = 50_000
    settings = new_settings(budget_bytes=4 * chunk, chunk_limit_bytes=chunk, window_bytes=4 * chunk)
    ps = memory.listener(settings=settings)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink())
    clients = [memory.dialer(f"c{number}", settings=settings) for number in range(2)]
    memory.until(lambda: all(one.count(PeerUp) for one in clients))
    sources = [new_source([bytes(chunk)] * count, later=True) for count in (4, 2)]
    for one, source in zip(clients, sources, strict=True):
        one.endpoint.offer("", "s", {}, source)
    memory.until(lambda: all(source.waiting for source in sources))
    for one, source in zip(clients, sources, strict=True):
        streams = ps.endpoint._peers[one.name].streams
        for index in range(1, source.chunks):  # within their credit, and one of them not whole
            part = bytes(9 if index == 3 else chunk)
            piece = frames.Chunk(b"", 1, 0, index, 0, chunk, 0, 1, False, part)
            streams._take_piece(streams._incoming[1], piece, ps.endpoint.now())
    assert ps.endpoint.receive_budget.taken_bytes == 4 * chunk
    begun = memory.scheduler.time()
    while not all(one.count(StreamSent) for one in clients):
        for source in sources:
            while source.waiting:
                deliver, data = source.waiting.pop(0)
                deliver(data)
        memory.run(0.05)
        for peer in ps.endpoint._peers.values():
            for one in peer.streams._incoming.values():
                assert {*one.complete, *one.assemblies} == {*one.kept}, "what is dropped is gone"
        assert memory.scheduler.time() < begun + 0.6
    assert ps.endpoint.receive_budget.taken_bytes == 0


def test_whose_room_is_taken_each_time_is_left_to_its_silence(crowd):
    """Its sender would end the session after 64 times, and it is honest."""
    world = crowd("b", chunks=1, stall_s=1000, heartbeat_every_s=100, expire_after_s=300)
    world.sinks["first"].release()  # it is asked for
    for _ in range(2 * ASKED_IN_VAIN_LIMIT):
        world.receive_budget.taken_bytes += 4 * Crowd.CHUNK  # somebody who is nearer
        world.world.run(0.5)
        world.receive_budget.taken_bytes -= 4 * Crowd.CHUNK
        world.receive_budget.use(world.ps.endpoint.settings)
    assert len(world.asked) in {ASKED_IN_VAIN_LIMIT, ASKED_IN_VAIN_LIMIT + 1}
    assert world.ps.count(PeerDown) == 0


class Lone:
    """One stream whose source sends nothing of its own; pieces are handed to the server by hand. The room is as large as it is told."""

    CHUNK = 50_000

    def __init__(self, world, new_settings, new_source, new_sink):
        self.world, self.sink = world, new_sink()
        settings = new_settings(
            budget_bytes=20 * self.CHUNK, chunk_limit_bytes=self.CHUNK, stall_s=3
        )
        self.ps, client = world.listener(settings=settings), world.dialer(settings=settings)
        world.until(lambda: client.count(PeerUp))
        world.accept_all(self.ps, self.sink)
        client.endpoint.offer("", "s", {}, new_source([bytes(self.CHUNK)] * 9, later=True))
        world.until(lambda: self.ps.count(StreamOffered))
        self.streams = self.ps.endpoint._peers[client.name].streams
        self.incoming = self.streams._incoming[1]

    def leave(self, chunks):
        """So many fit; others have the rest, and write."""
        receive_budget = self.ps.endpoint.receive_budget
        receive_budget.taken_bytes = (20 - chunks) * self.CHUNK
        receive_budget.writing_bytes = receive_budget.taken_bytes

    def piece(self, index, size=CHUNK, *, round_=0):
        """A piece of a chunk, the first ``size`` bytes."""
        piece = frames.Chunk(b"", 1, round_, index, 0, self.CHUNK, 0, 1, False, bytes(size))
        self.streams._take_piece(self.incoming, piece, self.ps.endpoint.now())


@pytest.fixture
def lone(memory, new_settings, new_source, new_sink):
    return Lone(memory, new_settings, new_source, new_sink)


def test_what_a_stream_drops_may_make_room_for_what_it_needs(lone):
    """It must not be asked again and again for a chunk whose room it took itself."""
    lone.leave(1)
    lone.piece(1)
    lone.piece(0)
    assert sorted(lone.sink.got) == [0]
    assert list(lone.incoming.kept) == []
    assert lone.incoming.short_round == 0, "chunk 1 comes again"


def test_what_lies_beyond_the_gap_is_no_use_of_the_room_that_it_makes(lone):
    """It would be dropped with the next chunk."""
    lone.leave(1)
    lone.piece(1)
    lone.piece(2)
    assert list(lone.incoming.kept) == []


def test_a_chunk_from_before_a_resume_finds_no_room_and_nothing_else_comes_of_it(lone):
    """The sender has gone back since: what it sends now is not to be dropped for that."""
    lone.incoming.machine.ask_again(0.0)
    lone.leave(0)
    lone.piece(0, round_=0)
    assert lone.incoming.short_round == -1
    assert lone.ps.endpoint.receive_budget.waiting == []


def test_a_part_that_is_lost_on_its_way_is_asked_for_though_the_stream_waits_for_room(lone):
    """The chunk that is missing has its room: silence about the rest of it is silence."""
    lone.leave(1)
    lone.piece(0, 9)
    lone.piece(1)
    assert lone.ps.endpoint.receive_budget.waiting == [lone.incoming]
    lone.world.run(2)
    assert lone.incoming.machine.round == 0
    lone.world.run(2)
    assert lone.incoming.machine.round == 1


def test_who_was_asked_in_vain_is_not_asked_by_the_stall_timer_either_while_there_is_no_room(lone):
    """After hours that would be as often as its sender takes for an error."""
    for _ in range(ASKED_IN_VAIN_LIMIT):
        lone.incoming.reservation.asked(0)
    lone.leave(0)
    lone.piece(0)
    assert lone.ps.endpoint.receive_budget.waiting == []
    lone.world.run(20)
    assert lone.incoming.machine.round == 0
    lone.leave(1)
    lone.world.run(5)
    assert lone.incoming.machine.round == 1


def test_nobody_is_asked_for_ever_in_vain():
    """Somebody else may take the room each time just before, and a sender takes 64 resumes that bring nothing for an error."""
    reservation = Reservation()
    for _ in range(ASKED_IN_VAIN_LIMIT):
        assert reservation.is_worth_asking(3)
        reservation.asked(3)
    assert not reservation.is_worth_asking(3)
    assert not reservation.is_worth_asking(2)
    assert reservation.is_worth_asking(4)
    reservation.asked(4)
    assert reservation.is_worth_asking(4)
    assert 2 * ASKED_IN_VAIN_LIMIT <= RESUMES_LIMIT


@pytest.mark.parametrize(
    ("taken", "writing", "asks"),
    [(5, 1, True), (6, 1, False), (6, 0, True), (9, 0, True), (10, 0, False), (0, 0, True)],
)
def test_there_is_room_when_half_is_free_or_nobody_else_makes_any(taken, writing, asks):
    """A room that is half full of what waits for something else is of use all the same."""
    settings = TransportSettings(budget_bytes=20 << 20)
    receive_budget, asked = ReceiveBudget(), []
    receive_budget.taken_bytes, receive_budget.writing_bytes = 2 * taken << 20, writing << 20
    for name in "ab":
        receive_budget.wait(name, lambda name=name: asked.append(name) or True)
    receive_budget.use(settings)
    assert asked == (["a"] if asks else [])
    assert receive_budget.waiting == (["b"] if asks else ["a", "b"])


def test_room_is_kept_for_the_longest_waiting_until_its_chunk_comes():
    """Those who are served renew their credit, and would take every chunk's room that is freed."""
    mib = 1 << 20
    settings = TransportSettings(budget_bytes=20 * mib)  # chunks of 2
    receive_budget, asked = ReceiveBudget(), []
    receive_budget.taken_bytes = receive_budget.writing_bytes = 19 * mib
    for name in (1, 2, 3):
        receive_budget.wait(name, lambda name=name: asked.append(name) or True)
    assert receive_budget.fits(settings, mib, 4)
    receive_budget.look(settings, 100.0)
    assert not receive_budget.fits(settings, mib, 4)
    assert receive_budget.fits(settings, mib, 1)
    receive_budget.taken_bytes = receive_budget.writing_bytes = 18 * mib
    receive_budget.use(settings)
    assert asked == [1]
    receive_budget.look(settings, 104.0)
    assert not receive_budget.fits(settings, mib, 2), "it is on its way"
    receive_budget.came(1)
    assert receive_budget.fits(settings, mib, 2)
    receive_budget.look(settings, 104.0)
    assert asked == [1, 2]
    receive_budget.look(settings, 109.0)
    assert not receive_budget.fits(settings, mib, 4)
    receive_budget.look(settings, 109.1)
    assert asked == [1, 2, 3], "b did not answer"
    receive_budget.leave(3, Reservation())
    assert receive_budget.fits(settings, mib, 4)


def test_who_does_not_need_it_any_more_is_passed_over():
    """The next one is asked in its place, and nobody twice."""
    receive_budget, asked = ReceiveBudget(), []
    receive_budget.wait("a", lambda: asked.append("a") or False)
    receive_budget.wait("b", lambda: asked.append("b") or True)
    receive_budget.wait("a", pytest.fail)
    receive_budget.wait("c", pytest.fail)
    receive_budget.leave("c", Reservation())
    receive_budget.use(TransportSettings())
    assert asked == ["a", "b"]
    receive_budget.use(TransportSettings())
    assert asked == ["a", "b"]


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_who_gives_up_leaves_the_room_to_the_next(crowd, how):
    """Nobody waits for what does not come any more."""
    world = crowd("b", "c", "d", "e")
    client = world.clients["b"].endpoint
    end = (lambda: client.cancel("", "s", "enough")) if how == "stopped" else client.close
    end()
    world.world.run(0.5 if how == "stopped" else 12)
    world.asked.clear()
    assert len(world.ps.endpoint.receive_budget.waiting) == 3
    world.sinks["first"].release(2)
    assert world.asked == ["c", "d"]
    world.clients["c"].endpoint.cancel("", "s", "before it was asked")
    world.world.run(0.5)
    assert world.asked == ["c", "d", "e"]


def test_a_chunk_that_comes_again_needs_no_room(crowd):
    """It is there already: nothing is missing, and nothing is asked for."""
    world = crowd("b")
    (waiting,) = world.ps.endpoint.receive_budget.waiting
    assert waiting.machine.number == 1
    streams = world.ps.endpoint._peers["first"].streams
    again = bytes(Crowd.CHUNK)
    streams.handle_chunk(
        frames.Chunk(b"", 1, 0, 0, 0, Crowd.CHUNK, 0, 99, False, again), world.ps.endpoint.now()
    )
    assert list(world.ps.endpoint.receive_budget.waiting) == [waiting]


class SlowDisk:
    """One writer for all streams: a chunk at a time."""

    def __init__(self, world, seconds):
        self.world, self.seconds, self.waiting = world, seconds, []

    def write(self, index, data, done):
        """Take a chunk; it has its turn after those before it."""
        self.waiting.append(done)
        if len(self.waiting) == 1:
            self.begin()

    def begin(self):
        """The first one's turn."""
        scheduler = self.world.scheduler
        scheduler.call_at(scheduler.time() + self.seconds, self.end)

    def end(self):
        """It is written."""
        self.waiting.pop(0)(True)
        if self.waiting:
            self.begin()


@pytest.mark.parametrize(("clients", "longest_s"), [(12, 2.0), (20, 3.0), (40, 5.0)])
def test_of_many_long_uploads_none_starves(mem_world, new_source, clients, longest_s):
    """More than there is room for, and nobody ends for a minute: those who found room first must not keep it."""
    world = mem_world(Conditions(delay_s=0.02, bytes_per_s=125e6))
    settings = TransportSettings(budget_bytes=32 << 20)
    ps, disk = world.listener(settings=settings), SlowDisk(world, 0.02)
    dialers = [world.dialer(f"c{number}", settings=settings) for number in range(clients)]
    world.until(lambda: all(one.count(PeerUp) for one in dialers))
    written = {}

    class Sink:
        def __init__(self, name):
            self.name = name

        def write(self, index, data, done):
            """Count when it came."""
            written.setdefault(self.name, []).append(world.scheduler.time())
            disk.write(index, data, done)

    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, Sink(e.peer))
    chunk = bytes(1 << 20)
    for one in dialers:
        one.endpoint.offer("", "long", {}, new_source([chunk] * 4000))
    world.run(30)
    assert len(written) == clients
    begun = world.scheduler.time() - 20  # not the first seconds, in which all come
    for name, times in written.items():
        pauses = [b - a for a, b in itertools.pairwise([begun, *(t for t in times if t > begun)])]
        assert max(pauses) < longest_s, name
        assert times[-1] > world.scheduler.time() - longest_s, name
    assert sum(map(len, written.values())) > 0.95 * 30 / 0.02


@pytest.mark.parametrize(("clients", "budget_mib"), [(16, 96), (60, 64), (200, 512)])
def test_more_than_there_is_room_for_is_written_at_the_writers_pace(
    mem_world, new_source, clients, budget_mib
):
    """All clients of a round upload at once. What found no room is asked for when there is some, and not after a silence of 10 s."""
    world = mem_world(Conditions(delay_s=0.02, bytes_per_s=1.25e9))
    settings = TransportSettings(budget_bytes=budget_mib << 20)
    ps = world.listener(settings=settings)
    dialers = [world.dialer(f"c{number}", settings=settings) for number in range(clients)]
    world.until(lambda: all(one.count(PeerUp) for one in dialers))
    disk, chunk, most = SlowDisk(world, 0.0), bytes(1 << 20), 0
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, disk)
    for one in dialers:  # the line is measured
        one.endpoint.offer("", "first", {}, new_source([chunk] * 16))
        world.until(lambda one=one: one.count(StreamSent) == 1)
    disk.seconds = 0.01
    begun = world.scheduler.time()
    for one in dialers:
        one.endpoint.offer("", "second", {}, new_source([chunk] * 16))
    while not all(one.count(StreamSent) == 2 for one in dialers):
        world.run(0.05)
        most = max(most, ps.endpoint.receive_budget.taken_bytes)
        assert world.scheduler.time() - begun < 0.16 * clients + 1.0
    assert most <= budget_mib << 20
    receive_budget = ps.endpoint.receive_budget
    assert (
        receive_budget.taken_bytes,
        receive_budget.writing_bytes,
        receive_budget.extra_bytes,
        receive_budget.waiting,
    ) == (0, 0, 0, [])
