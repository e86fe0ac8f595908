"""`fsl-node audit`: what a server could read of a site's records, before the site joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fsl_async.commands.client import check_base, check_columns, check_data
from fsl_async.commands.options import Finite, Options, Setting, Whole, Words, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError

EXCEEDED = 3
"""The exit code where a limit of the site is exceeded."""


class AuditOptions(Options):
    """The options of `fsl-node audit`."""

    base: Path = option("The base model, as of --role client.", metavar="MODEL", required=True)
    data: str = option(
        "Your records, as of --role client.", Words(files=True), "PATH", required=True
    )
    config: Path | None = option("The run's configuration file, if you have it.", metavar="FILE")
    sets: tuple[str, ...] = option(
        "A setting of the run, such as tune.objective=classify.", Setting(), "TABLE.KEY=VALUE",
        name="--set",
    )  # fmt: skip
    rank: int | None = option("Rank of your adapters. [default: tune.rank]", Whole(1, 4096), "R")
    steps: int | None = option("Steps in a round. [default: tune.steps]", Whole(1, 1 << 20))
    batch: int | None = option("Records in a step. [default: train.batch]", Whole(1, 1 << 20))
    rule: str | None = option("How adapters are merged. [default: tune.rule]", metavar="RULE")
    bits: float | None = option(
        "Bits a value of a delta, 1.5 to 8. [default: by codec.up_step]", Finite(1.5, 8)
    )
    order: str | None = option("[default: first]", Words("first", "zeroth"))
    layers: str = option("Blocks whose adapters train, as of --role client.", default="")
    columns: str | None = option("Columns of the records, as of --role client.")
    records: int = option("Use at most so many records.", Whole(4, 1 << 20), default=200)
    trains_on: bool = option(
        "Also train ten rounds, with planted codes, and attack the model.", name="--long"
    )
    keys: Path | None = option("The folder with site.toml. [default: that of the keys]")
    html: Path | None = option("Write a page.", metavar="FILE")
    as_json: bool = option("Print one JSON object.", name="--json")


@click.command("audit")
@takes(AuditOptions)
def command(options: AuditOptions) -> int:
    """Read your own records from the delta that you would send, as the server could.

    Nothing leaves this machine. Trains a round on your records by the run's settings, attacks the
    delta, and prints the worst record beside what was read of it, the share of words, the same with
    other settings, whether one can tell that a record was in your data, and a bound if there is
    one. What is not found is not found by these attacks; it is not safe for that. Exit code 3:
    site.toml has a lower limit ([audit] words, auc).
    """
    from fsl_async.keys.folder import KeysFolder, audit_limits

    folder = KeysFolder() if options.keys is None else KeysFolder(options.keys.expanduser())
    limits = audit_limits(folder)
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise UsageError(f"--html {options.html}: there is no such folder")
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html {options.html} is a folder: name a file")
    config = _config(options)
    if not config.tune.is_on:
        raise UsageError(
            "this run tunes no base model (tune.method = none), and the audit is for fine-tuning:"
            " --order first audits its records as if it did"
        )
    base, data = str(check_base(options.base)), check_data(options.data)
    columns = check_columns(options.columns, has_base=True)
    output = Output(as_json=options.as_json)
    if config.tune.method == "zeroth":
        count = config.tune.zo_steps * config.tune.zo_probes
        output.answer(
            {"event": "audit", "scalars": count},
            f"a round of zeroth order sends {count} numbers; no attack here reads records from"
            " them, which is no bound (docs/SECURITY.md)",
        )
        return 0
    from fsl_async.tools.audit.audit import Audit
    from fsl_async.tools.audit.report import as_json, beyond, page, text
    from fsl_async.tools.audit.site_round import SiteRounds

    def make(of: Any) -> SiteRounds:
        return SiteRounds(
            of, base, data, columns=columns, layers=options.layers, records=options.records
        )

    say = Output(as_json=True).say  # on standard error
    found = Audit(config, make, say, trains_on=options.trains_on).run()
    exceeded = beyond(found, limits)
    if options.html is not None:
        options.html.write_text(page(found, f"What a server reads of {Path(data).name}"))
    if config.tune.secure:
        output.warn(
            "this run sums updates under masks: its server reads sums of three or more sites, and"
            " the report is of this site's update alone"
        )
    output.answer(as_json(found, exceeded), *text(found))
    for line in exceeded:
        output.warn(line)
    return EXCEEDED if exceeded else 0


def _config(options: AuditOptions) -> Any:
    """The run's configuration. Raises ConfigError and UsageError."""
    from fsl_async.config.load import load
    from fsl_async.config.recipes import with_implied

    given = {
        "tune.rank": options.rank,
        "tune.steps": options.steps,
        "train.batch": options.batch,
        "tune.rule": options.rule,
        "tune.method": {"first": "lora", "zeroth": "zeroth"}.get(options.order or ""),
        # With a Gaussian's entropy: a step of one root mean square takes 2.1 bits.
        "codec.up_step": None if options.bits is None else f"{2 ** (2.1 - options.bits):.3f}",
    }
    sets = [f"{key}={value}" for key, value in given.items() if value is not None]
    usual = ["train.warmup_steps=0", "train.schedule=constant", "sync.trigger=rounds"]
    if options.config is None and not options.order:
        usual.append("tune.method=lora")
    return with_implied(load(options.config, [*usual, *options.sets, *sets]))
