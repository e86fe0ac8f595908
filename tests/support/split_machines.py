"""A driver of the split server's machine with a method for each kind of event."""

import attrs
from configs import config_of
from machines import Driver

from fsl_async.roles.machine import ClientLeft, Greeted
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import SplitProgress
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.split.server_state import CHECKPOINT_EVERY

HALVES = {"method": "m", "cut": "3", "server": "s"}


def key(client, step=0, number=0, incarnation=1, leg=0):
    """Make the key of an upload."""
    return UploadKey(client, incarnation, number, step, leg)


def smashed(upload, auxiliary=-1, *, wants=True, due=False):
    """Make the metadata of an upload."""
    return msg.SmashedMeta(upload, 0, auxiliary, [16, 4], [], 16, 0, wants, due)


@attrs.define
class SplitServerDriver(Driver):
    """A split server and its peers."""

    def join(self, peer, incarnation=1, **more):
        """Feed a client's hello."""
        hello = msg.SplitHello("run", msg.ROLE, 0, HALVES, -1, -1, 0)
        return self.feed(Greeted(peer, attrs.evolve(hello, **more), incarnation))

    def leave(self, peer, incarnation=1, reason="expired"):
        """Feed the end of a client's session."""
        return self.feed(ClientLeft(peer, incarnation, reason))

    def parameter_server(self, run="run", *, incarnation=1, peer=msg.PS_ROLE):
        """Feed the parameter server's hello."""
        return self.feed(Greeted(peer, msg.PsHello(run, msg.PS_ROLE), incarnation))

    def offer(self, upload, *, peer=None, wants=True, due=False, auxiliary=-1):
        """Feed the offer of an upload."""
        stream = msg.upload_stream(upload.text)
        meta = smashed(upload, auxiliary, wants=wants, due=due)
        return self.receive(meta, peer or upload.client, stream)

    def arrive(self, upload):
        """Feed the end of an upload's transfer."""
        return self.feed(ev.UploadReceived(upload.client, upload))

    def trained(self, upload, *, answer=False, problem=None):
        """Feed the result of the training thread."""
        return self.feed(ev.UploadTrained(upload, 2.5, 7, answer, problem))

    def upload(self, upload, **more):
        """Offer, transfer and train an upload; returns the effects of the last event."""
        answer = more.pop("answer", False)
        self.offer(upload, **more)
        self.arrive(upload)
        return self.trained(upload, answer=answer)


def split_server(method="cse-fsl", checkpoint_every=CHECKPOINT_EVERY, **rules):
    """Make a driver whose split server begins with an empty folder."""
    config = config_of("split", method=method, **{"alone_s": 0.0, **rules})
    driver = SplitServerDriver(SplitServerMachine(config, HALVES))
    driver.machine.checkpoints.every = checkpoint_every
    driver.feed(ev.SplitRecovered(SplitProgress()))
    return driver
