"""`demo air`: sites whose deltas a simulated radio channel adds up, beside digital sending.

1  a parameter server and the clients tune a head by rounds over the air; one client gets SIGKILL
   at a third of them, is launched again and catches up
2  the same task is simulated with 20 sites (`fsl_async.tools.sim`), over the air and digital, at
   0, 10 and 20 dB with the same uses of the channel, and without a channel
"""

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from fsl_async.config.load import load
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.scenario import Choices, Conclusion, Fault, Played, Scenario, Settings

SNRS_DB, AT = (0, 10, 20), 1
"""Signal to noise of the table, and which of them is checked."""
DIGITAL = {"shares": "Shares", "turns": "OneByOne"}
"""Classes of `air_task`, by row."""
SITES = 20
LIMIT_S = 600.0


def air(chosen: Choices) -> Scenario:
    """The demo. It ends after its rounds, when the killed client trains again."""
    from fsl_async.tools.demo.air_task import __file__ as task

    names = scenario.names_of(chosen.clients or 3)
    victim, kill_at = scenario.victim_of(names), max(1, chosen.rounds // 3)
    chosen = evolve(chosen, run_dir=chosen.run_dir.resolve())
    settings = {**settings_of(chosen, len(names)), "outer.channel": "air"}

    def is_over(played: Played) -> bool:
        version, fault = played.state.ps.version, played.fault(victim)
        # The killed client takes part in the round after the one that it missed.
        is_back = fault is not None and fault.back is not None and version > fault.back_version
        limit_s = chosen.seconds or LIMIT_S
        return (is_back and version >= chosen.rounds) or played.elapsed() >= limit_s

    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[
            scenario.server(chosen, settings),
            *(
                scenario.client(name, chosen.run_dir, "deltas,metrics", "--task", f"{task}:train")
                for name in names
            ),
        ],
        faults=[
            Fault(
                victim,
                lambda played: played.has_joined(victim) and played.state.ps.version >= kill_at,
            ),
        ],
        is_over=is_over,
        drain_s=9.0 + 40.0 * chosen.late_s,
        introduction=[
            "the radio channel is simulated: no radio, no synchronization, no pilots",
            (
                f"{counted(len(names), 'client')} tune a head that tells English from Python, each"
                " on another share of both; their deltas add up in the air, at 20 dB"
            ),
            (
                f"{chosen.rounds} rounds; {victim} gets SIGKILL at version {kill_at}, is launched"
                " again and has to catch up"
            ),
            f"files and logs: {chosen.run_dir}",
            "",
        ],
        conclude=conclude,
    )


def settings_of(chosen: Choices, clients: int) -> Settings:
    """The settings of all runs of the task."""
    return {
        "run.name": "demo-air",
        **chosen.common(clients),
        "sync.trigger": "rounds",
        "sync.min_clients": clients,
        "sync.weighting": "uniform",
        "outer.optimizer": "average",
        "train.task": "own",
        "air.snr_db": SNRS_DB[-1],
    }


def conclude(played: Played, stage: scenario.Stage) -> Conclusion:
    """Simulate the other runs, and sum up."""
    made, audit = played.scenario, played.audit
    stage.say(f"simulating {SITES} sites over the air, digital, and without a channel, to compare")
    rows = measured(made.chosen, stage)
    uses = 0 if audit is None else audit.channel_uses
    wanted, version = made.chosen.rounds, played.state.ps.version
    problems = [
        *played.common_problems(),
        *scenario.failed(
            (version >= wanted, f"{max(version, 0)} of {wanted} rounds were merged"),
            (uses > 0, "no version came over the air"),
            (
                rows["analog"][AT] > max(rows["shares"][AT], rows["turns"][AT]),
                f"digital was ahead of the air at {SNRS_DB[AT]} dB",
            ),
        ),
    ]
    summary: Mapping[str, Any] = {
        "rounds": played.state.ps.rounds,
        "clients": len(made.names),
        "channel_uses": uses,
        "snrs_db": list(SNRS_DB),
        "accuracy": {name: [round(one, 4) for one in found] for name, found in rows.items()},
        **played.counts(),
        "seconds": played.seconds,
        "run_dir": str(made.chosen.run_dir),
    }
    names = {
        "analog": "over the air, all sites at once",
        "shares": "digital, each site a share of the values",
        "turns": "digital, one site a round",
        "none": "no channel, all sites",
    }
    table = [
        f"accuracy of {SITES} simulated sites after {wanted} rounds, at the same channel uses",
        f"{'':42}" + "".join(f"{f'{snr} dB':>8}" for snr in SNRS_DB),
        *(
            f"{name:42}" + "".join(f"{one:8.3f}" for one in rows[key])
            for key, name in names.items()
        ),
        "",
        f"the run: {uses:,} channel uses, in real values",
    ]
    return Conclusion(summary, [*table, *played.last_lines()], problems)


def measured(chosen: Choices, stage: scenario.Stage) -> dict[str, list[float]]:
    """Return accuracies by kind of channel, for each of SNRS_DB."""
    from fsl_async.tools.demo import air_task
    from fsl_async.tools.kept_run import KeptRun
    from fsl_async.tools.sim.settings import TaskSettings
    from fsl_async.tools.sim.simulate import simulate

    def accuracy(channel: str, snr_db: float) -> float:
        stage.check()
        run_dir = chosen.run_dir / "simulated" / f"{channel.rpartition(':')[2]}-{snr_db}"
        settings = {
            **settings_of(chosen, SITES),
            "run.rounds": chosen.rounds,
            "outer.channel": channel,
            "air.snr_db": snr_db,
        }
        config = load(None, scenario.overrides(settings))
        around = TaskSettings(clients=SITES, step_seconds=0.1)
        simulate(air_task.train, config, around, run_dir)
        run = KeptRun(run_dir)
        made = run.load(run.versions()[-1])
        return air_task.accuracy(made.vector) if made is not None else 0.0

    kinds = {"analog": "air"}
    kinds |= {name: f"{air_task.__file__}:{kind}" for name, kind in DIGITAL.items()}
    return {
        **{
            name: [accuracy(channel, snr_db) for snr_db in SNRS_DB]
            for name, channel in kinds.items()
        },
        "none": [accuracy("none", SNRS_DB[0])] * len(SNRS_DB),
    }
