"""The audit of a run's deltas: what was acknowledged against what the versions hold.

It reads the run directory and changes nothing. Different code writes its two sources, at different
moments: the journal, and the clients' own journals in `clients/*/`, have which deltas were
acknowledged; the ledger and the checkpoints have their outcomes. A delta is

    merged      one version of the lineage lists it
    doubled     more than one does, or one lists it twice
    pending     accepted, not merged, and its file lies in the spool
    quarantined kept aside, on record
    lost        acknowledged or accepted, and none of these; or on record as missing or damaged

Versions that a rollback made void do not count. A version that the ledger lacks but a checkpoint's
manifest has counts: its folder's name makes a version exist (see `fsl_async.store.store`).

`audit_groups` audits the global rounds of several parameter servers, by their ledgers alone:

one decision for each round         in the ledger of the coordinator
the same digest at every group      versions made of those weights name it
each group's tokens once            the ranges of its cuts follow each other without a gap

`audit_split` audits a split server's ledger: the outcome of every upload, and whether it is a valid
one. An upload's lines, in order, read (trained (dropped trained)*) with perhaps a last "dropped",
or end in "declined". Dropped is an upload that a split server that died had trained since its last
checkpoint; trained after that, it was sent again. All else is a fault: trained twice in one
lineage, dropped without having been trained, trained after it was declined. A version of a client's
auxiliary model is given once, and versions grow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen, mutable

from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.observe import segments
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.sync.delta import DeltaKey

LEDGER = "ledger.jsonl"

_SHOWN = 5


@frozen
class Audit:
    """What the audit found; keys as text. problems: sentences about all else that does not fit."""

    versions: int
    merged: int
    tokens: int
    acknowledged: int
    pending: int
    quarantined: int
    doubled: tuple[str, ...]
    lost: tuple[str, ...]
    problems: tuple[str, ...]
    channel_uses: int = 0
    """Uses of a channel that adds up deltas, in real values."""

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing doubled, nothing odd."""
        return not (self.doubled or self.lost or self.problems)

    def complaints(self) -> list[str]:
        """One line for each kind of fault."""
        made = []
        for what, keys in (("lost", self.lost), ("merged twice", self.doubled)):
            if keys:
                names = ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
                which = (
                    "1 acknowledged delta is"
                    if len(keys) == 1
                    else f"{len(keys)} acknowledged deltas are"
                )
                made.append(f"{which} {what}: {names}")
        return [*made, *self.problems]


@mutable
class _Count:
    """The ledger's facts, summed without trusting that they fit together, as the store does."""

    versions: dict[int, tuple[list[tuple[str, int]], int]] = field(factory=dict)
    reused: dict[int, list[str]] = field(factory=dict)
    """By version: what earlier ones merged, and it used again. That is no merge, of no tokens."""
    accepted: dict[str, int] = field(factory=dict)
    quarantined: set[str] = field(factory=set)
    lost: set[str] = field(factory=set)
    """Acknowledged, and found missing or damaged at a start."""
    problems: list[str] = field(factory=list)
    channel_uses: int = 0
    renewed_at: int = 0
    """The version at which a lost ledger was begun anew: it lacks what was acknowledged before."""
    aside: set[str] = field(factory=set)
    """Deltas that were in the spool at that time."""

    def add(self, fact: Mapping[str, Any]) -> None:
        self.channel_uses += int(fact.get("uses", 0))  # in "received" alone
        match fact.get("fact"):
            case "accepted":
                key = str(fact["key"])
                if key in self.accepted:
                    self.problems.append(f"delta {key} was accepted twice")
                self.accepted[key] = int(fact["tokens"])
            case "quarantined":
                aside = self.lost if fact.get("lost") else self.quarantined
                aside.add(str(fact["key"]))
            case "released":
                self.quarantined.discard(str(fact["key"]))
            case "version":
                self.add_version(fact)
            case "rollback":
                kept = int(fact["to"])
                self.versions = {n: made for n, made in self.versions.items() if n <= kept}
                self.quarantined |= {str(one["key"]) for one in fact.get("aside", ())}
                for key in fact.get("gone", ()):
                    # The operator went back further than the spool keeps: this loss is on record.
                    self.accepted.pop(str(key), None)
                    self.quarantined.add(str(key))
            case "renewed":
                self.renewed_at = int(fact["to"])
                self.aside = {str(key) for key in fact["aside"]}
                for record in fact["versions"]:
                    self.add_version(record)
                    self.accepted |= {
                        str(one["key"]): int(one["tokens"]) for one in record["merged"]
                    }

    def is_from_before(self, key: str) -> bool:
        """Whether the ledger that was lost may have known of a delta."""
        return key in self.aside or DeltaKey.parse(key).base < self.renewed_at

    def add_version(self, fact: Mapping[str, Any]) -> None:
        version = int(fact["version"])
        if version in self.versions:
            self.problems.append(f"the ledger has version {version} twice")
        merged = [(str(entry["key"]), int(entry["tokens"])) for entry in fact["merged"]]
        before = self.versions.get(version)
        if before is not None:
            merged = [*before[0], *merged]
        self.versions[version] = (merged, int(fact["tokens_total"]))
        self.reused[version] = [str(entry["key"]) for entry in fact.get("reused", ())]


