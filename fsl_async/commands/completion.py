"""`fsl-node completion SHELL`: print the script that completes `fsl-node` in a shell.

Scripts and answers are click's, with these changes. The shell calls the program as it was typed,
since a clone's is called by its path. No space follows `--set sync.every_s=`. In bash, words that
it splits at `=` and `:` are joined, and names with spaces are quoted. Of `--role=ps` the option is
a word of its own, by which `fsl_async.cli` finds a node's command.

When Tab is pressed the shell calls the program with `VARIABLE`, which `fsl_async.cli` looks at.
"""

from __future__ import annotations

import re

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from fsl_async.errors import PROGRAM

VARIABLE = "_FSL_NODE_COMPLETE"


def parted(args: list[str], word: str) -> tuple[list[str], str, str]:
    """Return the words before the cursor, the one at it, and "--option=" where that was before."""
    option, equals, value = word.partition("=")
    if option.startswith("--") and equals:
        return [*args, option], value, option + equals
    return args, word, ""


@add_completion_class
class _Bash(BashComplete):
    source_template = (
        BashComplete.source_template.replace("complete $1)", 'complete "${1/#\\~/$HOME}")')
        .replace("+=($value)", '+=("$(printf %%q "$value")")')
        .replace(
            "    return 0", "    [[ ${COMPREPLY-} == *= ]] && compopt -o nospace\n    return 0"
        )
    )
    _kept = ""
    """The part of the joined word that bash does not replace."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, word = super().get_completion_args()
        *args, joined = re.sub(r"\n([=:]+)\n?", r"\1", "\n".join([*args, word])).split("\n")
        self._kept = joined.removesuffix(word) if word.strip("=:") else joined
        return parted(args, joined)[:2]

    def format_completion(self, item: CompletionItem[str]) -> str:
        item.value = item.value.removeprefix(self._kept)
        return super().format_completion(item)


class _Prefixed(ShellComplete):
    _option = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, word, self._option = parted(*super().get_completion_args())
        return args, word

    def format_completion(self, item: CompletionItem[str]) -> str:
        item.value = self._option + item.value
        return super().format_completion(item)


@add_completion_class
class _Zsh(_Prefixed, ZshComplete):
    source_template = (
        ZshComplete.source_template.replace("(( ! $+commands[%(prog_name)s] ))", "false")
        .replace("zsh_complete %(prog_name)s", 'zsh_complete "${words[1]/#\\~/$HOME}"')
        .replace("compadd -U", '[[ $completions[1] == *= ]] && end=(-S "")\n'
                 '        compadd "${end[@]}" -U')
        .replace("    local -a response", "    local -a response end")
    )  # fmt: skip


@add_completion_class
class _Fish(_Prefixed, FishComplete):
    source_template = FishComplete.source_template.replace(
        "(commandline -t) %(prog_name)s",
        "(commandline -t) (string replace -r '^~' $HOME -- (commandline -opc)[1])",
    )


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
_WHERE = {
    "bash": f"echo 'eval \"$({PROGRAM} completion bash)\"' >> ~/.bashrc",
    "zsh": f"echo 'eval \"$({PROGRAM} completion zsh)\"' >> ~/.zshrc, after compinit",
    "fish": f"{PROGRAM} completion fish > ~/.config/fish/completions/{PROGRAM}.fish",
}


@click.command("completion", epilog="For good: " + "; ".join(_WHERE.values()))
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, shell: str, as_json: bool) -> None:
    """Print the script that completes fsl-node in SHELL: eval "$(fsl-node completion bash)".

    It completes commands, options, roles, settings, presets, run directories and paths, of a
    clone's bin/fsl-node too.
    """
    script = _SHELLS[shell](click.Command(PROGRAM), {}, PROGRAM, VARIABLE).source()
    if as_json:
        from fsl_async.commands.output import Output

        Output(as_json=True).result({"shell": shell, "script": script})
    else:
        click.echo(script, nl=False)
