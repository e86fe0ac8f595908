"""`demo air`: sites whose deltas a simulated radio channel adds up, beside digital sending.

1  a parameter server and the clients tune a head by rounds over the air; one client gets SIGKILL
   at a third of them, is launched again and catches up
2  the same task is simulated with 20 sites (`fsl_async.tools.sim`): over the air and digital, at
   0, 10 and 20 dB with the same uses of the channel, and without a channel
"""

from attrs import evolve

from fsl_async.config.load import load
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.scenario import Choices, Conclusion, Played, Scenario, Settings

SNRS_DB, SITES, LIMIT_S = (0, 10, 20), 20, 600.0
AIR, DIGITAL, NONE = "over the air", "digital", "no channel"


def air(chosen: Choices) -> Scenario:
    """The demo. It ends after its rounds, when the killed client trains again."""
    from fsl_async.tools.demo.air_task import __file__ as task

    names = scenario.names_of(chosen.clients or 3)
    victim, kill_at = scenario.victim_of(names), max(1, chosen.rounds // 3)
    chosen = evolve(chosen, run_dir=chosen.run_dir.resolve())
    settings = settings_of(chosen, len(names), "air", SNRS_DB[-1])

    def client(name: str) -> scenario.Node:
        return scenario.client(name, chosen.run_dir, "deltas,metrics", "--task", f"{task}:train")

    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[scenario.server(chosen, settings), *map(client, names)],
        **scenario.by_rounds(chosen, victim, kill_at, LIMIT_S),
        introduction=[
            "the radio channel is simulated: no radio, no synchronization, no pilots",
            f"{counted(len(names), 'client')} tell English from Python, at {SNRS_DB[-1]} dB",
            f"{chosen.rounds} rounds; {victim} gets SIGKILL at version {kill_at}, and catches up",
            f"files and logs: {chosen.run_dir}",
            "",
        ],
        conclude=conclude,
    )


def settings_of(chosen: Choices, clients: int, channel: str, snr_db: float) -> Settings:
    """The settings of a run of the task."""
    return {
        "run.name": "demo-air",
        **chosen.common(clients),
        "sync.trigger": "rounds",
        "sync.min_clients": clients,
        "sync.weighting": "uniform",
        "outer.optimizer": "average",
        "outer.channel": channel,
        "train.task": "own",
        "air.snr_db": snr_db,
    }


def conclude(played: Played, stage: scenario.Stage) -> Conclusion:
    """Simulate the other runs, and sum up."""
    chosen, audit, version = played.scenario.chosen, played.audit, played.state.ps.version
    stage.say(f"simulating {SITES} sites over the air, digital, and without a channel, to compare")
    rows, uses = measured(chosen, stage), 0 if audit is None else audit.channel_uses
    problems = [
        *played.common_problems(),
        *scenario.failed(
            (version >= chosen.rounds, f"{version} of {chosen.rounds} rounds were merged"),
            (uses > 0, "no version came over the air"),
            (rows[AIR][1] > rows[DIGITAL][1], f"digital was ahead of the air at {SNRS_DB[1]} dB"),
        ),
    ]
    summary = {
        "rounds": played.state.ps.rounds,
        "clients": len(played.scenario.names),
        "channel_uses": uses,
        "snrs_db": list(SNRS_DB),
        "accuracy": rows,
        **played.counts(),
        "seconds": played.seconds,
        "run_dir": str(chosen.run_dir),
    }
    lines = [
        f"accuracy of {SITES} simulated sites after {chosen.rounds} rounds, at equal channel uses",
        f"{'':14}" + "".join(f"{f'{snr} dB':>8}" for snr in SNRS_DB),
        *(f"{name:14}" + "".join(f"{one:8.3f}" for one in row) for name, row in rows.items()),
        "",
        f"the run: {uses:,} channel uses, in real values",
        *played.last_lines(),
    ]
    return Conclusion(summary, lines, problems)


def measured(chosen: Choices, stage: scenario.Stage) -> dict[str, list[float]]:
    """Return accuracies by kind of channel, at each of SNRS_DB."""
    from fsl_async.tools.demo import air_task
    from fsl_async.tools.kept_run import KeptRun
    from fsl_async.tools.sim.settings import TaskSettings
    from fsl_async.tools.sim.simulate import simulate

    def accuracy(name: str, channel: str, snr_db: int) -> float:
        stage.check()
        run_dir = chosen.run_dir / "simulated" / f"{name} {snr_db} dB".replace(" ", "-")
        settings = {**settings_of(chosen, SITES, channel, snr_db), "run.rounds": chosen.rounds}
        config = load(None, scenario.overrides(settings))
        simulate(air_task.train, config, TaskSettings(clients=SITES, step_seconds=0.1), run_dir)
        run = KeptRun(run_dir)
        made = run.load(run.versions()[-1])
        return round(air_task.accuracy(made.vector), 4) if made is not None else 0.0

    channels = {AIR: "air", DIGITAL: f"{air_task.__file__}:Digital"}
    rows = {
        name: [accuracy(name, channel, snr_db) for snr_db in SNRS_DB]
        for name, channel in channels.items()
    }
    return rows | {NONE: [accuracy(NONE, "none", 0)] * len(SNRS_DB)}