def audit(
    facts: Iterable[Mapping[str, Any]],
    acknowledged: Iterable[str],
    *,
    manifests: Iterable[Mapping[str, Any]] = (),
    in_spool: Callable[[str], bool] = lambda _: True,
) -> Audit:
    """Compare. Pure but for `in_spool`, which says whether a pending delta's file is there.

    facts: the ledger's lines. manifests: manifest.json of the kept checkpoints. acknowledged: keys
    of deltas that a client was told are durable.
    """
    count = _Count()
    for fact in facts:
        count.add(fact)
    for manifest in manifests:
        _compare(count, manifest)
    times = Counter(key for merged, _ in count.versions.values() for key, _ in merged)
    told = dict.fromkeys(acknowledged)
    settled = times.keys() | count.quarantined | count.lost
    waiting = [key for key in count.accepted if key not in settled]
    lost = [key for key in waiting if not in_spool(key)]
    missing = len(lost)
    lost += [
        key
        for key in told
        if key not in settled and key not in count.accepted and not count.is_from_before(key)
    ]
    lost += count.lost
    _check_versions(count)
    return Audit(
        versions=max(0, len(count.versions) - 1),
        merged=len(times),
        tokens=sum(tokens for merged, _ in count.versions.values() for _, tokens in merged),
        acknowledged=len(told),
        pending=len(waiting) - missing,
        quarantined=len(count.quarantined | (count.aside - count.accepted.keys())),
        doubled=tuple(sorted(key for key, number in times.items() if number > 1)),
        lost=tuple(sorted(lost)),
        problems=tuple(count.problems),
        channel_uses=count.channel_uses,
    )


def _compare(count: _Count, manifest: Mapping[str, Any]) -> None:
    """A kept checkpoint has the deltas of the ledger's line, or is the line that is missing."""
    version = int(manifest["version"])
    if version not in count.versions:
        count.add_version(manifest)
        return
    stated = sorted(str(entry["key"]) for entry in manifest["merged"])
    if stated != sorted(key for key, _ in count.versions[version][0]):
        count.problems.append(f"ledger and checkpoint disagree about what version {version} merged")


def _check_versions(count: _Count) -> None:
    """No version missing, tokens add up, none merged that were never accepted."""
    total, known = 0, set[str]()
    versions = sorted(count.versions)
    first = versions[0] if count.renewed_at and versions else 0
    for expected, version in enumerate(versions, first):
        if version != expected:
            count.problems.append(f"version {expected} is in neither ledger nor checkpoints")
            return
        merged, stated = count.versions[version]
        if version == first > 0:
            total = stated - sum(tokens for _, tokens in merged)
        for key, tokens in merged:
            total += tokens
            if key not in count.accepted:
                count.problems.append(f"version {version} holds {key}, which was never accepted")
            elif count.accepted[key] < tokens:  # a guard may count fewer
                count.problems.append(
                    f"version {version} counts {tokens} tokens for {key}, accepted were"
                    f" {count.accepted[key]}"
                )
            if key in count.quarantined:
                count.problems.append(f"version {version} holds {key}, which is in quarantine")
        again = count.reused[version]
        if not first and not known.issuperset(again):
            odd = next(key for key in again if key not in known)
            count.problems.append(f"version {version} uses {odd} again, which none before merged")
        known.update(key for key, _ in merged)
        if stated != total:
            count.problems.append(f"version {version} states {stated} tokens, its deltas {total}")


