"""Sends and receives between the stages."""

from __future__ import annotations

import functools
from typing import Any

from bubblescope.capture.hooks.megatron.job import Job, Message
from bubblescope.capture.hooks.shared import TimedWork
from bubblescope.model.kinds import Lane


def hook_messages(job: Job, p2p: Any) -> None:
    """`_communicate` is what all the named functions end in: a method since 0.14, a module function before."""
    owner = getattr(p2p, "P2PCommunicator", None)
    job.recorder.patches.around(
        p2p if owner is None else owner,
        "_communicate",
        "p2p",
        needs=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        optional={"wait_on_reqs": True},
        before=functools.partial(_communication_begins, job),
        after=functools.partial(_communication_ends, job),
    )


def _communication_begins(
    job: Job, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool, waits: bool
) -> tuple[Any, ...] | None:
    if not job.recorder.rule.current.sampled or not (
        send_next is not None or send_prev is not None or recv_prev or recv_next
    ):
        return None
    return send_next, send_prev, recv_prev, recv_next, waits, job.recorder.mark()


def _communication_ends(job: Job, token: tuple[Any, ...], result: Any) -> Any:
    send_next, send_prev, recv_prev, recv_next, waits, start = token
    recorder = job.recorder
    end = recorder.mark()
    found = {}
    if send_next is not None:
        found["send_next"] = job.message("send", "act", send_next)
    if recv_prev:
        found["recv_prev"] = job.message("recv", "act", result[0])
    if send_prev is not None:
        found["send_prev"] = job.message("send", "grad", send_prev)
    if recv_next:
        found["recv_next"] = job.message("recv", "grad", result[1])
    messages = {name: message for name, message in found.items() if message is not None}
    if not messages:
        return None
    carried = (job.labels, tuple(messages.values()))
    requests = result[2] if len(result) > 2 else None
    if waits or not requests:
        # The call posts, and returns when all is there: on the compute stream it is one wait.
        recorder.add(Lane.POST, start, start, carried)
        recorder.add(Lane.WAIT, start, end, carried)
        return None
    recorder.add(Lane.POST, start, end, carried)
    return (*result[:2], _timed(job, requests, messages))


def _timed(job: Job, requests: Any, messages: dict[str, Message]) -> Any:
    """The same requests, whose waits are recorded when the schedule comes to them."""
    recorder, labels = job.recorder, job.labels
    if isinstance(requests, dict):
        return {
            name: TimedWork(recorder, work, (labels, (messages[name],)) if name in messages else ())
            for name, work in requests.items()
        }
    carried = (labels, tuple(messages.values()))
    return [TimedWork(recorder, work, () if i else carried) for i, work in enumerate(requests)]
