"""A user's own names of ranges: read from TOML with errors that name line and key, and used for labelling."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

import bubblescope as bs
from bubblescope.align import prepare
from bubblescope.errors import UsageError
from bubblescope.ingest import ReadOptions, read
from bubblescope.ingest.usernames import load, parse
from bubblescope.label import user_names
from bubblescope.model import Kind, Lane
from bubblescope.report.build import build
from tests.support.cli_runner import Runner
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

RULES = r"""
# our trainer
[[range]]
name = '^trainer/F/mb(?P<microbatch>\d+)@s(?P<stage>\d+)$'
kind = "forward"

[[range]]
name = '^trainer/B/mb(?P<microbatch>\d+)@s(?P<stage>\d+)$'
kind = "backward"
"""
STYLE = Style(ranges="trainer/{kind}/mb{microbatch}@s{stage}", metadata=False)


def test_the_users_names_label_every_kernel(tmp_path: Path) -> None:
    truth = simulate(Shape())
    write(tmp_path, traces(truth, STYLE))
    run = prepare(read(tmp_path, options=ReadOptions(names=parse(RULES))))
    s = run.spans
    for op in truth.ops:
        rows = (s.rank == op.rank) & (s.lane == Lane.COMPUTE)
        rows &= (s.start_ns >= op.start_ns) & (s.end_ns <= op.end_ns)
        assert set(s.kind[rows].tolist()) == {Kind.FORWARD if op.kind == "F" else Kind.BACKWARD}
        assert set(s.microbatch[rows].tolist()) == {op.microbatch}
        assert set(s.stage[rows].tolist()) == {op.rank}


def test_without_the_file_nothing_is_known_of_the_stages(tmp_path: Path) -> None:
    write(tmp_path, traces(simulate(Shape()), STYLE))
    assert prepare(read(tmp_path)).layout.stages is None


def test_the_users_steps_are_the_steps(tmp_path: Path) -> None:
    documents = traces(simulate(Shape(steps=3)), Style(profiler_step=True))
    for document in documents.values():
        for event in document["traceEvents"]:
            event["name"] = event["name"].replace("ProfilerStep#", "my training step ")
    write(tmp_path, documents)
    names = parse("[[range]]\nname = '^my training step'\nkind = 'step'\n")
    run = read(tmp_path, options=ReadOptions(names=names))
    assert run.layout.inferred["steps"] == "the user's names"
    assert sorted(set(run.spans.step.tolist()) - {-1}) == [0, 1, 2]


def test_the_file_can_be_given_to_load_and_on_the_command_line(tmp_path: Path, bubblescope: Runner) -> None:
    write(tmp_path / "t", traces(simulate(Shape()), STYLE))
    (tmp_path / "names.toml").write_text(RULES)
    assert len(load(tmp_path / "names.toml")) == 2
    report = bs.analyze(bs.load(tmp_path / "t", names=tmp_path / "names.toml"))
    assert report.data["pipeline"]["stages"] == 4
    done = bubblescope("analyze", str(tmp_path / "t"), "--names", str(tmp_path / "names.toml"), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert '"stages": 4' in done.stdout


def test_the_users_kernels_are_communication_or_work(tmp_path: Path) -> None:
    truth = simulate(Shape())
    write(tmp_path, traces(truth, STYLE))
    rules = "[[kernel]]\nname = '^bwd_'\nkind = 'communication'\n\n[[kernel]]\nname = 'SendRecv'\nkind = 'compute'\n"
    rules += "\n[[kernel]]\nname = 'no such'\nkind = 'compute'\n"
    run = read(tmp_path, options=ReadOptions(names=parse(rules)))
    for lane, begins in ((Lane.COMM, "bwd_"), (Lane.COMPUTE, ("fwd_", "nccl"))):
        texts = {run.names[int(i)] for i in run.spans.name[run.spans.lane == lane]}
        assert texts
        assert all(text.startswith(begins) for text in texts)
    (said,) = [n.message for n in run.notices if n.code == "names-unused"]
    assert said == "1 of 3 rules of the names file fit no kernel in the input: 'no such'"


def test_rules_that_call_backwards_forwards_are_not_trusted(tmp_path: Path) -> None:
    """Operations then begin before their input was made."""
    write(tmp_path, traces(simulate(Shape(steps=2, optimizer_ns=300_000)), Style(ranges="{kind}/mb{microbatch}")))
    options = ReadOptions(
        names=parse(r"""[[range]]
