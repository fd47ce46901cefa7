"""The README's commands exist as they are written, and its first two are the ones promised."""

import re
import shlex
from pathlib import Path

import click
import pytest

from llmcompress import cli

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.strip().splitlines()]


def test_opens_with_one_command_to_use_it_and_one_to_test_it():
    use, test = COMMANDS[:2]
    assert use.endswith("&& llmcompress quickstart") and "pip install" in use
    assert test.endswith("&& pytest") and "-e '.[dev]'" in test
    ci = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    assert ci.rstrip().splitlines()[-1] == test.rpartition("&& ")[2]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("llmcompress ")])
def test_every_command_parses(line):
    _, name, *arguments = shlex.split(line)
    command = cli.main.commands[name]
    with click.Context(command) as context:
        command.parse_args(context, arguments)


def test_every_named_option_exists():
    known = {
        flag for command in cli.main.commands.values() for p in command.params for flag in p.opts + p.secondary_opts
    }
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert named <= known, named - known


def test_python_examples_compile_and_use_names_that_exist():
    import llmcompress

    for kind, block in BLOCKS:
        if kind == "python":
            compile(block, "README.md", "exec")
            for name in re.findall(r"llmcompress\.(\w+)", block):
                assert hasattr(llmcompress, name), name


def test_every_method_has_a_row():
    from llmcompress import methods

    for name in methods.MODULES:
        assert f"| `{name}` |" in README
