"""`fsl-node export RUN_DIR OUT_DIR`: a version of a run, as a folder for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import RunDir, Whole, WithJson, Words, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError


class ExportOptions(WithJson):
    """The options of `fsl-node export`."""

    run_dir: Path = argument(RunDir())
    out_dir: Path = argument()
    version: int | None = option("Export version N. [default: the newest one]", Whole(min=0), "N")
    merged: bool = option("Write the base with the adapters in its weights.")
    base: Path | None = option(
        "The base model of a run that tuned one: a Hugging Face folder or a GGUF file.",
        metavar="MODEL",
    )
    head: Path | None = option(
        "With --merged: the head that a site of this run keeps (*.head.npz).", metavar="FILE"
    )
    recalibrate: str | None = option(
        "Measure statistics of batch norm anew: FUNCTION() returns (model, batches).",
        Words(files=True), "FILE.py:FUNCTION",
    )  # fmt: skip


@click.command("export")
@takes(ExportOptions)
def command(options: ExportOptions) -> None:
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

    output, out_dir, base = Output(as_json=options.as_json), options.out_dir, options.base
    exports.check_out_dir(out_dir)
    run = KeptRun(with_ledger(options.run_dir))
    if not run.tuning().is_on:
        if options.merged or base is not None:
            raise UsageError("this run tunes no base model: leave out --merged and --base")
        from fsl_async.tools.export_models import write_model, write_recalibrated

        loaded = run.chosen(options.version)
        with exports.new_folder(out_dir) as folder:
            if options.recalibrate is None:
                kind = write_model(folder, run, loaded)
            else:
                kind = write_recalibrated(folder, run, loaded, options.recalibrate)
    elif options.recalibrate is not None:
        raise UsageError("--recalibrate: this run tunes adapters, which have no batch norm")
    elif run.tuning().has_own_head and not options.merged:
        raise UsageError("each site keeps a head of its own: give --merged, --base, --head FILE")
    elif options.merged:
        if base is None:
            raise UsageError("--merged needs --base MODEL, the base that this run tuned")
        from fsl_async.tools.export_models import write_merged

        loaded = run.chosen(options.version)
        with exports.new_folder(out_dir) as folder:
            write_merged(folder, run, loaded, base, options.head)
        kind = "a Hugging Face folder, adapters merged"
    else:
        from fsl_async.learn.tune.base_files import base_facts

        facts = None if base is None else base_facts(base)
        path = None if base is None else str(base.expanduser().resolve())
        loaded = run.chosen(options.version)
        with exports.new_folder(out_dir) as folder:
            exports.write_adapters(folder, run, loaded, facts=facts, base=path)
        kind = "a PEFT folder"
    number = loaded.record.version
    output.answer(
        {"version": number, "folder": str(out_dir), "kind": kind},
        f"version {number} is in {out_dir}: {kind}",
    )
