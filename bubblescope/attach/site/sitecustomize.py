"""`bubblescope run` puts this file's folder on PYTHONPATH, so every Python that the job starts runs it at its start.

It hands over to the `sitecustomize` that would have run without us, and waits for the process to import torch: most
processes of a job never do, and shall not notice. Nothing here may raise, and nothing is imported that Python has
not imported by now.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def _run_the_one_behind() -> None:
    """The user's or the distribution's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib costs milliseconds)
    ours = [folder for folder in sys.path if os.path.abspath(folder or ".") == here]  # noqa: PTH100
    sys.path[:] = [folder for folder in sys.path if folder not in ours]
    own = sys.modules.pop(__name__, None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise  # theirs is there and fails: Python reports it as it would without us
        if own is not None:
            sys.modules[__name__] = own
    finally:
        sys.path[:0] = ours


class _UntilTorch:
    """On `sys.meta_path` until the process imports torch; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch":
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            try:
                _find_bubblescope()
                from bubblescope.attach import sitehook

                sitehook.install()
            except Exception as error:  # the job must go on as it would without us
                print(f"bubblescope: nothing is recorded: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def _find_bubblescope() -> None:
    """Where the job's Python has no bubblescope installed, the one that launched the job serves."""
    import importlib.util

    if importlib.util.find_spec("bubblescope") is not None:
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    spec = importlib.util.spec_from_file_location(
        "bubblescope",
        os.path.join(package, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[package],
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["bubblescope"] = module
        spec.loader.exec_module(module)


if os.environ.get("BUBBLESCOPE", "off") not in ("", "off"):
    sys.meta_path.insert(0, _UntilTorch())
_run_the_one_behind()
