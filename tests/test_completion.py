"""Shell completion, asked in real shells: what the Tab key would offer."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from cleave.cli.completion import SHELLS
from cleave.cli.main import main

VERBS = {"train", "join", "token", "runs", "plan", "fleet", "emulate", "probe", "bench", "completion"}


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def ask(shell: str, program: str, home: Path) -> set[str]:
    """Run a program in a shell, in an empty home, and return the words it prints."""
    command = shutil.which(shell) or pytest.skip(f"there is no {shell} here")
    environment = {**os.environ, "HOME": str(home), "CLEAVE_HOME": str(home / "cleave"), "LC_ALL": "C"}
    flags = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "tcsh": ["-f"], "fish": ["--no-config"]}[shell]
    ended = subprocess.run(
        [command, *flags, "-c", program],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == ""
    return set(ended.stdout.split())


def offered_by_bash(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    program = "\n".join(
        [
            "shopt -s progcomp",
            script("bash", capsys),
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}",
            f"COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}",
            "complete -p cleave > /dev/null || exit 1",
            'function=$(complete -p cleave | sed "s/.*-F \\([^ ]*\\).*/\\1/")',
            f"$function cleave {shlex.quote(words[-1])} {shlex.quote(words[-2])}",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
    )
    return ask("bash", program, home)


def offered_by_fish(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    program = (
        f"{script('fish', capsys)}\ncomplete --do-complete {shlex.quote(line)} | string split --fields 1 \\t; or true"
    )
    return ask("fish", program, home)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "fleet.csv").touch()
    (tmp_path / "cleave" / "runs" / "20260131-142500").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("offered", [offered_by_bash, offered_by_fish])
def test_the_tab_key_completes_verbs_options_choices_files_and_runs(
    offered: object, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(offered)
    assert offered("cleave tr", home, capsys) == {"train"}
    assert offered("cleave ", home, capsys) >= VERBS
    assert "--model" in offered("cleave train --mo", home, capsys)
    assert offered("cleave runs ", home, capsys) >= {"list", "show", "remove"}
    assert {"bf16", "fp32"} <= offered("cleave train --wire ", home, capsys)
    assert "fleet.csv" in offered("cleave plan --fleet fl", home, capsys)
    assert "fleet.csv" in offered("cleave fleet show fl", home, capsys)
    assert {word.rstrip("/") for word in offered("cleave train --out te", home, capsys)} == {"texts"}
    assert "20260131-142500" in offered("cleave runs show 2026", home, capsys)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_accepts_its_script(shell: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "_cleave").write_text(script(shell, capsys))
    registered = {
        "bash": "source ./_cleave; complete -p cleave",
        "zsh": "fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; zsh -n _cleave; print -r $_comps[cleave]",
        "fish": "source ./_cleave; complete -c cleave",
        "tcsh": "source ./_cleave; complete",
    }
    assert any("cleave" in word for word in ask(shell, registered[shell], home))


def test_help_tells_how_to_install_it_in_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "--help"])
    text = capsys.readouterr().out
    assert all(f"cleave completion {shell}" in text for shell in SHELLS)
    assert max(map(len, text.splitlines())) <= 80


def test_an_unknown_shell_gives_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "command.com"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
