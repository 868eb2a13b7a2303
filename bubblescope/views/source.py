"""What a view needs from a report. Views read; they conclude nothing."""

from __future__ import annotations

from typing import Any, Protocol

import pandas as pd


class ReportLike(Protocol):
    """The readable side of `bubblescope.report.build.Report`.

    data: report.json as CONTRACT.md has it. ops, gaps, device (kernels), messages: rows in seconds from the start of
    the first analysed window. ideal: the operations of one replayed ideal step, may be empty.
    """

    @property
    def data(self) -> dict[str, Any]: ...
    @property
    def ops(self) -> pd.DataFrame: ...
    @property
    def gaps(self) -> pd.DataFrame: ...
    @property
    def steps(self) -> pd.DataFrame: ...
    @property
    def gpus(self) -> pd.DataFrame: ...
    @property
    def causes(self) -> pd.DataFrame: ...
    @property
    def p2p(self) -> pd.DataFrame: ...
    @property
    def advice(self) -> pd.DataFrame: ...
    @property
    def device(self) -> pd.DataFrame: ...
    @property
    def messages(self) -> pd.DataFrame: ...
    @property
    def ideal(self) -> pd.DataFrame: ...
    @property
    def stage_balance(self) -> pd.DataFrame: ...
