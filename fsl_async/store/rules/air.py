"""Channels that add up the vectors of sites, and a simulated radio channel. Pure, chunk by chunk.

All sites of a round send at once, each value of their vectors in one use of the channel, and the
antenna receives the sum (Zhu et al., arXiv:1812.11494; Sery et al., COTAF, arXiv:2009.12787):

    y = sum over k of Re(h_k p_k) x_k + n,   p_k = sqrt(rho) / e_k where |e_k|^2 >= g, else 0

    x_k     vector of site k, scaled so that the largest root mean square of the round is 1
    h_k     gain of its path, E|h|^2 = 1: Rayleigh fading, or with a direct path (Rician)
    e_k     its own estimate of h_k: h_k + estimate_error * CN(0, 1)
    g       gain_floor: a site below it does not send (truncated channel inversion)
    rho     P g: power never above P (peak); or P / E[1 / |e|^2; |e|^2 >= g]: P on average (mean)
    n       noise of variance P / snr; P = 1

y / sqrt(rho) is the sum of the vectors that were sent. With m sites of equal weight and r the scale
of x, the mean has the variance r^2 P / (snr rho m^2) a value. A site whose symbols arrive t symbols
early or late adds (1 - |t|) times its value and |t| times the neighboring one, as a matched filter
of rectangular pulses does (Shao et al., arXiv:2102.13604); chunks are apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fsl_async.store.rules.adapters.draws import stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.config.settings import AirConfig

    Wide = NDArray[np.float64]


class Channel:
    """A channel that adds up the vectors of a round. settings: the table `air` of the run.

    To use another one, a radio test-bed for instance: `outer.channel = file.py:Class`, a class that
    derives from this one (docs/guides/over-the-air.md). It is used in one thread.
    """

    name: ClassVar[str]
    power: float = 0.0
    """Largest power of a site so far in the round, its mean over the values, as a multiple of P."""

    def __init__(self, settings: AirConfig) -> None:
        self.settings = settings

    def begin(self, seed: int, version: int, sites: Sequence[str]) -> NDArray[np.bool_]:
        """Begin the round that makes `version`; return which sites send in it: bool (n,).

        seed: the run's. sites: names, sorted.
        """
        del seed, version
        return np.ones(len(sites), np.bool_)

    def transmit(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of the vectors as received, float32 (values,): of each chunk in order.

        vectors: float32 (senders, values), of the sites that send; the mean square of each over the
        whole round is at most 1. They may be changed.
        """
        raise NotImplementedError


class Air(Channel):
    """The simulated radio channel. Its chance follows from seed, version and the sites' names."""

    name = "air"

    def begin(self, seed: int, version: int, sites: Sequence[str]) -> NDArray[np.bool_]:
        """See `Channel.begin`. A site sends where its estimated gain reaches the floor."""
        air = self.settings
        drawn = np.array(
            [uniform(stream(seed, f"air/{version}/{name}"), 5) for name in sites]
        ).reshape(-1, 5)
        gain = faded(drawn[:, 0], drawn[:, 1], air.rician_k)
        estimate = gain + air.estimate_error * scattered(drawn[:, 2], drawn[:, 3])
        sends: NDArray[np.bool_] = np.abs(estimate) ** 2 >= air.gain_floor
        rho, estimate = inverted_power(air), estimate[sends]
        self._powers = rho / np.abs(estimate) ** 2
        self._gains = (gain[sends] / estimate).real
        self._late = (air.timing_error * (2 * drawn[:, 4] - 1))[sends]
        self._noise = stream(seed, f"air/{version}")
        self._deviation = math.sqrt(10 ** (-air.snr_db / 10) / rho)
        self._energies, self._values, self.power = np.zeros(len(estimate)), 0, 0.0
        return sends

    def transmit(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Channel.transmit`."""
        values = vectors.shape[1]
        total = self._deviation * normal(self._noise, values)
        for number, (gain, late) in enumerate(zip(self._gains, self._late, strict=True)):
            sent = vectors[number].astype(np.float64)
            self._energies[number] += sent @ sent
            total += gain * (1 - abs(late)) * sent
            if late > 0:
                total[1:] += gain * late * sent[:-1]
            elif late < 0:
                total[:-1] -= gain * late * sent[1:]
        self._values += values
        powers = self._powers * self._energies / max(1, self._values)
        self.power = float(powers.max(initial=0.0))
        return total.astype(np.float32)


def uniform(words: np.random.Philox, count: int) -> Wide:
    """Return the next numbers of a stream, float64 (count,), in the middle of 2^52 equal steps."""
    return ((words.random_raw(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(words: np.random.Philox, count: int) -> Wide:
    """Return the next standard normal numbers of a stream, float64 (count,) (Box and Muller)."""
    pairs = uniform(words, 2 * (count + 1 >> 1)).reshape(2, -1)
    found = math.sqrt(2) * scattered(*pairs)
    return np.concatenate([found.real, found.imag])[:count]


def scattered(first: Wide, second: Wide) -> NDArray[np.complex128]:
    """Return complex normal numbers of variance 1, made of uniform ones in (0, 1)."""
    found: NDArray[np.complex128] = np.sqrt(-np.log(first)) * np.exp(2j * np.pi * second)
    return found


def faded(first: Wide, second: Wide, rician_k: float) -> NDArray[np.complex128]:
    """Return gains of mean square 1: a direct path `rician_k` times as strong as scattered ones."""
    return (math.sqrt(rician_k) + scattered(first, second)) / math.sqrt(1 + rician_k)


def inverted_power(air: AirConfig) -> float:
    """Return rho, the power that arrives of each site that sends, as a multiple of P."""
    if air.power == "peak":
        return air.gain_floor
    # The mean over a grid of 512 x 512 equally likely gains, as estimated: within 0.3 %.
    places = (np.arange(512) + 0.5) / 512
    scatter = 1 / (1 + air.rician_k) + air.estimate_error**2
    direct = math.sqrt(air.rician_k / (1 + air.rician_k))
    gains = np.abs(direct + math.sqrt(scatter) * scattered(places[:, None], places[None])) ** 2
    inverse = np.where(gains >= air.gain_floor, 1 / gains, 0.0).mean()
    return 1 / inverse if inverse else air.gain_floor
