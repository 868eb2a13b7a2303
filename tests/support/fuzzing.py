"""Mutated files of every format, the same ones for the same number, and what reading one must come to."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bubblescope.align import prepare
from bubblescope.errors import BubblescopeError
from bubblescope.ingest import read, usernames
from bubblescope.report.build import build
from tests.support import nsys_gen, recordings
from tests.support.kineto_gen import Shape, Style, Truth, dumps, simulate, traces

SMALL = Shape(stages=2, scale=(1.0, 1.2), microbatches=2, kernels=(2, 2), steps=2)
ODD = [0, -1, 1 << 62, 1 << 64, 1 << 70, 1e308, -1e308, None, "", "x" * 300, [], {}, True, "\x00", "٣", "NaN"]
TOKENS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\x00", b"\xff\xfe", b"1e999", b"NaN", b"-", b"null"]


@dataclass(frozen=True)
class Seed:
    """A sound file: its name, and its bytes; `beside`: sound files of the same job."""

    name: str
    data: bytes
    beside: tuple[tuple[str, bytes], ...] = ()


def operation_marks(truth: Truth) -> bytes:
    """As MegatronApp writes them."""
    out: list[dict[str, Any]] = []
    for o in truth.ops:
        name = "forward" if o.kind == "F" else "backward"
        common = {"name": name, "pid": o.rank, "tid": 0}
        out.append({**common, "ph": "B", "ts": o.start_ns // 1000, "args": {"iteration": o.step}})
        args = {"iteration": o.step, "microbatch": o.microbatch, "model_chunk": 0, "pp_rank": o.rank}
        out.append({**common, "ph": "E", "ts": o.end_ns // 1000, "args": args})
    return json.dumps(out).encode()


def operation_records(truth: Truth) -> bytes:
    """As ndtimeline writes them."""
    names = {"F": "forward-compute", "B": "backward-compute"}
    return json.dumps([
        {"name": names[o.kind], "pid": 0, "tid": o.rank * 10, "ph": "X", "ts": o.start_ns / 1000,
         "dur": (o.end_ns - o.start_ns) / 1000, "args": {"rank": o.rank, "step": o.step, "tp": 0, "pp": o.rank}}
        for o in truth.ops
    ]).encode()  # fmt: skip


def timer_log() -> bytes:
    """As Megatron writes it with ``--timing-log-option all``."""
    lines = []
    for n in (5, 6):
        lines += [f" iteration {n}/ 100 | elapsed time per iteration (ms): 100.0 |", "times across ranks (ms):"]
        for timer in ("forward-compute", "backward-compute", "optimizer"):
            lines += [f"  {timer}:", "     rank  0: 20.00", "     rank  1: 30.00"]
    return "\n".join(lines).encode()


def recorded() -> bytes:
    """One rank of a recording."""
    rows = [
        {"kind": kind, "microbatch": m, "start_ns": at * 1000, "end_ns": at * 1000 + 900}
        for at, (kind, m) in enumerate([("F", 0), ("F", 1), ("B", 0), ("B", 1)])
    ]
    lines = [recordings.header(), recordings.layout(microbatches=2)]
    return recordings.text(*lines, *(recordings.step(n, rows) for n in range(3)), recordings.end())


NAMES = b"[[range]]\nname = 'fwd(?P<microbatch>[0-9]+)'\nkind = 'forward'\nstage = 1\n"


@cache
def seeds(folder: Path) -> tuple[Seed, ...]:
    """One sound file of every format and packing. `folder`: where the SQLite export is made."""
    truth = simulate(SMALL)
    out = []
    for i, style in enumerate((Style(), Style(launches=True, autograd=True), Style(ranges="zero bubble"))):
        documents = traces(truth, style)
        texts = [dumps(documents[r], compact=bool(i % 2)).encode() for r in (0, 1)]
        out.append(Seed("rank0.json", texts[0], (("rank1.json", texts[1]),)))
        out.append(Seed("rank0.json.gz", gzip.compress(texts[0], 1, mtime=0), (("rank1.json", texts[1]),)))
        out.append(Seed("rank0.json", json.dumps(documents[0]["traceEvents"]).encode()))
    (folder / "seed.sqlite").unlink(missing_ok=True)  # of a process that ended in a failure
    export = nsys_gen.write(folder / "seed.sqlite", traces(truth, Style(launches=True, ranges="runtime")))
    out.append(Seed("job.sqlite", export.read_bytes()))
    out.append(Seed("marks.json", operation_marks(truth)))
    out.append(Seed("records.json", operation_records(truth)))
    out.append(Seed("train.log", timer_log()))
    out.append(Seed("rank-00000.jsonl", recorded()))
    out.append(Seed("names.toml", NAMES))
    return tuple(out)


# --- mutation ------------------------------------------------------------------------------------------------


def mutate(seed: Seed, rng: random.Random) -> bytes:
    """The seed's bytes with something wrong: in a field where it is JSON, or anywhere."""
    if seed.name.endswith(".json") and rng.random() < 0.5:
        return _fields(seed.data, rng)
    if seed.name.endswith(".gz") and rng.random() < 0.5:
        return gzip.compress(_bytes(gzip.decompress(seed.data), rng), 1, mtime=0)
    return _bytes(seed.data, rng)