def acknowledged_keys(journal: Path) -> Iterator[str]:
    """Keys of acknowledged deltas, by a parameter server's or a client's journal. Raises
    OSError.
    """
    # The newest segment first: when it becomes an older one meanwhile, its keys are read twice, and
    # none is missed.
    lines = JournalReader(journal, having=segments.ACKNOWLEDGING).read()
    yield from filter(None, map(segments.acknowledged_key, lines))
    yield from segments.acknowledged_before(journal)


def audit_run(run_dir: Path) -> Audit:
    """Audit a run directory. Raises OSError for what cannot be read."""
    # In this order, so that the audit of a run that goes on sees no effect without its cause: a
    # delta is in the ledger before it is acknowledged, and accepted before a version merges it.
    told: dict[str, None] = {}
    for journal in [run_dir / JOURNAL, *sorted(run_dir.glob(f"clients/*/{JOURNAL}"))]:
        if journal.exists():
            told |= dict.fromkeys(acknowledged_keys(journal))
    manifests, damaged = _read_manifests(run_dir)
    problems: list[str] = []
    spool = run_dir / "spool"
    result = audit(
        each_fact(run_dir / LEDGER, problems),
        told,
        manifests=manifests,
        in_spool=lambda key: (spool / f"{key.replace('/', '@')}.frames").exists(),
    )
    return evolve(result, problems=(*problems, *damaged, *result.problems))