name = 'mb(?P<microbatch>\d+)'
kind = 'forward'""")
    )
    data = build(prepare(read(tmp_path, options=options))).data
    assert {"impossible-order", "attribution-not-trusted"} <= {w["code"] for w in data["source"]["warnings"]}
    assert data["replay"]["trusted"] is False
    assert data["advice"] == []


def test_constants_stand_in_for_groups() -> None:
    (rule,) = parse("[[range]]\nname = 'embed'\nkind = 'forward'\nstage = 0\nmicrobatch = 2\n")
    assert (rule.stage, rule.microbatch, rule.chunk) == (0, 2, -1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[range]\n", "not TOML.*line 1"),
        ("ranges = 1\n", "unknown key 'ranges' in line 1"),
        ("", r"no \[\[range\]\] tables"),
        ("[range]\nname = 'x'\n", r"no \[\[range\]\] tables"),
        ("[[range]]\nkind = 'forward'\n", "line 1, key 'name': a regular expression is missing"),
        ("[[range]]\nname = '('\nkind = 'forward'\n", "line 2, key 'name': '\\(' is not a regular expression"),
        ("[[range]]\nname = 'x'\n", "line 1, key 'kind': is missing"),
        ("[[range]]\nname = 'x'\nkind = 'fwd'\n", "line 3, key 'kind': 'fwd' is no kind"),
        ("[[range]]\nname = 'a'\nkind = 'loss'\n\n[[range]]\nname = 'x'\nkind = 3\n", "line 7, key 'kind'"),
        ("[[range]]\nname = 'x'\nkind = ['fwd']\n", "line 3, key 'kind'"),
        ("x = " + "[" * 10_000, "not TOML"),
        ("x = " + "9" * 5_000, "not TOML"),
        ("[[range]]\nname = 'x(?!y)'\nkind = 'forward'\n", r"line 2, key 'name': 'x\(\?!y\)'.*\(\?!"),
        ("[[range]]\nname = 'x'\nkind = 'forward'\nstage = -2\n", "line 4, key 'stage': -2"),
        ("[[range]]\nname = 'x'\nkind = 'forward'\nstage = true\n", "line 4, key 'stage'"),
        ("[[range]]\nname = 'x(?P<mb>1)'\nkind = 'forward'\n", "line 2, key 'name': unknown group 'mb'"),
        ("[[range]]\nname = 'x'\nkind = 'forward'\nstep = 2\n", "line 4, key 'step': no such key"),
        ("[[kernel]]\nname = 'x'\nkind = 'forward'\n", "line 3, key 'kind': 'forward' is no kind"),
        ("[[kernel]]\nname = 'x'\nkind = 'compute'\nstage = 1\n", "line 4, key 'stage': no such key"),
        ("[[kernel]]\nname = 'x(?P<stage>1)'\nkind = 'compute'\n", "line 2, key 'name': unknown group 'stage'"),
        ("kernel = 3\n", r"no \[\[range\]\] tables"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_key(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse(text, "names.toml")
    assert caught.value.where == "names.toml"
    assert caught.value.hint


@pytest.mark.parametrize("command", ["analyze", "diff", "whatif"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"[[range]]\nname = '\xff'\n", "not UTF-8 text in line 2"),
        (b"[[range]\n", "not TOML.*line 1"),
    ],
)
def test_a_names_file_that_cannot_be_used_is_wrong_usage_before_anything_is_read(
    command: str, content: bytes | None, said: str, tmp_path: Path, bubblescope: Runner
) -> None:
    if content is not None:
        (tmp_path / "names.toml").write_bytes(content)
    paths = ["nowhere"] * (2 if command == "diff" else 1)
    done = bubblescope(command, *paths, "--names", "names.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the names file ")
    assert re.search(said, done.stderr)
    assert ", in names.toml\nhint: " in done.stderr


def test_a_rule_that_fits_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path, traces(simulate(Shape()), STYLE))
    more = "[[range]]\nname = '^trainr/L'\nkind = 'loss'\n"
    run = read(tmp_path, options=ReadOptions(names=parse(RULES + more)))
    (notice,) = [n for n in run.notices if n.code == "names-unused"]
    assert notice.message == "1 of 3 rules of the names file fit no range in the input: '^trainr/L'"
    assert "names-unused" not in [n.code for n in read(tmp_path, options=ReadOptions(names=parse(RULES))).notices]


@pytest.mark.parametrize("kind", ["forward", "step"])
def test_a_rule_that_fits_kernels_only_is_said(kind: str, tmp_path: Path) -> None:
    write(tmp_path, traces(simulate(Shape()), STYLE))
    kernel = next(t for t in read(tmp_path).names.texts if "gemm" in t)
    run = read(tmp_path, options=ReadOptions(names=parse(f"[[range]]\nname = '^{kernel}$'\nkind = '{kind}'\n")))
    (notice,) = [n for n in run.notices if n.code == "names-unused"]
    assert notice.message == (
        f"1 of 1 rules of the names file fit no range in the input: '^{kernel}$' (fits other things, such as kernels, "
        "which are not named so)"
    )


@pytest.mark.parametrize("more", ["", "stage = 7\n"])
def test_a_group_that_captures_no_number_is_said_and_leaves_it_unknown(more: str, tmp_path: Path) -> None:
    documents = traces(simulate(Shape()), STYLE)
    for document in documents.values():
        for event in document["traceEvents"]:
            event["name"] = event["name"].replace("@s3", "@s²")
    write(tmp_path, documents)
    names = parse(f"[[range]]\nname = 'F/mb(?P<microbatch>[0-9]+)@s(?P<stage>.+)'\nkind = 'forward'\n{more}")
    run = read(tmp_path, options=ReadOptions(names=names))
    (notice,) = [n for n in run.notices if n.code == "names-no-number"]
    assert notice.message == (
        "the group stage of the rule 'F/mb(?P<microbatch>[0-9]+)@s(?P<stage>.+)' of the names file captures no number "
        "in 8 of the 32 names that the rule fits, such as '²' of 'trainer/F/mb0@s²'; there the stage is not known"
    )
    ((action,),) = [parser("trainer/F/mb5@s²") for parser in user_names.parsers(run)]
    assert (action.stage, action.microbatch) == (-1, 5)


def test_a_group_that_does_not_take_part_leaves_the_number_to_the_rule(tmp_path: Path) -> None:
    write(tmp_path, traces(simulate(Shape()), STYLE))
    names = parse("[[range]]\nname = 'F/mb[0-9]+(@z(?P<stage>[0-9]+))?'\nkind = 'forward'\nstage = 2\n")
    run = read(tmp_path, options=ReadOptions(names=names))
    assert not [n for n in run.notices if n.code.startswith("names-")]
    ((action,),) = [parser("trainer/F/mb5@s1") for parser in user_names.parsers(run)]
    assert action.stage == 2


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_bytes(b"\xef\xbb\xbf" + RULES.encode())
    assert len(load(tmp_path / "names.toml")) == 2


def test_every_command_that_reads_traces_takes_the_file(tmp_path: Path, bubblescope: Runner) -> None:
    write(tmp_path / "t", traces(simulate(Shape()), STYLE))
    (tmp_path / "names.toml").write_text(RULES)
    named = ("--names", "names.toml", "--json", "-")
    changed = json.loads(bubblescope("whatif", "t", *named).stdout)
    assert changed["microbatches"] == Shape().microbatches
    compared = bubblescope("diff", "t", "t", *named)
    assert [s["stage"] for s in json.loads(compared.stdout)["stages"]] == [0, 1, 2, 3], compared.stderr


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)*$", "(.*a){20}$", "([a-z]+)*@"])
def test_no_pattern_can_stop_a_load(pattern: str, tmp_path: Path) -> None:
    """With a backtracking engine each of these needs longer than the age of the universe."""
    documents = traces(simulate(Shape()), STYLE)
    for document in documents.values():
        for event in document["traceEvents"]:
            if event["name"].startswith("trainer/"):
                event["name"] += "a" * 5_000 + "!"
    write(tmp_path, documents)
    names = parse(f"[[range]]\nname = '{pattern}'\nkind = 'forward'\n")
    assert prepare(read(tmp_path, options=ReadOptions(names=names))).layout.stages is None


def test_rules_cross_process_pools_and_take_any_text() -> None:
    (rule,) = pickle.loads(pickle.dumps(parse("[[range]]\nname = 'mb(?P<microbatch>[0-9]+)'\nkind = 'loss'\n")))  # noqa: S301
    assert rule.search("\ud800 mb7")["microbatch"] == "7"
    assert rule.search("mb") is None
