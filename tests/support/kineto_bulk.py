"""Kineto traces of any size, written the way torch 2.13 writes them: one rank in the middle of a 1F1B pipeline.

The mix is that of a training step recorded with stacks: Python functions, CPU operators (forward ones with a
sequence number, backward ones inside autograd calls), runtime calls, flow events, kernels, and NCCL send/recv
kernels with their metadata. Times have three decimals and stand relative to ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import argparse
import gzip
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84929347584,
      "computeMajor": 9, "computeMinor": 0,
      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
      "regsPerBlock": 65536, "warpSize": 32,
      "sharedMemPerBlock": 49152, "numSms": 132
    }
  ],
  "cupti_version": 26,
  "distributedInfo": {"backend": "nccl", "rank": %(rank)d, "world_size": %(world)d, "pg_count": 1, "pg_config": [
    {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": %(world)d, "ranks": %(ranks)s}
  ], "nccl_version": "2.27.5"},
  "with_stack": 1,
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1766000000000000000,
  "traceEvents": [
"""
_TAIL = """  {
    "name": "process_name", "ph": "M", "ts": 1000.000, "pid": 0, "tid": 0,
    "args": {
      "name": "python"
    }
  },
  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": %.3f
  }
  ],
  "traceName": "rank%d.pt.trace.json"
}
"""
_X = """  {
    "ph": "X", "cat": "%s", "name": "%s", "pid": %d, "tid": %d,
    "ts": %.3f, "dur": %.3f,
    "args": {
      %s
    }
  },
"""
_FLOW_S = """  {
    "ph": "s", "id": %d, "pid": %d, "tid": %d, "ts": %.3f,
    "cat": "ac2g", "name": "ac2g"
  },
"""
_FLOW_F = """  {
    "ph": "f", "id": %d, "pid": 0, "tid": %d, "ts": %.3f,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },
"""
_KERNEL_ARGS = (
    '"External id": %d,\n      "queued": 0, "device": 0, "context": 1,\n      "stream": %d, "correlation": %d,\n'
    '      "registers per thread": %d,\n      "shared memory": %d,\n      "blocks per SM": 4.848485,\n'
    '      "warps per SM": 19.393939,\n      "grid": [%d, 1, 1],\n      "block": [128, 1, 1],\n'
    '      "est. achieved occupancy %%": 38'
)
_NCCL_ARGS = (
    ',\n      "Collective name": "%s", "In msg nelems": 8388608, "Out msg nelems": 8388608, "Group size": %d, '
    '"dtype": "BFloat16",\n      "Process Group Name": "0", "Process Group Description": "default_pg", '
    '"Process Group Ranks": "%s", "Rank": %d, "Src Rank": %d, "Dst Rank": %d, "Seq": %d, '
    '"Comms Id": 18446744073709551557'
)
_SOURCES = tuple(
    f"{file}({line}): {what}"
    for file, line, what in (
        ("torch/nn/modules/module.py", 1779, "_wrapped_call_impl"),
        ("torch/nn/modules/module.py", 1790, "_call_impl"),
        ("torch/nn/modules/linear.py", 134, "forward"),
        ("torch/nn/modules/normalization.py", 229, "forward"),
        ("torch/distributed/pipelining/stage.py", 652, "forward_one_chunk"),
        ("torch/distributed/pipelining/schedules.py", 880, "_step_microbatches"),
        ("torchtitan/models/llama3/model.py", 311, "forward"),
        ("torch/autograd/graph.py", 824, "_engine_run_backward"),
    )
)
_OPS = ("aten::linear", "aten::mm", "aten::transpose", "aten::view", "aten::mul", "aten::add", "aten::rsqrt",
        "aten::scaled_dot_product_attention", "aten::silu", "aten::empty_strided")  # fmt: skip
