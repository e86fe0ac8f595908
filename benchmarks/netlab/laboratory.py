"""Makes, changes, measures and removes a laboratory; all other modules of this package are below
it.

with Laboratory(["server", "client-1", "client-2"], profile="dsl") as lab:
    subprocess.run([*lab.command("client-1", ["ping", "-c3", lab.address("server")])])
    lab.set("client-1", "delay=80ms", "loss=1%")
    lab.cut("client-2"); lab.heal("client-2")
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from attrs import evolve, frozen

from netlab import host, plan, profiles, records
from netlab.backend import Backend, choose
from netlab.host import LabError
from netlab.plan import CONGESTION
from netlab.records import LinkState, Process, Record
from netlab.running import running
from netlab.veth import Unshaped

PROBE_S = 60.0
_NUMBERS = itertools.count(1)
_TAIL_S = 20.0
_PROBE = Path(__file__).with_name("probe.py")


@frozen
class Stream:
    """What one measurement counted.

    Bytes that arrived, seconds from the first to the last of them, segments that were sent again.
    """

    bytes: int
    seconds: float
    retransmits: int

    @property
    def mbit_s(self) -> float:
        """10^6 bits of payload a second."""
        return 8e-6 * self.bytes / self.seconds if self.seconds else 0.0


def which() -> str:
    """What would carry packets on this machine: `veth` or `router VM`.

    Raises MissingError with what is missing and what to do.
    """
    return choose().name


def site_of(pid: int) -> tuple[Laboratory, str] | None:
    """The laboratory and the site that a process is in; None when it is in none."""
    for name in records.names():
        try:
            lab = Laboratory.find(name)
        except (LabError, OSError):
            continue
        for site in lab._plan.sites.values():  # noqa: SLF001 - its own module
            if host.is_in(pid, site.namespace):
                return lab, site.name
    return None


class Laboratory:
    """Sites and links that are there while the `with` block runs.

    `profile` is set on all links; `pairs` are the links, by default a star around the first site.
    With `lasting` it stays until `down`, also when this process ends. Raises MissingError where it
    cannot be had; methods raise UsageError for names that are not there.

    With `shaped` false links can be cut and have no other setting, and all that is needed are root
    and network namespaces.
    """

    def __init__(
        self,
        sites: Sequence[str],
        *,
        profile: str = "lan",
        pairs: Sequence[tuple[str, str]] | None = None,
        congestion: str = CONGESTION,
        name: str = "",
        lasting: bool = False,
        shaped: bool = True,
    ) -> None:
        self._plan = plan.make(name or f"p{os.getpid()}-{next(_NUMBERS)}", sites, pairs, congestion)
        settings = profiles.profile(profile)
        self._lasting, self._shaped = lasting, shaped
        self._record = Record(
            name=self._plan.name,
            backend="",
            sites=tuple(sites),
            links={
                link.name: LinkState(*plan.names(link), settings, profile)
                for link in self._plan.links.values()
            },
            congestion=dict.fromkeys(sites, congestion),
        )

    @classmethod
    def find(cls, name: str) -> Laboratory:
        """One that another process made; raises LabError when there is none or it has crashed."""
        host.require()
        record = records.read(name)
        if record is None:
            others = ", ".join(records.names())
            raise LabError(
                f"there is no laboratory {name}" + (f"; there are: {others}" if others else "")
            )
        fault = record.fault()
        if fault:
            raise LabError(f"the laboratory {name} has crashed: {fault}; remove it with down")
        lab = cls(record.sites, pairs=record.pairs, name=name, lasting=True)
        lab._record = record
        return lab

    # --- making and removing ---

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make the laboratory; the remains of crashed ones are removed first."""
        host.require()
        backend_name = which() if self._shaped else Unshaped.name
        for name in records.names():
            if name != self.name:
                _sweep(name)
        with records.locked(self.name):
            old = records.read(self.name)
            if old is not None and not old.fault():
                raise LabError(
                    f"a laboratory {self.name} is up; remove it with down, or use another --name"
                )
            if old is not None:
                _remove(old)
            owner = None if self._lasting else records.this_process()
            self._record = evolve(self._record, backend=backend_name, owner=owner)
            records.write(self._record)
            try:
                self._build()
            except BaseException:
                _remove(records.read(self.name) or self._record)
                records.forget(self.name)
                raise

    def _build(self) -> None:
        sites = list(self._plan.sites.values())
        host.ip_batch(f"netns add {site.namespace}" for site in sites)
        settings = plan.site_settings(self._plan)
        host.allow_congestion(self._plan.congestion)
        for site in sites:
            host.write_settings(site, settings)
        pid = self._backend.build({name: one.settings for name, one in self._record.links.items()})
        if pid:
            self._record = evolve(self._record, machine=Process(pid, host.started(pid)))
            records.write(self._record)
        for site in sites:
            host.ip_batch(plan.site_lines(self._plan, site), site.namespace)
        self._record = evolve(self._record, complete=True)
        records.write(self._record)

    def down(self) -> None:
        """End what runs in the sites, and remove all. Harmless when it is gone."""
        remove(self.name)

    # --- using ---

    @property
    def name(self) -> str:
        """The laboratory's name."""
        return self._plan.name

    @property
    def backend(self) -> str:
        """What carries its packets: `veth` or `router VM`."""
        return self._record.backend

    @property
    def sites(self) -> list[str]:
        """Names of the sites; the first one is the middle of a star."""
        return list(self._plan.sites)

    @property
    def links(self) -> Mapping[str, LinkState]:
        """Names and present settings of the links."""
        return self._record.links

    @property
    def congestion(self) -> Mapping[str, str]:
        """TCP congestion control of each site."""
        return self._record.congestion

    def address(self, site: str) -> str:
        """The address of a site, by which those with a link to it reach it."""
        return self._plan.site(site).address

    def command(self, site: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Words that run a command in a site; they become that process, without one between."""
        return (*host.enter(self._plan.site(site).namespace), *argv)

    def set(self, link: str, *words: str) -> None:
        """Change links (a name, a site with one link, `all`).

        Words, in this order: cut, heal, PROFILE[:KEY=VALUE...], or KEY=VALUE.
        """
        chosen = self._plan.chosen(link)
        with records.locked(self.name):
            self._record = self._current()
            for one in chosen:
                state = self._record.links[one.name]
                for word in words:
                    state = _after(state, word)
                self._backend.apply(one, state.settings, cut=state.cut)
                self._record = self._record.with_link(one.name, state)
                records.write(self._record)

    def cut(self, link: str) -> None:
        """Cut a link: packets sent from now on are lost; those on their way still arrive."""
        self.set(link, "cut")

    def heal(self, link: str) -> None:
        """Restore a link to its settings before `cut`."""
        self.set(link, "heal")

    def set_congestion(self, site: str, algorithm: str) -> None:
        """TCP congestion control of connections that a site opens or accepts from now on."""
        host.allow_congestion(algorithm)
        host.write_settings(self._plan.site(site), {"ipv4/tcp_congestion_control": algorithm})
        with records.locked(self.name):
            record = self._current()
            self._record = evolve(record, congestion={**record.congestion, site: algorithm})
            records.write(self._record)

    def probe(self, site: str, *words: str, limit_s: float = PROBE_S) -> dict[str, float]:
        """Run `probe` in a site; returns the object that it prints. Raises LabError."""
        argv = self.command(site, [sys.executable, "-I", "-S", str(_PROBE), *words])
        return dict(json.loads(host.run(argv, limit_s=limit_s)))

    def round_trip_ms(self, one: str, other: str, count: int = 5) -> float:
        """Median round trip of small packets between two sites; infinite when none came back."""
        link = self._plan.between(one, other)
        wait_s = 1.0 + 3e-3 * self._record.links[link.name].settings.delay_ms
        found = self.probe(one, "ping", self.address(other), str(count), "0.02", str(wait_s))
        return found["median_ms"]

    def stream(
        self, one: str, other: str, *, seconds: float, streams: int = 1, congestion: str = ""
    ) -> Stream:
        """Send from one site to another over plain TCP; what arrived is counted there."""
        address = self.address(other)
        words = [sys.executable, "-I", "-S", str(_PROBE), "sink", address, str(seconds + _TAIL_S)]
        with running(self.command(other, words)) as sink:
            port = str(json.loads(sink.line(_TAIL_S))["port"])
            sent = self.probe(
                one, "source", address, port, str(streams), str(seconds), congestion,
                limit_s=2 * seconds + _TAIL_S,
            )  # fmt: skip
            got = json.loads(sink.line(seconds + 2 * _TAIL_S))
        return Stream(int(got["bytes"]), float(got["seconds"]), int(sent["retransmits"]))

    def _current(self) -> Record:
        """Read the state on disk: another process may have changed a link.

        Raises LabError when it was removed.
        """
        record = records.read(self.name)
        if record is None:
            records.forget(self.name)
            raise LabError(f"the laboratory {self.name} is not there any more")
        return record

    @property
    def _backend(self) -> Backend:
        return choose(self._record.backend)(self._plan)


def _after(state: LinkState, word: str) -> LinkState:
    if word in {"cut", "heal"}:
        return evolve(state, cut=word == "cut")
    name = word if "=" not in word or ":" in word else ""
    return evolve(state, settings=profiles.changed(state.settings, word), profile=name)


def remove(name: str) -> bool:
    """Remove a laboratory, crashed or not; False when there was none."""
    host.require()
    if not records.folder(name).exists():
        return False
    with records.locked(name):
        record = records.read(name)
        if record is not None:
            _remove(record)
        records.forget(name)
    return record is not None


def sweep(say: Callable[[str], None] = lambda _text: None) -> None:
    """Remove what crashed laboratories left."""
    host.require()
    for name in records.names():
        why = _sweep(name)
        if why:
            say(f"removed what was left of the laboratory {name}: {why}")


def _sweep(name: str) -> str:
    """Remove one if it has crashed; returns why, or nothing. One that is locked is left alone."""
    try:
        with records.locked(name, limit_s=0.0):
            record = records.read(name)
            fault = "" if record is None else record.fault()
            if record is not None and fault:
                _remove(record)
            if record is None or fault:
                records.forget(name)
            return fault
    except LabError:
        return ""


def _remove(record: Record) -> None:
    """Remove processes, namespaces and the VM; what is gone already is no fault."""
    there = set(host.namespaces())
    for site in record.plan().sites.values():
        if site.namespace in there:
            host.delete_namespace(site.namespace)
    choose(record.backend)(record.plan()).remove()