def _read_manifests(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The manifests of the kept checkpoints, and a sentence for each that is damaged."""
    manifests, problems = [], []
    for path in sorted((run_dir / "checkpoints").glob("v*/manifest.json")):
        try:
            found = from_checksummed(path.read_bytes().rstrip())
        except FileNotFoundError:
            continue  # an old version is being removed just now
        if found is None:
            problems.append(f"{path.parent.name}/{path.name} does not match its checksum")
        else:
            manifests.append(found)
    return manifests, problems


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Its facts, and a sentence for each line that is damaged; a torn last line is not damage."""
    problems: list[str] = []
    return list(each_fact(path, problems)), problems


def each_fact(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield them one by one, as a ledger of years does not fit into memory.

    problems: a sentence for each damaged line is added to it meanwhile.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fact = from_checksummed(line.removesuffix(b"\n"))
            if fact is not None:
                yield fact
            elif line.endswith(b"\n"):
                problems.append(f"line {number} of {path.name} does not match its checksum")


@mutable
class GroupsAudit:
    """Figures of the global rounds of all groups. problems: one sentence for each fault."""

    decided: dict[int, str] = field(factory=dict)
    """Round -> digest of its global weights; those of round 0 are no decision."""
    attempts: int = 0
    members: list[int] = field(factory=list)
    """Contributors of each decided round."""
    adopted: dict[str, int] = field(factory=dict)
    """Group -> its newest global weights; -1: none."""
    tokens: int = 0
    """Tokens in the cuts of all contributors."""
    problems: list[str] = field(factory=list)
    _ends: dict[str, int] = field(factory=dict)

    @property
    def rounds(self) -> int:
        """How many rounds were decided."""
        return len(self.members)

    @property
    def digest(self) -> str:
        """The digest of the newest decision."""
        return self.decided.get(max(self.decided, default=-1), "")

    def begin(self, name: str, fact: Mapping[str, Any]) -> None:
        """Take the line of the coordinator's ledger with which the groups began."""
        self.decided[0], self._ends[name] = fact["digest"], fact["tokens"]

    def decision(self, fact: Mapping[str, Any]) -> None:
        """Take a line of the coordinator's ledger with a decision."""
        number = fact["round"]
        if number in self.decided:
            self.problems.append(f"global round {number} is decided twice")
        self.decided[number] = fact["digest"]
        self.members.append(len(fact["contributors"]))
        for name, (begin, end) in fact["contributors"].items():
            if begin != self._ends.get(name, 0):
                what = "counted twice" if begin < self._ends.get(name, 0) else "lost"
                self.problems.append(f"global weights {number}: tokens of {name} are {what}")
            self._ends[name] = end
            self.tokens += end - begin


def audit_groups(run_dirs: Mapping[str, Path]) -> GroupsAudit:
    """Audit groups by name; the first one coordinates. A missing ledger is a problem."""
    found = GroupsAudit()
    ledgers: dict[str, list[dict[str, Any]]] = {}
    for name, run_dir in run_dirs.items():
        try:
            ledgers[name] = list(each_fact(run_dir / LEDGER, found.problems))
        except FileNotFoundError:
            found.problems.append(f"{name} has no ledger")
            ledgers[name] = []
    first, facts = next(iter(ledgers.items()), ("", []))
    for fact in facts:
        if fact["fact"] == "begun":
            found.begin(first, fact)
        elif fact["fact"] == "global":
            found.decision(fact)
    found.attempts = len({fact["attempt"] for fact in facts if fact["fact"] == "attempt"})
    found.adopted = {name: _adopted(name, facts, found) for name, facts in ledgers.items()}
    return found


def _adopted(name: str, facts: Iterable[Mapping[str, Any]], found: GroupsAudit) -> int:
    """The newest global weights of a group, after checks of all that it adopted."""
    newest = -1
    for fact in facts:
        if fact["fact"] == "begun":
            newest = 0
        groups = fact.get("groups") if fact["fact"] == "version" else None
        if groups is None:
            continue
        if groups["digest"] != found.decided.get(groups["round"]):
            found.problems.append(
                f"{name} holds other global weights {groups['round']} than decided"
            )
        if groups["round"] <= newest:
            found.problems.append(f"{name} went from global weights {newest} to {groups['round']}")
        newest = groups["round"]
    return newest


_NEXT = {
    None: {"trained", "declined"},
    "trained": {"dropped"},
    "dropped": {"trained", "declined"},
    "declined": {"declined"},
}
"""Outcome of an upload -> those of its next line. A decline that was lost is repeated."""


@frozen
class SplitAudit:
    """Counts of uploads by outcome; per client its processes, last round, auxiliary version."""

    trained: int
    declined: int
    dropped: int
    came_back: int
    """Uploads that were trained after a split server had dropped them."""
    lives: Mapping[str, int]
    rounds: Mapping[str, int]
    auxiliary: Mapping[str, int]
    problems: tuple[str, ...]

    def complaints(self) -> list[str]:
        """One line for each fault."""
        return list(self.problems)


def audit_split(lines: Iterable[Mapping[str, Any]], problems: list[str]) -> SplitAudit:
    """Go through the ledger's lines, and add to the problems."""
    fates: dict[str, str] = {}
    again: set[str] = set()
    lives: dict[str, set[int]] = {}
    rounds: dict[str, int] = {}
    auxiliary: dict[str, int] = {}
    for line in lines:
        if line.get("fact") == "auxiliary":
            client, version = str(line["client"]), int(line["version"])
            if version <= auxiliary.get(client, -1):
                problems.append(
                    f"version {version} of the auxiliary model of {client} was given twice"
                )
            auxiliary[client] = version
            continue
        key, outcome = str(line["key"]), str(line["outcome"])
        before = fates.get(key)
        if outcome not in _NEXT[before]:
            problems.append(f"upload {key} is {outcome} after it was {before or 'never seen'}")
        if before == "dropped" and outcome == "trained":
            again.add(key)
        fates[key] = outcome
        named = UploadKey.parse(key)
        lives.setdefault(named.client, set()).add(named.incarnation)
        if outcome == "trained":
            rounds[named.client] = max(rounds.get(named.client, -1), named.round)
    outcomes = list(fates.values())
    return SplitAudit(
        outcomes.count("trained"),
        outcomes.count("declined"),
        outcomes.count("dropped"),
        sum(fates[key] == "trained" for key in again),
        {name: len(found) for name, found in sorted(lives.items())},
        dict(sorted(rounds.items())),
        dict(sorted(auxiliary.items())),
        tuple(problems),
    )


def fates_of(lines: Iterable[Mapping[str, Any]]) -> dict[UploadKey, str]:
    """Return the last outcome of each upload in a ledger."""
    return {UploadKey.parse(line["key"]): line["outcome"] for line in lines if "key" in line}


def trained_by_life(folder: Path, client: str) -> list[int]:
    """Return how many uploads of each process of a client were trained, in order. OSError."""
    fates = fates_of(each_fact(folder / LEDGER, [])).items()
    trained = (key.incarnation for key, fate in fates if fate == "trained" and key.client == client)
    return [count for _, count in sorted(Counter(trained).items())]


def audit_split_dir(folder: Path) -> SplitAudit:
    """Audit a split server's folder; each damaged line is a problem. Raises OSError.

    A torn last line is left out.
    """
    problems: list[str] = []
    return audit_split(each_fact(folder / LEDGER, problems), problems)
