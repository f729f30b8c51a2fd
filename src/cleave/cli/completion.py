"""`cleave completion`: print a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Final, cast

from cleave.cli.arguments import AddVerb

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_INSTALL: Final = """\
to install it:
  bash  with the package bash-completion:
          mkdir -p ~/.local/share/bash-completion/completions
          cd ~/.local/share/bash-completion/completions
          cleave completion bash > cleave
        without it, in ~/.bashrc:
          eval "$(cleave completion bash)"
  zsh     mkdir -p ~/.zfunc
          cleave completion zsh > ~/.zfunc/_cleave
        and in ~/.zshrc, before compinit:
          fpath=(~/.zfunc $fpath)
          autoload -U compinit; compinit
  fish    mkdir -p ~/.config/fish/completions
          cleave completion fish > ~/.config/fish/completions/cleave.fish
  tcsh    cleave completion tcsh > ~/.cleave-completion.csh
        and in ~/.tcshrc:
          source ~/.cleave-completion.csh

Then open a new shell. Do the same again after an upgrade of Cleave."""

_RUNS: Final = {  # names of runs; where that is not possible, directories
    "bash": "_cleave_runs",
    "zsh": "_files -/ -W ${CLEAVE_HOME:-$HOME/.cleave}/runs",
    "fish": "(command ls (set -q CLEAVE_HOME; and echo $CLEAVE_HOME; or echo ~/.cleave)/runs 2>/dev/null)",
    "tcsh": "d",
}
_BASH_RUNS: Final = """\
_cleave_runs() {
  compgen -W "$(command ls "${CLEAVE_HOME:-$HOME/.cleave}/runs" 2>/dev/null)" -- "$1"
  compgen -d -- "$1"
}
"""


def add_to(add: AddVerb, parser: argparse.ArgumentParser) -> None:
    """Add the verb; `parser` is the parser of the whole command, with every verb that should be completed."""
    verb = add(
        "completion",
        help="print a script for shell completion",
        description="Print a script that lets the Tab key complete commands, options and file names.",
    )
    verb.epilog = _INSTALL
    verb.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

    def run(options: argparse.Namespace) -> None:
        run_completion(parser, options.shell)

    verb.set_defaults(run=run)


def run_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    import shtab

    kinds = {"files": shtab.FILE, "directories": shtab.DIRECTORY, "runs": _RUNS}
    for action in _actions(parser):
        if (kind := _completes(action.metavar)) is not None:
            action.complete = kinds[kind]  # pyright: ignore[reportAttributeAccessIssue]
    script = shtab.complete(parser, shell=shell, preamble=_BASH_RUNS if shell == "bash" else "")
    sys.stdout.write(script + "\n")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of all verbs below it; a verb's description becomes its one line of help."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            verbs = cast("dict[str, argparse.ArgumentParser]", action.choices)
            for listed in action._choices_actions:  # pyright: ignore[reportPrivateUsage]
                verbs[listed.dest].description = listed.help
                yield from _actions(verbs[listed.dest])
        else:
            yield action


def _completes(metavar: object) -> str | None:
    """Tell from its placeholder what an argument takes: FILE, PATH, FLEET.csv and DIR are names on disk."""
    if not isinstance(metavar, str):
        return None
    words = set(metavar.replace("|", " ").replace("_", " ").split())
    if {"FILE", "PATH"} & words or any("." in word.strip(".") for word in words):
        return "files"
    if "DIR" in words:
        return "directories"
    return "runs" if words == {"RUN"} else None
