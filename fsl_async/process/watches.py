"""Requests an end of a Stopper before Slurm or EC2 ends this process: the shells around `notices`.

Each watch is a daemon thread, because a client process has no loop before its welcome.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fsl_async.errors import ExitCode, one_line
from fsl_async.process.notices import (
    Notice,
    SlurmJob,
    of_instance_action,
    seconds_to_job_notice,
)

if TYPE_CHECKING:
    from fsl_async.process.stopper import Stopper

EC2_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The variable by which Amazon's tools, too, take another address."""

EC2_EVERY_S = 5.0
_EC2 = "http://169.254.169.254"
_ANSWER_S = 2.0
_TOKEN_S = 21_600
_MOST_BYTES = 4096


def tell(stopper: Stopper, notice: Notice) -> None:
    """Request a drained end of `stopper` before the notice's deadline."""
    deadline = None if notice.left_s is None else time.monotonic() + notice.left_s
    stopper.request(reason=notice.source, exit_code=ExitCode.RELAUNCH, deadline=deadline)


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: no other host may receive the token."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse."""


class SpotWatch:
    """Polls EC2's instance metadata service (IMDSv2, with a token) for the end of this instance.

    A service that does not answer is polled again after `every_s`; it is no reason to end.
    `trouble` is the text of the last error.
    """

    def __init__(self, base: str = _EC2, every_s: float = EC2_EVERY_S) -> None:
        self.trouble = ""
        self._base = base.rstrip("/")
        self._every_s = every_s
        self._token = ""
        # Without proxy: the address is link-local.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere())

    def look(self) -> Notice | None:
        """Poll once. Network errors go to `trouble`."""
        try:
            try:
                return self._action()
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                # The token has expired.
                self._token = ""
                return self._action()
        except urllib.error.HTTPError as error:
            self.trouble = "" if error.code == 404 else f"HTTP {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.trouble = one_line(str(error)) or type(error).__name__
        return None

    def follow(
        self,
        tell_of: Callable[[Notice], None],
        over: threading.Event,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Poll until there is a notice, or `over`. say: gets a warning when answers cease."""
        is_warned = False
        while not over.is_set():
            notice = self.look()
            if notice is not None:
                tell_of(notice)
                return
            if self.trouble and not is_warned:
                say(
                    f"warning: EC2's metadata service does not answer ({self.trouble[:200]}); until"
                    " it does, the end of this spot instance comes without notice; in a container"
                    " it needs a hop limit of 2"
                )
            is_warned = bool(self.trouble)
            over.wait(self._every_s)

    def _action(self) -> Notice | None:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._ask("/latest/api/token", ttl, "PUT").decode("ascii")
            if not token.isprintable():
                # Not stored: every later request would fail.
                raise ValueError("the token does not fit in a header")
            self._token = token
        headers = {"X-aws-ec2-metadata-token": self._token}
        body = self._ask("/latest/meta-data/spot/instance-action", headers, "GET")
        self.trouble = ""
        return of_instance_action(body, time.time())

    def _ask(self, path: str, headers: dict[str, str], method: str) -> bytes:
        # HTTP without TLS is right here: the address is link-local.
        url = self._base + path
        request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310
        with self._opener.open(request, timeout=_ANSWER_S) as answer:
            body: bytes = answer.read(_MOST_BYTES)
            return body


@contextlib.contextmanager
def watching(
    stopper: Stopper,
    job: SlurmJob | None,
    grace_s: float | None,
    *,
    ec2: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Watch for the end of the Slurm job, and with `ec2` of the spot instance, in the block.

    say: called in the watch's thread.
    """
    over = threading.Event()

    def job_end(wait_s: float) -> None:
        if not over.wait(min(wait_s, threading.TIMEOUT_MAX)):
            assert job is not None
            assert job.end_s is not None
            tell(stopper, Notice("Slurm's time limit", max(0.0, job.end_s - time.time())))

    wait_s = seconds_to_job_notice(job, grace_s, time.time())
    if wait_s is not None:
        threading.Thread(target=job_end, args=(wait_s,), name="slurm", daemon=True).start()
    if ec2:
        watch = SpotWatch(os.environ.get(EC2_VARIABLE) or _EC2)
        follow = (lambda notice: tell(stopper, notice), over, say)
        threading.Thread(target=watch.follow, args=follow, name="ec2", daemon=True).start()
    try:
        yield
    finally:
        over.set()
