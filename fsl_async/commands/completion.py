"""`fsl-node completion SHELL`: print the script that completes `fsl-node` in a shell.

The completions are click's. Its scripts are replaced by ours, because click's complete one name on
PATH, and a clone's program is called by its path; because click's put a space after `--set
sync.every_s=`; and because bash splits words at `=` and `:`, which only the quoted ones escape.

When Tab is pressed the shell calls the program with `VARIABLE`, which `fsl_async.cli` looks at.
Each line is an answer of the form `KIND,VALUE`: KIND plain (a word), open (a word that is typed
on, without a space), dir or file (the shell completes a path).
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from fsl_async.process.program import NAME

VARIABLE = "_FSL_NODE_COMPLETE"

# `$1` is the program as it was typed, whose ~ the shell has not replaced.
_BASH = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames 2>/dev/null ;;
            file) compopt -o default 2>/dev/null ;;
            open) compopt -o nospace 2>/dev/null ;;
        esac
        case $kind in
            plain | open)
                printf -v value %%q "$value"
                COMPREPLY+=("$value")
                ;;
        esac
    done < <(
        IFS=$'\\n'
        env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
            %(complete_var)s=bash_complete "${1/#\\~/$HOME}" 2>/dev/null
    )
}

complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null ||
    complete -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local line option=${(M)PREFIX#--*=}
    local -a plain open
    for line in "${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT - 1)) \\
        %(complete_var)s=zsh_complete "${words[1]/#\\~/$HOME}" 2>/dev/null)}"; do
        case $line in
            plain,*) plain+=("$option${line#*,}") ;;
            open,*) open+=("$option${line#*,}") ;;
            dir,*) compset -P '--*='; _path_files -/ ;;
            file,*) compset -P '--*='; _path_files ;;
        esac
    done
    (( $#plain )) && compadd -U -V fsl-node -a plain
    (( $#open )) && compadd -U -V fsl-node -S '' -a open
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    set -l typed (commandline -opc)[1]
    set -l program (string replace -r '^~' $HOME -- $typed)
    set -l words (commandline -cp | string collect)
    set -l word (commandline -ct | string collect)
    set -l option (string match -r '^--[^=]*=' -- $word)
    set -l answer (env %(complete_var)s=fish_complete COMP_WORDS="$words" COMP_CWORD="$word" \\
        $program 2>/dev/null)
    for line in $answer
        set -l parts (string split -m 1 , -- $line)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2] | string replace -r '^' -- "$option"
            case file
                __fish_complete_path $parts[2] | string replace -r '^' -- "$option"
            case plain open
                echo "$option$parts[2]"
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


def kind_of(item: CompletionItem[str]) -> str:
    """Return the kind of an answer; see above."""
    is_open = item.type == "plain" and item.value.endswith("=")
    return "open" if is_open else item.type


def joined(words: list[str]) -> tuple[list[str], str, str]:
    """Join the words that bash has split at `=` and `:`.

    words: without the program's name, up to the one with the cursor.
    Returns those before it, itself, and the part of it that bash does not replace.
    """
    made: list[str] = []
    kept, glues = "", False
    for word in words:
        is_break = bool(word) and not word.strip("=:")
        if made and (is_break or glues):
            kept = made[-1] + word if is_break else made[-1]
            made[-1] += word
        else:
            kept = ""
            made.append(word)
        glues = is_break
    return made[:-1], made[-1], kept


def parted(args: list[str], incomplete: str) -> tuple[list[str], str]:
    """Make two words of `--option=value`: click looks at a command's options by the words before.

    Returns the words before the cursor and the one at it.
    """
    option, equals, value = incomplete.partition("=")
    if option.startswith("--") and equals:
        return [*args, option], value
    return args, incomplete


class _Ours(ShellComplete):
    _kept = ""
    """The part of the word at the cursor that the shell does not replace."""

    def source(self) -> str:
        return ShellComplete.source(self)  # click's starts a bash to ask for its version

    def get_completion_args(self) -> tuple[list[str], str]:
        return parted(*super().get_completion_args())

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{kind_of(item)},{item.value.removeprefix(self._kept)}"


@add_completion_class
class _Bash(_Ours, BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = BashComplete.get_completion_args(self)
        args, incomplete, self._kept = joined([*args, incomplete])
        return parted(args, incomplete)


@add_completion_class
class _Zsh(_Ours, ZshComplete):
    source_template = _ZSH


@add_completion_class
class _Fish(_Ours, FishComplete):
    source_template = _FISH

    def format_completion(self, item: CompletionItem[str]) -> str:
        help_ = " ".join((item.help or "").split())
        return super().format_completion(item) + (f"\t{help_}" if help_ else "")


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
_WHERE = {
    "bash": f"echo 'eval \"$({NAME} completion bash)\"' >> ~/.bashrc",
    "zsh": f"echo 'eval \"$({NAME} completion zsh)\"' >> ~/.zshrc, after compinit",
    "fish": f"{NAME} completion fish > ~/.config/fish/completions/{NAME}.fish",
}


@click.command(
    "completion",
    epilog="For good: " + "; ".join(_WHERE.values()),
)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, shell: str, as_json: bool) -> None:
    """Print the script that completes fsl-node in SHELL: eval "$(fsl-node completion bash)".

    It completes commands, options, roles, settings, presets, run directories and paths, of a
    clone's bin/fsl-node too.
    """
    script = _SHELLS[shell](click.Command(NAME), {}, NAME, VARIABLE).source()
    if as_json:
        from fsl_async.commands.output import Output

        Output(as_json=True).result({"shell": shell, "script": script})
    else:
        click.echo(script, nl=False)
