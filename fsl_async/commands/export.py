"""`fsl-node export RUN_DIR OUT_DIR`: a version of a run, as a folder for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import RunDir, Whole, Words
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError


@click.command("export")
@click.argument("run_dir", type=RunDir())
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option(
    "--version", type=Whole(min=0), metavar="N",
    help="Export version N. [default: the newest one]",
)  # fmt: skip
@click.option("--merged", is_flag=True, help="Write the base with the adapters in its weights.")
@click.option(
    "--base", type=click.Path(path_type=Path), metavar="MODEL",
    help="The base model of a run that tuned one: a Hugging Face folder or a GGUF file.",
)  # fmt: skip
@click.option(
    "--recalibrate", type=Words(files=True), metavar="FILE.py:FUNCTION",
    help="Measure statistics of batch norm anew: FUNCTION() returns (model, batches).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    run_dir: Path,
    out_dir: Path,
    version: int | None,
    merged: bool,
    base: Path | None,
    recalibrate: str | None,
    as_json: bool,
) -> None:
    """Write a version of the run in RUN_DIR, running or not, to the new folder OUT_DIR.

    A run that tuned a base model gives a PEFT folder (peft.PeftModel.from_pretrained) or, with
    --merged and --base, a complete Hugging Face folder. Other runs give a Hugging Face folder where
    transformers has the model, as it has the built-in GPT; else tensors by name, in
    model.safetensors. With --recalibrate these have the statistics of batch norm that your model
    has on your batches with the version's weights. The weights of each kept version are a
    safetensors file already: RUN_DIR/checkpoints/vN/weights.safetensors.
    """
    from fsl_async.observe.node_folders import with_ledger
    from fsl_async.tools import exports
    from fsl_async.tools.kept_run import KeptRun

    output = Output(as_json=as_json)
    exports.check_out_dir(out_dir)
    run = KeptRun(with_ledger(run_dir))
    if not run.tuning().is_on:
        if merged or base is not None:
            raise UsageError("this run tunes no base model: leave out --merged and --base")
        from fsl_async.tools.export_models import write_model, write_recalibrated

        loaded = run.chosen(version)
        with exports.new_folder(out_dir) as folder:
            if recalibrate is None:
                kind = write_model(folder, run, loaded)
            else:
                kind = write_recalibrated(folder, run, loaded, recalibrate)
    elif recalibrate is not None:
        raise UsageError("--recalibrate: this run tunes adapters, which have no batch norm")
    elif merged:
        if base is None:
            raise UsageError("--merged needs --base MODEL, the base that this run tuned")
        from fsl_async.tools.export_models import write_merged

        loaded = run.chosen(version)
        with exports.new_folder(out_dir) as folder:
            write_merged(folder, run, loaded, base)
        kind = "a Hugging Face folder, adapters merged"
    else:
        from fsl_async.learn.tune.base_files import base_facts

        facts = None if base is None else base_facts(base)
        path = None if base is None else str(base.expanduser().resolve())
        loaded = run.chosen(version)
        with exports.new_folder(out_dir) as folder:
            exports.write_adapters(folder, run, loaded, facts=facts, base=path)
        kind = "a PEFT folder"
    if output.as_json:
        output.result({"version": loaded.record.version, "folder": str(out_dir), "kind": kind})
    else:
        output.say(f"version {loaded.record.version} is in {out_dir}: {kind}")
