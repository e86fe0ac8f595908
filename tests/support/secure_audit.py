"""Sites that record what they give away, and what a server can compute from all of it."""

# ruff: noqa: D102 - the audit is called by its sites

from collections import Counter

from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.roster import LEAST
from fsl_async.secure.shamir import SHARE_BYTES
from fsl_async.secure.site import Site


class Audit:
    """What left the sites, by set: whose masks were used, and which shares were given."""

    def __init__(self):
        self.rosters = {}
        self.masked = {}
        """Set -> site -> how often its masks were taken."""
        self.given = {}
        """Set -> site -> kind of secret ("key" or "seed") -> holders that gave their share."""
        self.opened = 0

    def take(self, roster, context, name):
        self.rosters[context] = roster
        self.masked.setdefault(context, Counter())[name] += 1

    def give(self, roster, context, holder, shares, held):
        self.rosters[context] = roster
        given = self.given.setdefault(context, {})
        for name, share in shares:
            kind = ("key", "seed")[held[name].index(share)]
            given.setdefault(name, {}).setdefault(kind, set()).add(holder)

    def problems(self):
        """What a server can compute that it must not, as sentences."""
        found, self.opened = [], 0
        for context, roster in self.rosters.items():
            masked = self.masked.get(context, Counter())
            found += [f"masks of {name} were used {n} times" for name, n in masked.items() if n > 1]
            known = {"key": set(), "seed": set()}
            for name, kinds in self.given.get(context, {}).items():
                for kind, holders in kinds.items():
                    if len(holders) >= roster.threshold:
                        known[kind].add(name)
            both = known["key"] & known["seed"]
            found += [f"both secrets of {name} are known" for name in sorted(both)]
            for group in self._groups(roster, masked, known["key"]):
                if group is not None and group <= known["seed"]:
                    self.opened += 1
                    if len(group) < LEAST:
                        found.append(f"the sum of {sorted(group)} alone can be opened")
        return found

    @staticmethod
    def _groups(roster, masked, keys):
        """Sites whose masks with each other are not known; None: with one that sent nothing."""
        left = set(masked)
        while left:
            group, new, is_open = set(), {left.pop()}, True
            while new:
                group |= new
                near = {
                    (one, other) for one in new for other in roster.neighbours(one)
                    if not {one, other} & keys
                }  # fmt: skip
                is_open = is_open and all(other in masked for _, other in near)
                new = {other for _, other in near if other in masked} - group
            left -= group
            yield group if is_open else None


class AuditedSite(Site):
    """A site whose answers are recorded."""

    audit: Audit

    def handle(self, message):
        answer = super().handle(message)
        if isinstance(answer, msg.Unmasked):
            attempt = self._attempt
            for _, share in answer.shares:
                assert len(share) == SHARE_BYTES
            self.audit.give(attempt.roster, attempt.context, self.name, answer.shares, attempt.held)
        return answer

    def take_masks(self, number):
        masks = super().take_masks(number)
        if masks is not None:
            self.audit.take(masks.roster, self._attempt.context, self.name)
        return masks


def audited(audit, *given):
    site = AuditedSite(*given)
    site.audit = audit
    return site
