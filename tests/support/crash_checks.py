"""Checks of a run with a crash: what was seen outside the folder against what the folder holds."""

from __future__ import annotations

from collections import Counter

import numpy as np
from crash_clients import DOWN, MANIFEST, MAX_STALENESS, chunks
from crash_journal import check_journals, gather
from ledger_books import check_state

from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.digest import digest_of
from fsl_async.store.files import Files
from fsl_async.store.records import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import decode, encode


def check(world):
    """Return one sentence for each thing that does not hold."""
    found = list(world.observed.problems)
    if not world.over:
        found.append("the run did not come to its end")
    if world.store is not None:
        world.disk.dead, world.disk.at, world.disk.die_after = False, 0, None
        world.store.close()
        world.disk.bury()
    found += check_journals(world)
    gather(world)
    audit = audit_run(world.run_dir)
    found += audit.complaints()
    facts = [
        from_checksummed(line)
        for line in (world.run_dir / "ledger.jsonl").read_bytes().splitlines()
    ]
    found += _check_settled(world, facts) if world.over else []
    found += _check_weights(world, facts)
    found += _check_reused(world, facts)
    found += _check_leases(world, facts)
    found += _check_recovery(world, facts)
    # A delta in flight when the last round is merged makes one more: an acknowledged delta is
    # merged.
    if world.over and not world.rounds <= audit.versions <= world.rounds + 1:
        found.append(f"{audit.versions} versions were made, {world.rounds} were asked for")
    return found


def _check_settled(world, facts):
    """Check that every acknowledged delta is in a version, or recorded as quarantined."""
    settled = {entry["key"] for fact in facts for entry in fact.get("merged", ())}
    settled |= {fact["key"] for fact in facts if fact["fact"] == "quarantined"}
    return [
        f"{key} was acknowledged, and is in no version"
        for key in world.observed.acknowledged
        if key not in settled
    ]


def _check_weights(world, facts):
    """Recompute every version from what clients sent."""
    found = []
    versions = [fact for fact in facts if fact["fact"] == "version"]
    accepted = {fact["key"]: fact for fact in facts if fact["fact"] == "accepted"}
    digests = {fact["version"]: fact["digest"] for fact in versions}
    if [fact["version"] for fact in versions] != list(range(len(versions))):
        found.append(f"versions {[fact['version'] for fact in versions]} are no lineage")
    weights = _initial(world, versions[0]["digest"]) if versions else None
    if versions and weights is None:
        return [*found, "version 0 has the initial weights of no client"]
    momentum = np.zeros(MANIFEST.values, np.float32)
    residual = np.zeros_like(momentum)
    for fact in versions[1:]:
        rate, coefficient = np.float32(fact["learning_rate"]), np.float32(fact["momentum"])
        total = np.zeros_like(momentum)
        for entry in fact["merged"]:
            key = DeltaKey.parse(entry["key"])
            identity = (key.client, key.incarnation, key.sequence)
            if identity not in world.observed.sent or entry["key"] not in accepted:
                return [*found, f"{entry['key']} was never sent, or never accepted"]
            model, tokens = world.observed.sent[identity]
            if entry["tokens"] != tokens:
                found.append(f"{entry['key']} has {entry['tokens']} tokens, not {tokens}")
            base = accepted[entry["key"]]["base_digest"]
            if model.version != key.base or base != digests[key.base]:
                found.append(f"{entry['key']} names another base than it was computed from")
            if not world.latest:
                total = total + np.float32(entry["weight"]) * _arrived(world, entry)
        if world.latest:
            total = _sum_of_all(world, fact)
        average = total * np.float32(fact["scale"])
        momentum = coefficient * momentum + average
        step = average + coefficient * momentum
        desired = -rate * step + residual
        sent = np.concatenate([decode(encode(c, DOWN)) for c in chunks(desired)])
        residual = desired - sent
        weights = weights + sent
        if digest_of(weights) != fact["digest"]:
            found.append(f"version {fact['version']} holds other weights than its deltas give")
    for version, held in world.observed.held.items():
        if held != {digests.get(version)}:
            found.append(
                f"clients held {held} as version {version}, the ledger has {digests.get(version)}"
            )
    return found


def _arrived(world, entry):
    """The values of a delta, as its client sent them."""
    key = DeltaKey.parse(entry["key"])
    frames = world.observed.frames[key.client, key.incarnation, key.sequence]
    return np.concatenate([decode(frames[index]) for index in range(2)])


def _sum_of_all(world, fact):
    """The sum over all clients, by name: the mean of a client's new deltas, or its old one."""
    names = sorted({DeltaKey.parse(one["key"]).client for one in _used(fact)})
    total = None
    for name in names:
        mine = [one for one in fact["merged"] if one["key"].startswith(f"{name}/")]
        again = [one for one in fact.get("reused", ()) if one["key"].startswith(f"{name}/")]
        row = np.zeros(MANIFEST.values, np.float32)
        for one in sorted([*mine, *again], key=lambda one: DeltaKey.parse(one["key"])):
            weight = np.float32(one["weight"] / max(1, len(mine)))
            row = row + weight * _arrived(world, one)
        total = row if total is None else total + row
    return total


def _used(fact):
    return [*fact["merged"], *fact.get("reused", ())]


def _check_reused(world, facts):
    """Check that a version uses again the newest merged delta of each other client, and no else."""
    found, latest = [], {}
    for fact in (fact for fact in facts if fact["fact"] == "version" and fact["version"]):
        sent = {DeltaKey.parse(one["key"]).client for one in fact["merged"]}
        due = {
            key.text
            for key in latest.values()
            if key.client not in sent and fact["version"] - 1 - key.base <= MAX_STALENESS
        }
        used = {one["key"] for one in fact.get("reused", ())}
        if used != (due if world.latest else set()):
            found.append(f"version {fact['version']} uses {used} again, not {due}")
        for key in sorted(DeltaKey.parse(one["key"]) for one in fact["merged"]):
            latest[key.client] = key
    return found


def _initial(world, digest):
    return next((one for one in world.observed.initials if digest_of(one) == digest), None)


def _check_leases(world, facts):
    found = [
        f"{name} was given shards {sorted(shards)}"
        for name, shards in world.observed.shards.items()
        if len(shards) > 1 and name != "odd"
    ]
    kept = {
        name: shards
        for name, shards in world.observed.shards.items()
        if name not in {"odd", "stray"}
    }
    taken = Counter(shard for shards in kept.values() for shard in shards)
    return found + [
        f"shard {shard} was given to {n} clients" for shard, n in taken.items() if n > 1
    ]


def _check_state(world):
    try:
        check_state(world.run_dir)
    except AssertionError as error:
        return [f"the ledger's state is not that of its lines: {error}"]
    return []


def _check_recovery(world, facts):
    """Check that a new process recovers the last version and has nothing to repair."""
    wrong = _check_state(world)
    store = Store(
        world.run_dir,
        StoreSettings(keep_versions=2, codec_down=DOWN, outer=world.outer, **world.aggregation),
        files=Files(),
    )
    recovered, notices = store.recover(), store.notices
    store.close()
    last = max((fact["version"] for fact in facts if fact["fact"] == "version"), default=-1)
    # The next start removes what a full disk left of an old version; that is no damage.
    odd = [notice for notice in notices if "tmp-pruned" not in notice]
    complaints = wrong + [f"the next start says: {notice}" for notice in odd]
    return (
        complaints
        if recovered.version == last
        else [*complaints, f"the next start is at {recovered.version}, not {last}"]
    )