_KERNELS = (
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, "
    "at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, "
    "float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, "
    "float>, unsigned int, float, 4, 4>)",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>"
    "(pytorch_flash::Flash_fwd_params)",
)
_UNREAD = ('"cat": "python_function"', '"cat": "ac2g"', '"name": "aten::view"', '"name": "aten::empty"')
_SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Bulk:
    """One rank's trace of about `bytes`; rank `rank` of `stages`, `microbatches` per step; same seed, same file."""

    bytes: int
    rank: int = 1
    stages: int = 4
    microbatches: int = 8
    layers: int = 12
    seed: int = 7


def write(path: Path, bulk: Bulk) -> int:
    """Write the trace (packed when `path` ends in .gz); its size before packing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = 0
    with gzip.open(path, "wb", compresslevel=6) if path.suffix == ".gz" else path.open("wb") as file:
        for text in pieces(bulk):
            raw = text.encode()
            file.write(raw)
            done += len(raw)
    return done


def pieces(bulk: Bulk) -> Iterator[str]:
    """The document in pieces of some hundred kB; as many steps as it takes to reach the size."""
    rank = _Rank(bulk)
    info = {"rank": bulk.rank, "world": bulk.stages, "ranks": list(range(bulk.stages))}
    head = _HEAD % info
    done = len(head)
    yield head
    step = 0
    while done < bulk.bytes:
        for text in rank.step(step):
            done += len(text)
            yield text
        step += 1
    yield _TAIL % (rank.host, bulk.rank)


class _Rank:
    """Writes step after step; `host` and `device` are the clocks (µs) of its two threads and its stream."""

    def __init__(self, bulk: Bulk) -> None:
        self.bulk = bulk
        self.random = random.Random(bulk.seed + bulk.rank)
        self.pid = 4000 + bulk.rank
        self.host = self.device = 5_000_000_000.0
        self.id = 1000
        self.sequence = 0
        self.nccl_seq = 0
        self.out = io.StringIO()

    def step(self, index: int) -> Iterator[str]:
        begin = self.host = max(self.host, self.device)
        for kind, part in self._order():
            self._action(kind, part)
            yield self._taken()
        for _ in range(3):
            self._op("aten::_fused_adamw_", 0, "void at::native::multi_tensor_apply_kernel<FusedAdam>(int)")
        self.host = self.device = max(self.host, self.device) + 50.0
        self._x("user_annotation", f"ProfilerStep#{index}", self.pid, begin, self.host - begin, '"External id": 1')
        yield self._taken()

    def _taken(self) -> str:
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text

    def _order(self) -> list[tuple[str, int]]:
        p, m = self.bulk.stages, self.bulk.microbatches
        warm = min(p - 1 - self.bulk.rank, m)
        out = [("F", i) for i in range(warm)]
        for i in range(m - warm):
            out += [("F", warm + i), ("B", i)]
        return out + [("B", i) for i in range(m - warm, m)]

    def _action(self, kind: str, part: int) -> None:
        before, after = (-1, 1) if kind == "F" else (1, -1)
        self._message("recv", self.bulk.rank + before)
        began = self.host
        for layer in range(self.bulk.layers):
            self._layer(kind, layer)
        name = f"{'Forward' if kind == 'F' else 'Backward'} {part}"
        self._x("user_annotation", name, self.pid, began, self.host - began, '"External id": 2')
        self._message("send", self.bulk.rank + after)

    def _layer(self, kind: str, layer: int) -> None:
        for k in range(4):
            self._functions(6)
            op = _OPS[(layer + k) % len(_OPS)]
            if kind == "B":
                began, thread = self.host, self.pid + 77
                self._op(op, thread, _KERNELS[k])
                name = f"autograd::engine::evaluate_function: {op}Backward0"
                args = f'"External id": {self.id}, "Sequence number": {self.sequence}, "Fwd thread id": 1'
                self._x("cpu_op", name, thread, began, self.host - began, args)
            else:
                self._op(op, self.pid, _KERNELS[k])

    def _functions(self, count: int) -> None:
        for depth in range(count):
            self.id += 1
            args = f'"Python id": {self.id},\n      "Python parent id": {self.id - 1},\n      "Ev Idx": {self.id}'
            length = 3.0 * (count - depth) + self.random.random()
            self._x("python_function", _SOURCES[self.id % len(_SOURCES)], self.pid, self.host, length, args)
            self.host += 0.4

    def _op(self, name: str, thread: int, kernel: str) -> None:
        """An operator with two views inside it, a launch, its kernel and the flow between them."""
        thread = thread or self.pid
        began = self.host
        self.sequence += 1
        for inner in ("aten::view", "aten::empty"):
            self.id += 1
            args = (
                f'"External id": {self.id},"Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": '
                f'["c10::BFloat16", "ScalarList", ""], "Input Strides": [[4096, 1], [], []], "Input Dims": '
                f'[[4096, 4096], [], []], "Ev Idx": {self.id}'
            )
            self._x("cpu_op", inner, thread, self.host + 0.3, 1.1, args)
            self.host += 1.2
        self._launch(kernel, thread, 20 + 300 * self.random.random(), 7)
        args = (
            f'"External id": {self.id},"Sequence number": {self.sequence}, "Fwd thread id": 0, "Record function id": 0,'
            f' "Ev Idx": {self.id}'
        )
        self._x("cpu_op", name, thread, began, self.host - began, args)

    def _launch(self, kernel: str, thread: int, length: float, stream: int, nccl: str = "") -> None:
        self.id += 1
        at, corr = self.host, self.id
        args = f'"External id": {corr},\n      "cbid": 211, "correlation": {corr}'
        self._x("cuda_runtime", "cudaLaunchKernel", thread, at, 3.7, args)
        self.out.write(_FLOW_S % (corr, self.pid, thread, at))
        self.host += 4.3
        start = max(self.device, self.host + 2.0)
        kernel_args = _KERNEL_ARGS % (corr, stream, corr, 32 + corr % 128, corr % 7 * 1024, 1 + corr % 640) + nccl
        self._x("kernel", kernel, stream, start, length, kernel_args, pid=0)
        self.out.write(_FLOW_F % (corr, stream, start))
        self.device = start + length + 0.5

    def _message(self, what: str, peer: int) -> None:
        if not 0 <= peer < self.bulk.stages:
            return
        self.nccl_seq += 1
        me, world = self.bulk.rank, self.bulk.stages
        source, target = (me, peer) if what == "send" else (peer, me)
        ranks = list(range(world))
        args = _NCCL_ARGS % (what, world, ranks, me, source, target, self.nccl_seq)
        self._launch(_SENDRECV, self.pid, 30 + 400 * self.random.random(), 20, args)

    def _x(self, cat: str, name: str, thread: int, start: float, length: float, args: str, pid: int = -1) -> None:
        self.out.write(_X % (cat, name, self.pid if pid < 0 else pid, thread, start, length, args))


def unread(size: int) -> str:
    """About `size` bytes of events of which nothing is kept (Python functions, views, arrows), each with its comma."""
    out, done = [], 0
    for text in pieces(Bulk(8 * size)):
        for event in text.split("  },\n")[:-1]:
            if any(mark in event for mark in _UNREAD) and "Sequence number" not in event and done < size:
                out.append(f"{event}  }},\n")
                done += len(out[-1])
    return "".join(out)


def events_for_fuzzing() -> bytes:
    """A JSON array of some events of every kind, with all that a scanner decides by: escapes, UTF-8, odd numbers."""
    text = "".join(pieces(Bulk(30_000, layers=1, microbatches=2)))
    body = text[text.index('"traceEvents": [') + 16 : text.rindex("]")].encode()
    odd = (
        b'{"ph": "X", "cat": "Kernel", "name": "caf\\u00e9 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", '
        b'"pid": "0x1f", "tid": "7", "ts": 12.0005, "dur": 4458676416788.066, '
        b'"args": {"stream": "0x0", "External id": -1, "a": [1e5, null, true]}}'
    )
    return b"[" + odd + b"," + body + b"]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one large trace.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
    print(write(options.path, Bulk(int(options.megabytes * 1e6), rank=options.rank)))


if __name__ == "__main__":
    main()
