"""The harness runs blocks as a reader would, and fails where a reader would."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.docs.pages import parse_page
from tests.docs.runner import Runner


def run(directory: Path, text: str) -> list[str]:
    return Runner(parse_page("page.md", text), directory).run()


def sh(code: str) -> str:
    return f"```sh\n{code}\n```\n"


def python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def test_blocks_share_directory_and_environment(tmp_path: Path) -> None:
    text = sh("mkdir 'a place' && cd 'a place'\nexport WORD='two words'") + sh('echo "$WORD" > word.txt')
    text += python("import os, pathlib\nprint(os.environ['WORD'], pathlib.Path('word.txt').read_text())")
    assert run(tmp_path, text)[-1].split() == ["two", "words", "two", "words"]


def test_the_port_is_free_and_the_same_in_all_blocks(tmp_path: Path) -> None:
    first, second = run(tmp_path, sh("echo 0.0.0.0:7077") + sh("echo 0.0.0.0:7077"))
    assert first == second
    assert "7077" not in first


def test_a_failing_block_fails_the_page_and_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md, line 5: the block ended with exit code 3"):
        run(tmp_path, sh("true") + sh("exit 3"))


@pytest.mark.parametrize("code", ["false\ntrue", "false | true", "cleave frobnicate", "no-such-command; true"])
def test_any_failing_line_fails_a_shell_block(tmp_path: Path, code: str) -> None:
    with pytest.raises(AssertionError, match="exit code"):
        run(tmp_path, sh(code))


def test_a_continued_block_knows_the_names_of_the_one_before_and_tracebacks_name_lines_of_the_page(
    tmp_path: Path,
) -> None:
    chain = python("x = 20") + "<!-- run: continued -->\n" + python("print(x + 22)")
    assert run(tmp_path / "well", chain) == ["42\n"]
    with pytest.raises(AssertionError, match="line 9, in <module>"):
        run(tmp_path / "badly", python("x = 20") + "prose\n\n<!-- run: continued -->\n\n" + python("print(1 / 0)"))
    with pytest.raises(AssertionError, match="NameError"):
        run(tmp_path / "apart", python("x = 20") + python("print(x)"))


def test_a_long_command_is_interrupted_once_it_has_shown_its_text(tmp_path: Path) -> None:
    code = python("import time\nprint('here we go')\ntime.sleep(1000)")
    started = time.monotonic()
    (said,) = run(tmp_path, '<!-- run: until "here we go" -->\n' + code)
    assert said.startswith("here we go")
    assert time.monotonic() - started < 500


def test_a_command_that_ends_without_its_text_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended without 'ready'"):
        run(tmp_path, '<!-- run: background until "ready" -->\n' + sh("echo steady"))


def test_a_background_command_runs_until_its_section_ends(tmp_path: Path) -> None:
    server = '<!-- run: background until "up" -->\n' + sh("trap 'rm alive' EXIT\ntouch alive\necho up\nsleep 1000")
    run(tmp_path, server + sh("test -e alive") + "## Next\n" + sh("test ! -e alive"))


def test_a_command_that_fails_in_the_background_fails_the_page(tmp_path: Path) -> None:
    server = '<!-- run: background until "up" -->\n' + sh("echo up\nexit 4")
    with pytest.raises(AssertionError, match=r"page\.md, line 3"):
        run(tmp_path, server + sh("sleep 2"))


def test_pip_install_fails_if_an_extra_or_a_requirement_is_missing(tmp_path: Path) -> None:
    assert "Would install cleave" in run(tmp_path / "sound", sh("pip install '.[train]'"))[0]
    for number, wanted in enumerate(("'.[brain]'", "no-such-distribution-of-cleave", "./nowhere")):
        with pytest.raises(AssertionError, match="exit code 1"):
            run(tmp_path / str(number), sh(f"pip install {wanted}"))


def test_a_new_environment_can_be_activated(tmp_path: Path) -> None:
    (said,) = run(tmp_path, sh("python3 -m venv mine\n. mine/bin/activate\ncleave --version"))
    assert said.startswith("cleave ")
