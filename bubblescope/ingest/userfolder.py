"""Where things are kept between runs: this user's cache folder."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def cache_folder(name: str) -> Path:
    """``~/.cache/bubblescope/NAME`` (XDG_CACHE_HOME, BUBBLESCOPE_CACHE_DIR), made where it is missing.

    Raises OSError when it cannot be made, or when others could write there: what lies in it is loaded and trusted.
    """
    folder = _root() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if hasattr(os, "getuid") and (info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{folder} belongs to, or can be written by, others")
    return folder


def _root() -> Path:
    own = os.environ.get("BUBBLESCOPE_CACHE_DIR")
    if own:
        return Path(own)
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "bubblescope" / "cache"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "bubblescope"
