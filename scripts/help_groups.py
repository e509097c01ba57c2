"""Help of commands with many options, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings.

    groups: heading -> names of parameters, in order. Those that no group has come last, as "Other options".
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        for heading, names in self.groups.items():
            self._write(formatter, heading, [records.pop(name) for name in names if name in records])
        self._write(formatter, "Other options", list(records.values()))

    @staticmethod
    def _write(formatter: click.HelpFormatter, heading: str, lines: list[tuple[str, str]]) -> None:
        if lines:
            with formatter.section(heading):
                formatter.write_dl(lines)


class OrderedGroup(click.Group):
    """A group whose help lists commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)
