"""The user's own range names, from a file of regular expressions (``--names FILE``)."""

from __future__ import annotations

from bubblescope.ingest.options import NameRule
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
            value = named.get(field)
            return int(value) if value is not None and value.isdigit() and len(value) < 10 else otherwise

        return (
            RangeAction(
                rule.kind,
                stage=number("stage", rule.stage),
                microbatch=number("microbatch", rule.microbatch),
                chunk=number("chunk", rule.chunk),
            ),
        )

    return parse
