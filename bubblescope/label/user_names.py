"""The user's own range names, from a file of regular expressions (``--names FILE``)."""

from __future__ import annotations

from bubblescope.ingest.options import NameRule
from bubblescope.ingest.usernames import number as number_in
from bubblescope.label.actions import Parser, RangeAction
from bubblescope.model import Run


def parsers(run: Run) -> list[Parser]:
    """The rules that came with the run, in the user's order; none without a file."""
    rules: tuple[NameRule, ...] = run.source.details.get("names", ())
    return [_parser(rule) for rule in rules]


def _parser(rule: NameRule) -> Parser:
    def parse(text: str) -> tuple[RangeAction, ...]:
        found = rule.search(text)
        if found is None or rule.kind is None:
            return ()
        named = found.groupdict()

        def number(field: str, otherwise: int) -> int:
            if (captured := named.get(field)) is None:
                return otherwise
            value = number_in(captured)
            return -1 if value is None else value

        return (
            RangeAction(
                rule.kind,
                stage=number("stage", rule.stage),
                microbatch=number("microbatch", rule.microbatch),
                chunk=number("chunk", rule.chunk),
            ),
        )

    return parse