def _bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 2, 8, 100, 5000))
        action = rng.randrange(6)
        if action == 0:
            del out[at : at + length]
        elif action == 1:
            out[at:at] = out[at : at + length]
        elif action == 2:
            out[at : at + 4] = rng.randbytes(rng.randint(0, 8))
        elif action == 3:
            out[at:at] = rng.choice(TOKENS)
        elif action == 4 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif action == 5 and rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def _fields(data: bytes, rng: random.Random) -> bytes:
    document = json.loads(data)
    for _ in range(rng.randint(1, 8)):
        _change(document, rng)
    return json.dumps(document).encode()


def _change(document: Any, rng: random.Random) -> None:
    """One value somewhere below becomes another one, moves, or goes."""
    here = document
    while True:
        keys: list[Any] = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(here[key], dict | list) and here[key] and rng.random() < 0.9:
            here = here[key]
            continue
        if rng.random() < 0.2:
            del here[key]
        else:
            here[key] = rng.choice([*ODD, rng.randrange(-(1 << 40), 1 << 40), rng.random() * 1e6])
        return


# --- what must hold ------------------------------------------------------------------------------------------


def attempt(number: int, seed_of_all: int, folder: Path) -> str:
    """Read mutated file `number`, analyse it, and say how it ended: "result", or the kind of the refusal.

    Raises whatever is no `BubblescopeError`: that is what a fuzzer looks for.
    """
    rng = random.Random(f"{seed_of_all}:{number}")
    every = seeds(folder)
    seed = every[number % len(every)]
    work = folder / "case"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name, data in seed.beside:
        (work / name).write_bytes(data)
    (work / seed.name).write_bytes(mutate(seed, rng))
    return _outcome(seed, work)


def _outcome(seed: Seed, work: Path) -> str:
    go: Callable[[], object] = lambda: build(prepare(read(sorted(str(p) for p in work.iterdir())))).to_json()  # noqa: E731
    if seed.name.endswith(".toml"):
        go = lambda: usernames.load(work / seed.name)  # noqa: E731
    try:
        go()
    except BubblescopeError as error:
        assert str(error)
        return type(error).__name__
    return "result"


def large_trace(size: int) -> bytes:
    """A sound Kineto trace of about `size` bytes, with operations of some tens of kernels."""
    shape = Shape(**{**SMALL.__dict__, "kernels": (40, 70), "microbatches": 8})
    one = len(dumps(traces(simulate(shape))[0]))
    return dumps(traces(simulate(Shape(**{**shape.__dict__, "steps": shape.steps * size // one + 1})))[0]).encode()
